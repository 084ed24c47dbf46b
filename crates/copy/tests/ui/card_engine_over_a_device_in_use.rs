// error: E0133
use std::sync::Arc;

use memferry_engine::nic::{NicEngine, Settings};

fn opens(device: Arc<dyn memferry_sys::device::Device>) {
    let _ = NicEngine::over(device, Settings::default());
}

fn main() {}
