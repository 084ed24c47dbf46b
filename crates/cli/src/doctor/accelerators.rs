//! Checks of Intel's data streaming accelerator: devices, their work queues, who may open them, and
//! the commands that configure one. The checks open and change nothing.

mod commands;
mod owner;
mod report;
mod submission;

use std::env;
use std::fs;

use memferry_sys::cpu;
use memferry_sys::idxd::QueueObstacle;
use memferry_sys::idxd::sysfs::{IdxdBus, IdxdDevice};
use memferry_sys::settings;
use memferry_sys::vfio::pci::{DSA, FileAccess};
use memferry_sys::vfio::{PciBus, PciDevice};

use self::owner::UserNames;
pub(super) use self::report::DsaReport;
use self::report::QueueReport;
use self::submission::SubmissionFacts;
use super::devices::{DeviceFamily, device_obstacle, family_checks, named_devices, program};
use super::{Check, Need, Status};

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

impl AcceleratorFacts {
    /// The facts of this machine and this process.
    fn of_machine() -> Self {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        let bus = PciBus::default();
        let cpu = cpu::info();
        Self {
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
        }
    }

    /// Whether the kernel's driver lists a device of the bus. One whose address cannot be read may be
    /// any that the driver has.
    fn is_listed(&self, found: &PciDevice) -> bool {
        self.devices.iter().any(|device| match &device.address {
            Some(address) => *address == found.address,
            None => found.driver.as_deref() == Some(DRIVER),
        })
    }
}

/// All checks, in the order of display; none on a machine without such a device.
pub(super) fn checks() -> Vec<Check> {
    let facts = AcceleratorFacts::of_machine();
    let mut checks = checks_of(&facts);
    if let Some(value) = settings::value_of(VARIABLE) {
        let value = value.to_string_lossy().trim().to_owned();
        checks.push(setting(&value, &facts));
    }
    checks
}

/// All devices, each with all its work queues.
pub(super) fn reports() -> Vec<DsaReport> {
    DsaReport::all(&AcceleratorFacts::of_machine())
}

fn checks_of(facts: &AcceleratorFacts) -> Vec<Check> {
    let mut checks = Vec::new();
    let (bound, others): (Vec<_>, Vec<_>) =
        facts.found.iter().cloned().partition(PciDevice::is_bound_to_vfio);
    for device in others.iter().filter(|device| device.driver.as_deref() != Some(DRIVER)) {
        let detail = format!("{}: the kernel's driver idxd does not have it", device.address);
        checks.push(Check::new(NAME, Status::Warn, detail).fix(commands::bind_to_idxd(device)));
    }
    let of_kernel = others.iter().filter(|device| device.driver.as_deref() == Some(DRIVER));
    for device in of_kernel.filter(|found| !facts.is_listed(found)) {
        let detail =
            format!("{}: the kernel's driver idxd has it and lists no device", device.address);
        checks.push(
            Check::new(NAME, Status::Warn, detail).fix("sudo dmesg | grep idxd has the reason"),
        );
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
    let report = DsaReport::of(device, facts);
    let mut checks = vec![match device.has_address_spaces {
        true => device_check(device, &report, facts),
        false => blind_device(device, &report, facts),
    }];
    // Queues that are alike are one check, which names all.
    let mut queues = report.queues().iter().peekable();
    while let Some(first) = queues.next() {
        let mut names = vec![first.name.as_str()];
        while let Some(next) = queues.next_if(|next| share_a_check(first, next)) {
            names.push(&next.name);
        }
        checks.push(queue_check(&names.join(", "), first, &report, facts));
    }
    checks
}

/// Whether two queues share a check: they are equal except for their names, and have no commands of
/// their own.
fn share_a_check(one: &QueueReport, other: &QueueReport) -> bool {
    !one.is_usable && !one.is_nearly_usable && one.is_alike(other)
}

/// The check of a device: whether any of its queues can be used, and the commands that configure one if
/// no queue is near to it.
fn device_check(device: &IdxdDevice, report: &DsaReport, facts: &AcceleratorFacts) -> Check {
    let (title, notes) = (report.title(), report.notes());
    if report.is_usable() {
        return Check::new(NAME, Status::Ok, title).notes(notes);
    }
    let detail = format!("{title}: none of its work queues can be used");
    let check = Check::new(NAME, Status::Warn, detail);
    let has_own_fix = report.queues().iter().any(|queue| queue.is_nearly_usable);
    let best = commands::best_queue(device).filter(|_| !has_own_fix);
    let best = best.and_then(|queue| Some((queue, commands::enable(device, queue).ok()?)));
    let Some((queue, commands)) = best else {
        return check.notes(notes);
    };
    let (name, also) = (&queue.name, commands.side_effect());
    let effect = format!("the commands configure {name} as a shared queue{also}");
    let (first, other) = commands.forms(facts.has_tool);
    check.notes([notes, vec![effect]].concat()).fix(first).other_fix(other)
}

/// The check of a device whose queues no program can use.
fn blind_device(device: &IdxdDevice, report: &DsaReport, facts: &AcceleratorFacts) -> Check {
    let detail = format!("{}: programs cannot use it, it shares no address spaces", report.title());
    let scalable = "add intel_iommu=on,sm_on to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo \
                    update-grub, and reboot, with VT-d and its scalable mode on in the firmware";
    let on_bus = facts.found.iter().find(|found| Some(&found.address) == device.address.as_ref());
    // Without an IOMMU nothing can be bound to vfio-pci either.
    let bind = on_bus.filter(|found| found.group.is_some()).and_then(commands::bind_to_vfio);
    let fix = match bind {
        Some(bind) => format!("{scalable}; or give it to one program: {bind}"),
        None => scalable.to_owned(),
    };
    Check::new(NAME, Status::Warn, detail).notes(report.notes()).fix(fix)
}

/// The check of a queue, or of several that are alike. Those of which a device has no need are
/// optional.
fn queue_check(
    names: &str,
    queue: &QueueReport,
    device: &DsaReport,
    facts: &AcceleratorFacts,
) -> Check {
    let detail = format!("{names}: {}", queue.verdict());
    let mut notes = queue.notes();
    if queue.is_usable {
        let check = Check::new(NAME, Status::Ok, detail).notes(notes);
        return check.summary(format!("DSA {}", queue.name));
    }
    let is_refused =
        matches!(queue.obstacle, Some(QueueObstacle::NoFile | QueueObstacle::NotPermitted));
    let (status, need) = match device.is_usable() && !is_refused {
        true => (Status::Missing, Need::OptionalHardware),
        false => (Status::Warn, Need::Usual),
    };
    let check = |notes| Check::new(NAME, status, detail).notes(notes).need(need);
    match &queue.commands {
        Some(commands) if queue.is_nearly_usable => {
            let (first, other) = commands.clone().forms(facts.has_tool);
            check(notes).fix(first).other_fix(other)
        }
        Some(commands) if device.is_usable() => {
            let also = commands.side_effect();
            notes.push(format!(
                "`memferry doctor --json` has the commands that configure one{also}"
            ));
            check(notes)
        }
        _ => check(notes),
    }
}

/// The check of the environment variable that selects queues for programs without a choice of their
/// own.
fn setting(value: &str, facts: &AcceleratorFacts) -> Check {
    let usable = |device: &IdxdDevice| {
        let queues = device.queues.iter();
        queues.filter(|queue| QueueObstacle::of(device, queue).is_none()).count()
    };
    let ready: usize = facts.devices.iter().map(usable).sum();
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
        _ => return named_devices(VARIABLE, value, |name| obstacle(name, facts)),
    };
    Check::new(VARIABLE, Status::Ok, detail)
}

/// Why a program that names this queue or this device fails, as far as the checks can tell.
fn obstacle(name: &str, facts: &AcceleratorFacts) -> Option<String> {
    if !name.starts_with("wq") {
        let obstacle = device_obstacle(&FAMILY, name, &facts.found, facts.container);
        let no_store = "this processor has no movdir64b".to_owned();
        return obstacle.or_else(|| (!facts.submission.has_movdir64b).then_some(no_store));
    }
    let mut queues = facts
        .devices
        .iter()
        .flat_map(|device| device.queues.iter().map(move |queue| (device, queue)));
    match queues.find(|(_, queue)| queue.name == name) {
        Some((device, queue)) => QueueObstacle::of(device, queue).map(|obstacle| obstacle.text()),
        None => Some("there is no such work queue".to_owned()),
    }
}

#[cfg(test)]
mod tests;
