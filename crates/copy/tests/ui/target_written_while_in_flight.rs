// error: E0499
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let source = vec![1u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    ferry.scope(|scope| {
        let transfer = scope.icopy(&source, &mut target).unwrap();
        target[0] = 2;
        transfer.wait().unwrap();
    });
}
