// error: E0505
fn main() {
    let ferry = memferry_copy::Ferry::new().unwrap();
    let transfer = ferry.icopy(vec![1u32; 1 << 20], vec![0u32; 1 << 20]).unwrap();
    let ready = transfer.wait_range(..1).unwrap();
    let _buffers = transfer.wait().unwrap();
    assert_eq!(ready[0], 1);
}
