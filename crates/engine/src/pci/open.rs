//! Devices of the machine that are bound to vfio-pci.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::device::DmaDevice;
use memferry_sys::vfio::pci::PciId;
use memferry_sys::vfio::{PciBus, PciDevice, VfioDevice};

use crate::contract::OpenError;

/// The addresses of the devices with these ids that are bound to vfio-pci. Opens nothing, and takes
/// nothing from the kernel.
///
/// ```
/// use memferry::engine::pci::available_devices;
///
/// const CARD: (u16, u16) = (0x8086, 0x10d3); // vendor and device of the 82574L
/// for address in available_devices(&[CARD]) {
///     println!("{address} is bound to vfio-pci");
/// }
/// ```
pub fn available_devices(ids: &[PciId]) -> Vec<String> {
    let found = PciBus::default().find(ids).into_iter();
    found.filter(PciDevice::is_bound_to_vfio).map(|device| device.address).collect()
}

/// Opens devices that share their mappings.
pub(crate) fn open_all(
    engine: &str,
    addresses: &[impl AsRef<str>],
    ids: &[PciId],
) -> Result<Vec<Arc<dyn DmaDevice>>, OpenError> {
    let devices = open_vfio(engine, addresses, ids)?;
    Ok(devices.into_iter().map(|device| Arc::new(device) as Arc<dyn DmaDevice>).collect())
}

/// Like [`open_all`], for drivers that need more of a device than its registers.
pub(crate) fn open_vfio(
    engine: &str,
    addresses: &[impl AsRef<str>],
    ids: &[PciId],
) -> Result<Vec<VfioDevice>, OpenError> {
    // Checked before anything is opened: the error must not tell the user to bind a device that
    // this engine cannot drive.
    for address in addresses.iter().map(AsRef::as_ref) {
        if let Some(PciDevice { id: (maker, kind), .. }) =
            PciBus::default().device(address).filter(|device| !ids.contains(&device.id))
        {
            let reason = format!(
                "{address} ({maker:04x}:{kind:04x}) is not a device of this engine: `memferry \
                 doctor --verbose` lists the available ones"
            );
            return Err(open_error(engine, &reason));
        }
    }
    VfioDevice::open_all(addresses).map_err(|error| open_error(engine, &error))
}

/// The names without those that repeat the one before.
pub(crate) fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut names: Vec<String> = names.collect();
    names.dedup();
    names
}

/// The reason why no channel is opened on a device that did not stop.
pub(crate) const ACCESS_REVOKED: &str =
    "the device failed and lost its access to memory: open it again";

pub(crate) fn open_error(engine: &str, reason: &dyn std::fmt::Display) -> OpenError {
    OpenError::System { engine: engine.into(), reason: reason.to_string() }
}

/// Polls a condition until it holds or `limit` expires; returns whether it holds.
pub(crate) fn poll_until(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !condition() {
        if Instant::now() > deadline {
            return condition();
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    true
}
