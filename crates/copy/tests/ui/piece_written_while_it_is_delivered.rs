// error: E0506
use memferry_copy::{Ferry, Options};

fn main() {
    let ferry = Ferry::new().unwrap();
    let mut packets = [[1u8; 1460]; 2];
    let mut target = vec![0u8; 2 * 1460];
    ferry.scope(|scope| {
        let pieces = [&packets[0][..], &packets[1][..]];
        let delivery = scope.ideliver_with(&pieces, &mut target, Options::new()).unwrap();
        packets[1][0] = 2;
        delivery.wait().unwrap();
    });
}
