// compiles
use memferry_copy::{Ferry, Notification, Options};

fn main() {
    let ferry = Ferry::new().unwrap();
    let source = vec![1u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    let variable = Notification::new(0);
    ferry.scope(|scope| {
        let options = Options::new().notify(&variable, 1);
        let transfer = scope.icopy_with(&source, &mut target, options).unwrap();
        let target = transfer.into_target().unwrap();
        target[0] = 2;
    });
    let packets = [[1u8; 1460]; 2];
    let mut message = vec![0u8; 2 * 1460];
    ferry.scope(|scope| {
        // The list of segments may be dropped while they are in flight.
        let delivery = {
            let pieces = vec![&packets[0][..], &packets[1][..]];
            let options = Options::new().notify(&variable, 2);
            scope.ideliver_with(&pieces, &mut message, options).unwrap()
        };
        delivery.into_target().unwrap()[0] = 2;
    });
    target[1] = 3;
    let transfer = ferry.icopy(source, target).unwrap();
    let (_, mut target) = transfer.wait().unwrap();
    target[0] = 2;
}
