// error: E0505
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let source = vec![1u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    let escaped = ferry.scope(|scope| scope.icopy(&source, &mut target).unwrap());
    drop(target);
    escaped.wait().unwrap();
}
