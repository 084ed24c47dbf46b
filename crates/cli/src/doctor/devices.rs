//! Checks of PCI devices that can copy, and of what prevents programs from using them. The checks
//! open and change nothing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use memferry::EngineSelection;
use memferry::engine::factories;
use memferry_bench::results::size;
use memferry_sys::residency;
use memferry_sys::settings;
use memferry_sys::vfio::pci::{DSA, E1000E, FileAccess, GroupMember, IOAT, PciId, full_address};
use memferry_sys::vfio::{PciBus, PciDevice, VfioError, bind_commands, unbind_commands};

use super::{Check, Need, Status, accelerators};

/// The minimum limit of locked memory. The buffers of a device soon exhaust a lower one.
const MIN_LOCKED_BYTES: u64 = 64 << 20;

/// A family of PCI devices that can copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceFamily {
    pub(super) name: &'static str,
    pub(super) ids: &'static [PciId],
}

const FAMILIES: [DeviceFamily; 2] =
    [DeviceFamily { name: "I/OAT", ids: IOAT }, DeviceFamily { name: "e1000e card", ids: E1000E }];

/// All checks, in the order of display.
pub(super) fn checks() -> Vec<Check> {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let bus = PciBus::default();
    let maker = CpuVendor::of(&read("/proc/cpuinfo"));
    let mut checks = vec![
        iommu(bus.group_count(), &read("/proc/cmdline"), maker),
        vfio(bus.container_access()),
        locked(residency::lock_limit_bytes()),
    ];
    let found: Vec<(&DeviceFamily, Vec<PciDevice>)> =
        FAMILIES.iter().map(|family| (family, bus.find(family.ids))).collect();
    let has_accelerator = !bus.find(DSA).is_empty();
    if found.iter().all(|(_, devices)| devices.is_empty()) && !has_accelerator {
        // Without devices, their prerequisites are optional too.
        checks.iter_mut().for_each(|check| check.need = Need::OptionalHardware);
        checks.push(no_devices());
    }
    for (family, devices) in &found {
        checks.extend(family_checks(family, devices, bus.container_access()));
    }
    checks.extend(accelerators::checks());
    for ((family, devices), variable) in found.iter().zip(["MEMFERRY_IOAT", "MEMFERRY_NIC"]) {
        let value = settings::value_of(variable).map(|value| value.to_string_lossy().into_owned());
        let container = bus.container_access();
        checks
            .extend(value.map(|value| setting(variable, value.trim(), family, devices, container)));
    }
    checks.push(emulator(program("qemu-system-x86_64", env::var_os("PATH").as_deref())));
    checks
}

/// The check of an environment variable that selects devices for programs without a choice of their
/// own.
fn setting(
    variable: &'static str,
    value: &str,
    family: &DeviceFamily,
    devices: &[PciDevice],
    container: FileAccess,
) -> Check {
    let name = family.name;
    let ready = devices.iter().filter(|device| device.is_bound_to_vfio()).count();
    let detail = match (value, ready) {
        ("off", _) => format!("off: only programs that ask for {name} use it"),
        ("auto", 0) => format!("auto: no {name} was handed over to programs, so none is used"),
        ("auto", _) => format!("auto: programs use {name}, {ready} handed over"),
        _ => {
            let obstacle = |address: &str| device_obstacle(family, address, devices, container);
            return named_devices(variable, value, obstacle);
        }
    };
    Check::new(variable, Status::Ok, detail)
}

/// The check of an environment variable that names devices. `obstacle` tells why a program cannot use
/// one.
pub(super) fn named_devices(
    variable: &'static str,
    value: &str,
    obstacle: impl Fn(&str) -> Option<String>,
) -> Check {
    let warn = |detail: String| {
        Check::new(variable, Status::Warn, format!("{detail}, and programs fail"))
            .fix(format!("unset {variable}, or set it to auto"))
    };
    let factory = factories().iter().find(|factory| factory.variable() == variable);
    let Some(EngineSelection::Devices(names)) = factory.and_then(|factory| factory.parse(value))
    else {
        return warn(format!("{value}: not valid"));
    };
    match names.iter().find_map(|name| Some((name, obstacle(name)?))) {
        Some((name, obstacle)) => warn(format!("{name}: {obstacle}")),
        None => Check::new(
            variable,
            Status::Ok,
            format!("{value}: programs use this, and fail without it"),
        ),
    }
}

/// Why a program cannot use the device of a family with this address, which may lack its domain.
pub(super) fn device_obstacle(
    family: &DeviceFamily,
    address: &str,
    devices: &[PciDevice],
    container: FileAccess,
) -> Option<String> {
    let full = full_address(address);
    match devices.iter().find(|device| Some(&device.address) == full.as_ref()) {
        Some(device) => device.open_blocker(container).map(|obstacle| obstacle.cause()),
        None => Some(format!("no {} has this address", family.name)),
    }
}

/// The vendor of the processor, and so of the IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CpuVendor {
    Intel,
    Amd,
    Other,
}

impl CpuVendor {
    fn of(cpuinfo: &str) -> Self {
        match () {
            () if cpuinfo.contains("GenuineIntel") => Self::Intel,
            () if cpuinfo.contains("AuthenticAMD") => Self::Amd,
            () => Self::Other,
        }
    }
}

fn iommu(groups: usize, command_line: &str, maker: CpuVendor) -> Check {
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
        return missing("switched off on the kernel's command line")
            .fix(format!("take {off} out of /etc/default/grub, sudo update-grub, and reboot"));
    }
    let asked = says("intel_iommu=on");
    match maker {
        CpuVendor::Intel if !asked => missing("off: no device can be given to programs").fix(
            "add intel_iommu=on to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub, and \
             reboot, with VT-d on in the firmware",
        ),
        CpuVendor::Intel => {
            missing("asked for, and not there: off in the firmware, or there is none")
                .fix("switch on VT-d in the firmware; a virtual machine needs one of its own")
        }
        CpuVendor::Amd => missing("off in the firmware, or there is none").fix(
            "switch on AMD-Vi (IOMMU) in the firmware; a virtual machine needs one of its own",
        ),
        CpuVendor::Other => missing("off, or there is none: no device can be given to programs")
            .fix("switch on the IOMMU (SMMU) in the firmware"),
    }
}

fn vfio(container: FileAccess) -> Check {
    const NAME: &str = "VFIO";
    match container {
        FileAccess::Allowed => Check::new(NAME, Status::Ok, "programs can have devices"),
        FileAccess::Denied => Check::new(NAME, Status::Warn, "/dev/vfio/vfio may not be opened")
            .fix("sudo chmod 666 /dev/vfio/vfio, which gives access to no device yet"),
        FileAccess::Missing => Check::new(NAME, Status::Missing, "not loaded (/dev/vfio/vfio)")
            .fix("sudo modprobe vfio-pci"),
    }
}

fn locked(limit: Option<u64>) -> Check {
    const NAME: &str = "device memory";
    match limit {
        None => Check::new(NAME, Status::Ok, "no limit of memory for devices"),
        Some(limit) => {
            let bytes = size::format(limit);
            let detail = format!("at most {bytes} mapped for devices at a time (locked memory)");
            if limit >= MIN_LOCKED_BYTES {
                return Check::new(NAME, Status::Ok, detail);
            }
            Check::new(NAME, Status::Warn, detail)
                .fix("`ulimit -l unlimited` as root, or LimitMEMLOCK=infinity in the service")
        }
    }
}

fn no_devices() -> Check {
    let detail = "no I/OAT engine, no DSA and no e1000e card (82574L): nothing is broken, processors copy; \
                  such a device would copy while they do something else";
    Check::new("copy devices", Status::Missing, detail).need(Need::OptionalHardware).fix(
        "servers with Intel processors have I/OAT (up to Ice Lake) or DSA (from Sapphire Rapids on): \
         switch it on in the firmware",
    )
}

/// Groups devices whose check has the same result: I/OAT engines come in groups of eight or
/// sixteen.
fn group_alike(devices: &[PciDevice]) -> Vec<Vec<&PciDevice>> {
    let same = |one: &PciDevice, other: &PciDevice| {
        let group = |device: &PciDevice| {
            device
                .group
                .as_ref()
                .map(|group| (group.access, blocking_members(device).next().is_some()))
        };
        let facts = |device: &PciDevice| (device.id, device.driver.clone(), group(device));
        let networks = one.active_interface().is_some() || other.active_interface().is_some();
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

/// The checks of the devices of a family, one for each group of similar devices.
pub(super) fn family_checks(
    family: &DeviceFamily,
    devices: &[PciDevice],
    container: FileAccess,
) -> Vec<Check> {
    group_alike(devices).iter().map(|alike| family_check(family, alike, container)).collect()
}

/// The check of a group of similar devices, which holds at least one device.
fn family_check(family: &DeviceFamily, devices: &[&PciDevice], container: FileAccess) -> Check {
    let what = describe(devices);
    let check = |status, detail: String| Check::new(family.name, status, detail);
    let Some(obstacle) = devices[0].open_blocker(container) else {
        let back = unbind_commands(devices);
        let check =
            check(Status::Ok, format!("{what}: ready; given back to the kernel by: {back}"));
        return check.summary(format!("{} {what}", family.name));
    };
    match &obstacle {
        VfioError::NotBoundToVfio { driver, .. } => {
            let holder = match driver {
                Some(driver) => format!("the kernel's driver {driver} has it"),
                None => "no driver has it".to_owned(),
            };
            let (more, cure) = bind_advice(devices);
            check(Status::Warn, format!("{what}: {holder}{more}")).fix(cure)
        }
        VfioError::InterfaceInUse { interface, .. } if interface.has_default_route => check(
            Status::Warn,
            format!(
                "{what}: DO NOT TAKE IT, it is {}, through which this machine reaches the rest of \
                 the world; another card is needed",
                interface.name
            ),
        ),
        VfioError::InterfaceInUse { interface, .. } => check(
            Status::Warn,
            format!(
                "{what}: leave it alone, it is {}, a network that is switched on; a card whose \
                 network is off could be handed over",
                interface.name
            ),
        ),
        VfioError::NoPermission { .. } => {
            let cure = bind_commands(devices).unwrap_or_else(|| obstacle.fix());
            check(Status::Warn, format!("{what}: {}", obstacle.cause())).fix(cure)
        }
        _ => check(Status::Warn, format!("{what}: {}", obstacle.cause())).fix(obstacle.fix()),
    }
}

/// The detail and the fix for devices that are not bound to vfio-pci.
fn bind_advice(devices: &[&PciDevice]) -> (String, String) {
    let commands = bind_commands(devices).unwrap_or_default();
    let together = |other: &&GroupMember| devices.iter().any(|one| one.address == other.address);
    let others = devices.iter().flat_map(|device| blocking_members(device));
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

/// The number of devices, their addresses, and their IOMMU groups.
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

/// The other members of the IOMMU group whose drivers block the group.
fn blocking_members(device: &PciDevice) -> impl Iterator<Item = &GroupMember> {
    let companions = device.group.iter().flat_map(|group| &group.other_members);
    companions.filter(|companion| companion.blocks_group())
}

fn name(companion: &GroupMember) -> String {
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
        .need(Need::OptionalHardware)
        .fix("sudo apt install qemu-system-x86, then cargo xtask qemu"),
    }
}

/// The path of a program in a search path.
pub(super) fn program(name: &str, path: Option<&std::ffi::OsStr>) -> Option<PathBuf> {
    let folders = env::split_paths(path?);
    folders.map(|folder| folder.join(name)).find(|program| Path::is_file(program))
}

#[cfg(test)]
mod tests;
