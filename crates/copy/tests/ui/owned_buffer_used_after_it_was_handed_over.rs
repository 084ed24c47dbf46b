// error: E0382
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let source = vec![1u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    let transfer = ferry.icopy(source, target).unwrap();
    target[0] = 2;
    transfer.wait().unwrap();
}
