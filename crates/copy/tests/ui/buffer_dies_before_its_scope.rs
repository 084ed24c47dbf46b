// error: E0597
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let source = vec![1u8; 1 << 20];
    ferry.scope(|scope| {
        let mut target = vec![0u8; 1 << 20];
        let _transfer = scope.icopy(&source, &mut target).unwrap();
    });
}
