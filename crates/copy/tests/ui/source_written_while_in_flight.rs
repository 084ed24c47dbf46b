// error: E0502
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let mut source = vec![1u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    ferry.scope(|scope| {
        let transfer = scope.icopy(&source, &mut target).unwrap();
        source[0] = 2;
        transfer.wait().unwrap();
    });
}
