//! Devices that can copy, and what stands between them and programs. Nothing is opened or changed.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use memferry_sys::residency;
use memferry_sys::vfio::pci::{Access, Companion, E1000E, IOAT, Id};
use memferry_sys::vfio::{Bus, OpenError, PciDevice, give_back, hand_over};

use super::{Check, Status};
use crate::size;

/// Less than this is soon used up by the buffers of a device.
const ENOUGH_LOCKED_BYTES: u64 = 64 << 20;

/// A kind of device that copies.
#[derive(Debug, Clone, Copy)]
struct Family {
    name: &'static str,
    ids: &'static [Id],
}

const FAMILIES: [Family; 2] =
    [Family { name: "I/OAT", ids: IOAT }, Family { name: "e1000e card", ids: E1000E }];

/// All checks, in the order in which they are shown.
pub(super) fn checks() -> Vec<Check> {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let bus = Bus::default();
    let maker = Maker::of(&read("/proc/cpuinfo"));
    let mut checks = vec![
        iommu(bus.groups(), &read("/proc/cmdline"), maker),
        vfio(bus.container()),
        locked(residency::lock_limit_bytes()),
    ];
    let found: Vec<(&Family, Vec<PciDevice>)> =
        FAMILIES.iter().map(|family| (family, bus.find(family.ids))).collect();
    if found.iter().all(|(_, devices)| devices.is_empty()) {
        checks.push(none());
    }
    for (family, devices) in &found {
        checks.extend(alike(devices).iter().map(|alike| some(family, alike, bus.container())));
    }
    for ((family, devices), variable) in found.iter().zip(["MEMFERRY_IOAT", "MEMFERRY_NIC"]) {
        let ready = devices.iter().filter(|device| device.is_handed_over()).count();
        let value = env::var_os(variable).map(|value| value.to_string_lossy().into_owned());
        checks.extend(value.map(|value| setting(variable, value.trim(), family, ready)));
    }
    checks.push(emulator(program("qemu-system-x86_64", env::var_os("PATH").as_deref())));
    checks
}

/// What the environment tells programs that do not choose by themselves.
fn setting(variable: &'static str, value: &str, family: &Family, ready: usize) -> Check {
    let name = family.name;
    let detail = match (value, ready) {
        ("off", _) => format!("off: only programs that ask for {name} use it"),
        ("auto", 0) => format!("auto: no {name} was handed over to programs, so none is used"),
        ("auto", _) => format!("auto: programs use {name}, {ready} handed over"),
        _ => format!("{value}: programs use this, and fail without it"),
    };
    Check::new(variable, Status::Ok, detail)
}

/// Who made the processor, and so the IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    Intel,
    Amd,
    Another,
}

impl Maker {
    fn of(cpuinfo: &str) -> Self {
        match () {
            () if cpuinfo.contains("GenuineIntel") => Self::Intel,
            () if cpuinfo.contains("AuthenticAMD") => Self::Amd,
            () => Self::Another,
        }
    }
}

fn iommu(groups: usize, command_line: &str, maker: Maker) -> Check {
    const NAME: &str = "IOMMU";
    if groups > 0 {
        let detail =
            format!("on, {groups} group(s): a device reaches only the memory mapped for it");
        return Check::new(NAME, Status::Ok, detail);
    }
    let missing = |detail: &str| Check::new(NAME, Status::Missing, detail);
    let says = |word: &str| command_line.split_whitespace().any(|said| said == word);
    let off = ["intel_iommu=off", "amd_iommu=off", "iommu=off"].into_iter().find(|word| says(word));
    if let Some(off) = off {
        return missing("switched off on the kernel's command line").cure(format!(
            "take {off} out of /etc/default/grub, sudo update-grub, and start the machine anew"
        ));
    }
    let asked = says("intel_iommu=on");
    match maker {
        Maker::Intel if !asked => missing("off: no device can be given to programs").cure(
            "add intel_iommu=on to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub, and \
             start the machine anew, with VT-d on in the firmware",
        ),
        Maker::Intel => missing("asked for, and not there: off in the firmware, or there is none")
            .cure("switch on VT-d in the firmware; a virtual machine needs one of its own"),
        Maker::Amd => missing("off in the firmware, or there is none").cure(
            "switch on AMD-Vi (IOMMU) in the firmware; a virtual machine needs one of its own",
        ),
        Maker::Another => missing("off, or there is none: no device can be given to programs")
            .cure("switch on the IOMMU (SMMU) in the firmware"),
    }
}

fn vfio(container: Access) -> Check {
    const NAME: &str = "VFIO";
    match container {
        Access::Allowed => Check::new(NAME, Status::Ok, "programs can have devices"),
        Access::Denied => Check::new(NAME, Status::Warn, "/dev/vfio/vfio may not be opened")
            .cure("sudo chmod 666 /dev/vfio/vfio, which gives access to no device yet"),
        Access::Missing => Check::new(NAME, Status::Missing, "not loaded (/dev/vfio/vfio)")
            .cure("sudo modprobe vfio-pci"),
    }
}

fn locked(limit: Option<u64>) -> Check {
    const NAME: &str = "device memory";
    match limit {
        None => Check::new(NAME, Status::Ok, "no limit of memory for devices"),
        Some(limit) => {
            let bytes = size::format(limit);
            let detail = format!("at most {bytes} mapped for devices at a time (locked memory)");
            if limit >= ENOUGH_LOCKED_BYTES {
                return Check::new(NAME, Status::Ok, detail);
            }
            Check::new(NAME, Status::Warn, detail)
                .cure("`ulimit -l unlimited` as root, or LimitMEMLOCK=infinity in the service")
        }
    }
}

fn none() -> Check {
    let detail = "no I/OAT engine and no e1000e card (82574L): nothing is broken, processors copy; \
                  such a device would copy while they do something else";
    Check::new("copy devices", Status::Missing, detail).cure(
        "servers with Intel processors up to Ice Lake have I/OAT: switch it on in the firmware \
         (Crystal Beach DMA)",
    )
}

/// Devices of which the same is to be said: copy engines come by the eight or sixteen.
fn alike(devices: &[PciDevice]) -> Vec<Vec<&PciDevice>> {
    let same = |one: &PciDevice, other: &PciDevice| {
        let group = |device: &PciDevice| {
            device.group.as_ref().map(|group| (group.access, in_the_way(device).next().is_some()))
        };
        let facts = |device: &PciDevice| (device.id, device.driver.clone(), group(device));
        let networks = one.network().is_some() || other.network().is_some();
        facts(one) == facts(other) && !networks
    };
    let mut sets: Vec<Vec<&PciDevice>> = Vec::new();
    for device in devices {
        match sets.iter_mut().find(|set| same(set[0], device)) {
            Some(set) => set.push(device),
            None => sets.push(vec![device]),
        }
    }
    sets
}

/// What is to be said of devices that are alike, of which there is at least one.
fn some(family: &Family, devices: &[&PciDevice], container: Access) -> Check {
    let what = describe(devices);
    let check = |status, detail: String| Check::new(family.name, status, detail);
    let Some(obstacle) = devices[0].obstacle(container) else {
        let back = give_back(devices);
        return check(Status::Ok, format!("{what}: ready; given back to the kernel by: {back}"));
    };
    match &obstacle {
        OpenError::NotHandedOver { driver, .. } => {
            let holder = match driver {
                Some(driver) => format!("the kernel's driver {driver} has it"),
                None => "no driver has it".to_owned(),
            };
            let (more, cure) = handing_over(devices);
            check(Status::Warn, format!("{what}: {holder}{more}")).cure(cure)
        }
        OpenError::CarriesNetwork { interface, .. } if interface.has_default_route => check(
            Status::Warn,
            format!(
                "{what}: DO NOT TAKE IT, it is {}, through which this machine reaches the rest of \
                 the world; another card is needed",
                interface.name
            ),
        ),
        OpenError::CarriesNetwork { interface, .. } => check(
            Status::Warn,
            format!(
                "{what}: leave it alone, it is {}, a network that is switched on; a card whose \
                 network is off could be handed over",
                interface.name
            ),
        ),
        OpenError::NoPermission { .. } => {
            let cure = hand_over(devices).unwrap_or_else(|| obstacle.cure());
            check(Status::Warn, format!("{what}: {}", obstacle.cause())).cure(cure)
        }
        _ => check(Status::Warn, format!("{what}: {}", obstacle.cause())).cure(obstacle.cure()),
    }
}

/// What to say besides of devices that the kernel has, and how they are handed over.
fn handing_over(devices: &[&PciDevice]) -> (String, String) {
    let commands = hand_over(devices).unwrap_or_default();
    let together = |other: &&Companion| devices.iter().any(|one| one.address == other.address);
    let others = devices.iter().flat_map(|device| in_the_way(device));
    let mut names: Vec<String> = others.filter(|other| !together(other)).map(name).collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return (String::new(), commands);
    }
    let names = names.join(", ");
    let cure = format!(
        "put the card into another slot; or, if {names} can be spared as well, hand over all: \
         {commands}"
    );
    (format!(", and {names} shares its group"), cure)
}

/// How many, where, and in which groups.
fn describe(devices: &[&PciDevice]) -> String {
    let first = devices[0];
    let (maker, device) = first.id;
    let groups: Vec<String> = devices
        .iter()
        .filter_map(|device| device.group.as_ref())
        .map(|group| group.number.to_string())
        .collect();
    let groups = match &groups[..] {
        [] => "no group".to_owned(),
        [one] => format!("group {one}"),
        [first, .., last] if first == last => format!("group {first}"),
        [first, .., last] => format!("groups {first} to {last}"),
    };
    match devices {
        [_] => format!("{} ({maker:04x}:{device:04x}, {groups})", first.address),
        [.., last] => format!(
            "{} from {} to {} ({maker:04x}:{device:04x}, {groups})",
            devices.len(),
            first.address,
            last.address
        ),
        [] => String::new(),
    }
}

/// Others in the group whose drivers keep it from programs.
fn in_the_way(device: &PciDevice) -> impl Iterator<Item = &Companion> {
    let companions = device.group.iter().flat_map(|group| &group.companions);
    companions.filter(|companion| companion.is_in_the_way())
}

fn name(companion: &Companion) -> String {
    match &companion.driver {
        Some(driver) => format!("{} ({driver})", companion.address),
        None => companion.address.clone(),
    }
}

fn emulator(found: Option<PathBuf>) -> Check {
    const NAME: &str = "QEMU";
    match found {
        Some(path) => {
            let detail = format!("{}: `cargo xtask qemu` tries the drivers in it", path.display());
            Check::new(NAME, Status::Ok, detail)
        }
        None => Check::new(
            NAME,
            Status::Missing,
            "the drivers of devices cannot be tried in a virtual machine, which only work on \
             Memferry itself needs",
        )
        .cure("sudo apt install qemu-system-x86, then cargo xtask qemu"),
    }
}

/// Where a program is found.
fn program(name: &str, path: Option<&std::ffi::OsStr>) -> Option<PathBuf> {
    let folders = env::split_paths(path?);
    folders.map(|folder| folder.join(name)).find(|program| Path::is_file(program))
}

#[cfg(test)]
mod tests;
