//! Binding the network card to vfio-pci, so that a process in user space can drive it.

use std::fs;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/sys/bus/pci/devices";
const DRIVER: &str = "vfio-pci";

/// The PCI vendor and device ID of QEMU's e1000e, an Intel 82574L.
const E1000E_ID: (&str, &str) = ("0x8086", "0x10d3");

/// Binds all such cards to vfio-pci. Fails if there is none.
pub(super) fn bind_to_vfio() -> Result<(), String> {
    let entries = fs::read_dir(DEVICES).map_err(|error| format!("{DEVICES}: {error}"))?;
    let devices = entries.flatten().map(|entry| entry.path());
    let cards: Vec<PathBuf> = devices.filter(|device| is_e1000e(device)).collect();
    if cards.is_empty() {
        return Err("the machine has no e1000e card".into());
    }
    cards.iter().try_for_each(|card| bind(card))
}

fn is_e1000e(device: &Path) -> bool {
    let is = |name: &str, value: &str| {
        fs::read_to_string(device.join(name)).is_ok_and(|text| text.trim() == value)
    };
    is("vendor", E1000E_ID.0) && is("device", E1000E_ID.1)
}

fn bind(card: &Path) -> Result<(), String> {
    let address = card.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bound = card.join("driver");
    if bound.exists() {
        write(&bound.join("unbind"), &address)?;
    }
    write(&card.join("driver_override"), DRIVER)?;
    write(Path::new("/sys/bus/pci/drivers_probe"), &address)?;
    let group = fs::read_link(card.join("iommu_group"))
        .map_err(|_| format!("the card {address} is in no group: the IOMMU does not work"))?;
    let file = Path::new("/dev/vfio").join(group.file_name().unwrap_or_default());
    match file.exists() {
        true => Ok(()),
        false => Err(format!("{DRIVER} did not take the card {address}: no {}", file.display())),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
