// error: E0133
fn starts(device: &dyn memferry_sys::device::DmaDevice) {
    device.write64(0x90, 0xDEAD_0000);
}

fn main() {}
