//! Giving the network card to programs: its driver becomes VFIO's, which lets a process in user space
//! be the driver.

use std::fs;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/sys/bus/pci/devices";
const DRIVER: &str = "vfio-pci";

/// Vendor and device of QEMU's e1000e, an Intel 82574L.
const CARD: (&str, &str) = ("0x8086", "0x10d3");

/// Hands over every such card. It is an error if there is none.
pub(super) fn hand_over() -> Result<(), String> {
    let entries = fs::read_dir(DEVICES).map_err(|error| format!("{DEVICES}: {error}"))?;
    let devices = entries.flatten().map(|entry| entry.path());
    let cards: Vec<PathBuf> = devices.filter(|device| is_card(device)).collect();
    if cards.is_empty() {
        return Err("the machine has no e1000e card".into());
    }
    cards.iter().try_for_each(|card| give(card))
}

fn is_card(device: &Path) -> bool {
    let is = |name: &str, value: &str| {
        fs::read_to_string(device.join(name)).is_ok_and(|text| text.trim() == value)
    };
    is("vendor", CARD.0) && is("device", CARD.1)
}

fn give(card: &Path) -> Result<(), String> {
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
