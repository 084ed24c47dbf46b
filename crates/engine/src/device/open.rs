//! Devices of the machine that were handed over to programs.

use std::sync::Arc;

use memferry_sys::device::Device;
use memferry_sys::vfio::pci::Id;
use memferry_sys::vfio::{Bus, PciDevice, VfioDevice};

use crate::contract::OpenError;

/// The addresses of the devices of a kind that were handed over to programs. Nothing is opened, and
/// nothing is taken from the kernel.
pub fn ready(ids: &[Id]) -> Vec<String> {
    let found = Bus::default().find(ids).into_iter();
    found.filter(PciDevice::is_handed_over).map(|device| device.address).collect()
}

/// Opens devices that share their mappings.
pub(crate) fn open_all(
    engine: &str,
    addresses: &[impl AsRef<str>],
    ids: &[Id],
) -> Result<Vec<Arc<dyn Device>>, OpenError> {
    // Before anything is opened: nobody is to be told how to hand over something else.
    for address in addresses.iter().map(AsRef::as_ref) {
        if let Some(PciDevice { id: (maker, kind), .. }) =
            Bus::default().device(address).filter(|device| !ids.contains(&device.id))
        {
            let reason = format!(
                "{address} ({maker:04x}:{kind:04x}) is no device that this engine drives: `memferry \
                 doctor` lists those there are"
            );
            return Err(refused(engine, &reason));
        }
    }
    let devices = VfioDevice::open_all(addresses).map_err(|error| refused(engine, &error))?;
    Ok(devices.into_iter().map(|device| Arc::new(device) as Arc<dyn Device>).collect())
}

/// Why no channel is opened on a device that did not stop.
pub(crate) const CUT_OFF: &str = "the device failed and lost its access to memory: open it again";

pub(crate) fn refused(engine: &str, reason: &dyn std::fmt::Display) -> OpenError {
    OpenError::System { engine: engine.into(), reason: reason.to_string() }
}
