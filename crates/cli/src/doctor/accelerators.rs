//! Checks of Intel's data streaming accelerator: devices, their work queues, who may open them, and
//! the commands that configure one. The checks open and change nothing.

mod commands;
mod owner;
mod submission;

use std::env;
use std::fs;

use memferry_bench::results::size;
use memferry_sys::cpu;
use memferry_sys::idxd::sysfs::{IdxdBus, IdxdDevice, IdxdQueue};
use memferry_sys::settings;
use memferry_sys::vfio::pci::{DSA, FileAccess};
use memferry_sys::vfio::{PciBus, PciDevice};

use self::owner::UserNames;
use self::submission::SubmissionFacts;
use super::devices::{DeviceFamily, family_checks, program};
use super::{Check, Status};

const NAME: &str = "DSA";
/// The setting that selects queues and devices.
const VARIABLE: &str = "MEMFERRY_DSA";
/// The kernel driver of the devices.
const DRIVER: &str = "idxd";
/// The family of devices that are bound to vfio-pci.
const FAMILY: DeviceFamily = DeviceFamily { name: NAME, ids: DSA };

/// What the checks depend on.
struct AcceleratorFacts {
    /// The devices on the bus.
    found: Vec<PciDevice>,
    /// The devices of the kernel's driver.
    devices: Vec<IdxdDevice>,
    /// Whether this process may open the VFIO container file.
    container: FileAccess,
    submission: SubmissionFacts,
    names: UserNames,
    /// Whether `accel-config` is installed.
    has_tool: bool,
}

/// All checks, in the order of display; none on a machine without such a device.
pub(super) fn checks() -> Vec<Check> {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let bus = PciBus::default();
    let cpu = cpu::info();
    let facts = AcceleratorFacts {
        found: bus.find(FAMILY.ids),
        devices: IdxdBus::default().devices(),
        container: bus.container_access(),
        submission: SubmissionFacts {
            has_raw_io: submission::has_raw_io(&read("/proc/self/status")),
            has_enqcmd: cpu.enqcmd,
            has_movdir64b: cpu.movdir64b,
            release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        },
        names: UserNames { users: read("/etc/passwd"), groups: read("/etc/group") },
        has_tool: program("accel-config", env::var_os("PATH").as_deref()).is_some(),
    };
    let mut checks = checks_of(&facts);
    if let Some(value) = settings::value_of(VARIABLE) {
        let value = value.to_string_lossy().trim().to_owned();
        checks.push(setting(&value, &facts));
    }
    checks
}

fn checks_of(facts: &AcceleratorFacts) -> Vec<Check> {
    let mut checks = Vec::new();
    let (bound, others): (Vec<_>, Vec<_>) =
        facts.found.iter().cloned().partition(PciDevice::is_bound_to_vfio);
    for device in others.iter().filter(|device| device.driver.as_deref() != Some(DRIVER)) {
        let detail = format!("{}: the kernel's driver idxd does not have it", device.address);
        checks.push(Check::new(NAME, Status::Warn, detail).fix(commands::bind_to_idxd(device)));
    }
    checks.extend(family_checks(&FAMILY, &bound, facts.container));
    if !bound.is_empty() && !facts.submission.has_movdir64b {
        let detail = "this processor has no movdir64b, without which no program can use a device that \
                      is bound to vfio-pci";
        checks.push(Check::new(NAME, Status::Missing, detail));
    }
    for device in &facts.devices {
        checks.extend(device_checks(device, facts));
    }
    checks
}

fn device_checks(device: &IdxdDevice, facts: &AcceleratorFacts) -> Vec<Check> {
    let name = &device.name;
    if !device.has_address_spaces {
        let detail = format!("{name}: programs cannot use it, it shares no address spaces");
        let scalable = "add intel_iommu=on,sm_on to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo \
                        update-grub, and reboot, with VT-d and its scalable mode on in the firmware";
        let on_bus =
            facts.found.iter().find(|found| Some(&found.address) == device.address.as_ref());
        // Without an IOMMU nothing can be bound to vfio-pci either.
        let bind = on_bus.filter(|found| found.group.is_some()).and_then(commands::bind_to_vfio);
        let fix = match bind {
            Some(bind) => format!("{scalable}; or give it to one program: {bind}"),
            None => scalable.to_owned(),
        };
        return vec![Check::new(NAME, Status::Warn, detail).fix(fix)];
    }
    let configured: Vec<&IdxdQueue> = device
        .queues
        .iter()
        .filter(|queue| queue.is_enabled && queue.is_for_programs && queue.size > 0)
        .collect();
    if configured.is_empty() {
        let queues = device.queues.len();
        let detail = format!("{name}: none of its {queues} work queues is enabled for programs");
        let fix = commands::configure(device, facts.has_tool);
        return vec![Check::new(NAME, Status::Warn, detail).fix(fix)];
    }
    configured.into_iter().map(|queue| queue_check(device, queue, facts)).collect()
}

fn queue_check(device: &IdxdDevice, queue: &IdxdQueue, facts: &AcceleratorFacts) -> Check {
    let mode = match queue.is_dedicated {
        Some(true) => "dedicated to one program",
        _ => "shared",
    };
    let owner = match facts.names.permissions(&queue.path) {
        Some(permissions) => format!(" ({permissions})"),
        None => String::new(),
    };
    let what = format!(
        "{}{owner}: {mode}, {} descriptors, up to {} each",
        queue.path.display(),
        queue.size,
        size::format(queue.max_transfer_bytes)
    );
    match queue.access {
        FileAccess::Allowed => {
            let way = facts.submission.way(device, queue);
            let check = Check::new(NAME, Status::Ok, format!("{what}: ready; {way}"));
            check.summary(format!("DSA {}", queue.name))
        }
        FileAccess::Denied => {
            Check::new(NAME, Status::Warn, format!("{what}: this user may not open it"))
                .fix(commands::open_to_user(&queue.path))
        }
        FileAccess::Missing => {
            let text = format!("{what}: its file does not exist");
            Check::new(NAME, Status::Warn, text).fix("sudo udevadm trigger; sudo udevadm settle")
        }
    }
}

/// The check of the environment variable that selects queues for programs without a choice of their
/// own.
fn setting(value: &str, facts: &AcceleratorFacts) -> Check {
    let queues = facts.devices.iter().flat_map(|device| &device.queues);
    let ready = queues.filter(|queue| queue.is_usable()).count();
    let bound: Vec<_> = facts.found.iter().filter(|device| device.is_bound_to_vfio()).collect();
    let can_open = |device: &&&PciDevice| device.open_blocker(facts.container).is_none();
    let detail = match (value, ready, bound.len()) {
        ("off", ..) => "off: only programs that ask for DSA use it".to_owned(),
        ("auto", 0, 0) => {
            "auto: no DSA work queue can be opened, and no DSA device is bound to vfio-pci, so none \
             is used"
                .to_owned()
        }
        ("auto", 0, all) => {
            let usable = bound.iter().filter(can_open).count();
            let state = match usable == all && facts.submission.has_movdir64b {
                true => "programs use",
                false => "programs try",
            };
            format!(
                "auto: no DSA work queue can be opened, so {state} {all} DSA device(s) bound to \
                 vfio-pci, one program at a time"
            )
        }
        ("auto", ..) => format!("auto: programs use {ready} DSA work queue(s)"),
        _ => format!("{value}: programs use this, and fail without it"),
    };
    Check::new(VARIABLE, Status::Ok, detail)
}

#[cfg(test)]
mod tests;
