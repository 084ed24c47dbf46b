// error: E0133
use std::sync::Arc;

fn opens(device: Arc<dyn memferry_sys::device::DmaDevice>) {
    let _ = memferry_engine::ioat::IoatEngine::over(&[device]);
}

fn main() {}
