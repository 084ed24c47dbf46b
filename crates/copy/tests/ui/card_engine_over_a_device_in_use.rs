// error: E0133
use std::sync::Arc;

use memferry_engine::nic::{NicConfig, NicEngine};

fn opens(device: Arc<dyn memferry_sys::device::DmaDevice>) {
    let _ = NicEngine::over(device, NicConfig::default());
}

fn main() {}
