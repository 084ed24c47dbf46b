//! The card that is tried: a real one where there is one, a model elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_engine::nic::model::{Faults, NicModel};
use memferry_engine::nic::{NicEngine, Settings};
use memferry_sys::device::Device;
use memferry_sys::vfio::pci::{Bus, E1000E};
use memferry_sys::vfio::{OpenError, VfioDevice};

use crate::spoiled::Spoiled;

/// Names the card: an address on the bus, or `auto`.
const VARIABLE: &str = "MEMFERRY_NIC";

/// The address of the real card, if there is one to be tried.
pub(crate) fn address() -> Option<String> {
    let named = std::env::var(VARIABLE).ok();
    let address = match named.as_deref() {
        Some("auto") => Bus::default().find(E1000E).into_iter().next().map(|card| card.address),
        Some(address) => Some(address.to_owned()),
        None => None,
    };
    let is_required = memferry_testing::is_required(memferry_testing::Requirement::Nic);
    assert!(address.is_some() || !is_required, "{VARIABLE}={named:?} names no card");
    address
}

/// The real card, if there is one to be tried.
pub(crate) fn real() -> Option<Arc<VfioDevice>> {
    let address = address()?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match VfioDevice::open(&address) {
            Ok(card) => return Some(Arc::new(card)),
            // A thread of the test before may still be about to let go of it.
            Err(OpenError::Busy { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("the card {address} cannot be had: {error}"),
        }
    }
}

/// The engine over the card.
pub(crate) fn engine() -> Arc<NicEngine> {
    faulty_engine(Settings::default(), Faults::default())
}

/// The engine over a card that loses or damages frames once it is in use.
pub(crate) fn faulty_engine(settings: Settings, faults: Faults) -> Arc<NicEngine> {
    let Some(real) = real() else {
        let model = NicModel::new();
        let engine = over(model.clone(), settings);
        model.set_faults(faults);
        return engine;
    };
    match faults == Faults::default() {
        true => over(real, settings),
        false => over(Arc::new(Spoiled::new(real, faults)), settings),
    }
}

pub(crate) fn over(device: Arc<dyn Device>, settings: Settings) -> Arc<NicEngine> {
    // SAFETY: a model, or one that passes on what it is told; nobody else writes its registers.
    Arc::new(unsafe { NicEngine::over(device, settings) }.expect("a card that works"))
}
