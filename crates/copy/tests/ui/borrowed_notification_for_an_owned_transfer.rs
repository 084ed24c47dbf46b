// error: E0597
use memferry_copy::{Ferry, Notification, Options};

fn main() {
    let ferry = Ferry::new().unwrap();
    let transfer = {
        let variable = Notification::new(0);
        let options = Options::new().notify(&variable, 1);
        ferry.icopy_with(vec![1u8; 1 << 20], vec![0u8; 1 << 20], options).unwrap()
    };
    transfer.wait().unwrap();
}
