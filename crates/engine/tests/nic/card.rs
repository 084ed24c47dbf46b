//! The card under test: a real one if there is one, a model otherwise.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_engine::nic::{NicConfig, NicEngine};
use memferry_engine::testing::nic_model::{NicFaults, NicModel};
use memferry_sys::device::DmaDevice;
use memferry_sys::vfio::pci::{E1000E, PciBus};
use memferry_sys::vfio::{VfioDevice, VfioError};

use crate::faulty_device::FaultyDevice;

/// Names the card: a bus address, or `auto`.
const VARIABLE: &str = "MEMFERRY_NIC";

/// The address of the real card, if there is one to test.
pub(crate) fn address() -> Option<String> {
    let named = std::env::var(VARIABLE).ok();
    let address = match named.as_deref() {
        Some("auto") => PciBus::default().find(E1000E).into_iter().next().map(|card| card.address),
        Some(address) => Some(address.to_owned()),
        None => None,
    };
    let is_required = memferry_testing::is_required(memferry_testing::Requirement::Nic);
    assert!(address.is_some() || !is_required, "{VARIABLE}={named:?} names no card");
    address
}

/// The real card, if there is one to test.
pub(crate) fn real() -> Option<Arc<VfioDevice>> {
    let address = address()?;
    let deadline = Instant::now() + Duration::from_secs(200);
    loop {
        match VfioDevice::open(&address) {
            Ok(card) => return Some(Arc::new(card)),
            // A thread of the previous test may still hold it.
            Err(VfioError::Busy { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("the card {address} cannot be opened: {error}"),
        }
    }
}

/// The engine over the card.
pub(crate) fn engine() -> Arc<NicEngine> {
    faulty_engine(NicConfig::default(), NicFaults::default())
}

/// The engine over a card that loses or corrupts frames once it is in use.
pub(crate) fn faulty_engine(config: NicConfig, faults: NicFaults) -> Arc<NicEngine> {
    let Some(real) = real() else {
        let model = NicModel::new();
        let engine = over(model.clone(), config);
        model.set_faults(faults);
        return engine;
    };
    match faults == NicFaults::default() {
        true => over(real, config),
        false => over(Arc::new(FaultyDevice::new(real, faults)), config),
    }
}

pub(crate) fn over(device: Arc<dyn DmaDevice>, config: NicConfig) -> Arc<NicEngine> {
    // SAFETY: a model, or a device that forwards to one; no other code writes its registers.
    Arc::new(unsafe { NicEngine::over(device, config) }.expect("a card that works"))
}
