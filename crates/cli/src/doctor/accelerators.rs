//! Checks of Intel's data streaming accelerator: devices, their work queues, who may open them, and
//! the commands that configure one. The checks open and change nothing.

use std::env;
use std::fs;

use memferry_bench::results::size;
use memferry_sys::idxd::sysfs::{IdxdBus, IdxdDevice, IdxdQueue};
use memferry_sys::vfio::pci::{DSA, FileAccess};
use memferry_sys::vfio::{PciBus, PciDevice};

use super::devices::program;
use super::{Check, Status};

const NAME: &str = "DSA";
/// The setting that selects queues and devices.
const VARIABLE: &str = "MEMFERRY_DSA";
/// The kernel driver of the devices.
const DRIVER: &str = "idxd";
/// From this version on, the kernel lets every program map portals.
const SAFE_VERSION: u32 = 0x300;
/// The number of descriptors of the queue that the commands configure.
const QUEUE_SIZE: u32 = 16;

/// What the checks depend on.
struct AcceleratorFacts {
    /// The devices on the bus.
    found: Vec<PciDevice>,
    /// The devices of the kernel's driver.
    devices: Vec<IdxdDevice>,
    /// Whether this process may map portals of any device.
    has_raw_io: bool,
    /// Whether `accel-config` is installed.
    has_tool: bool,
}

/// All checks, in the order of display; none on a machine without such a device.
pub(super) fn checks() -> Vec<Check> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let facts = AcceleratorFacts {
        found: PciBus::default().find(DSA),
        devices: IdxdBus::default().devices(),
        has_raw_io: has_raw_io(&status),
        has_tool: program("accel-config", env::var_os("PATH").as_deref()).is_some(),
    };
    let mut checks = checks_of(&facts);
    if let Some(value) = env::var_os(VARIABLE) {
        let value = value.to_string_lossy().trim().to_owned();
        checks.push(setting(&value, &facts));
    }
    checks
}

fn checks_of(facts: &AcceleratorFacts) -> Vec<Check> {
    let mut checks = Vec::new();
    for device in facts.found.iter().filter(|device| !device.is_bound_to_vfio()) {
        if device.driver.as_deref() != Some(DRIVER) {
            let detail = format!("{}: the kernel's driver idxd does not have it", device.address);
            let fix = format!(
                "sudo modprobe idxd; echo {} | sudo tee /sys/bus/pci/drivers/idxd/bind",
                device.address
            );
            checks.push(Check::new(NAME, Status::Warn, detail).fix(fix));
        }
    }
    for device in &facts.devices {
        checks.extend(device_checks(device, facts));
    }
    checks
}

/// Whether the process has `CAP_SYS_RAWIO`, by the kernel's description of it.
fn has_raw_io(status: &str) -> bool {
    const CAP_SYS_RAWIO: u64 = 1 << 17;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    bits.is_some_and(|bits| bits & CAP_SYS_RAWIO != 0)
}

fn device_checks(device: &IdxdDevice, facts: &AcceleratorFacts) -> Vec<Check> {
    let name = &device.name;
    if !device.has_address_spaces {
        let detail = format!("{name}: programs cannot use it, it shares no address spaces");
        let check = Check::new(NAME, Status::Warn, detail).fix(
            "add intel_iommu=on,sm_on to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo \
             update-grub, and reboot, with VT-d and its scalable mode on in the firmware",
        );
        return vec![check];
    }
    let configured: Vec<&IdxdQueue> = device
        .queues
        .iter()
        .filter(|queue| queue.is_enabled && queue.is_for_programs && queue.size > 0)
        .collect();
    if configured.is_empty() {
        let queues = device.queues.len();
        let detail = format!("{name}: none of its {queues} work queues is enabled for programs");
        let fix = configure_commands(device, facts.has_tool);
        return vec![Check::new(NAME, Status::Warn, detail).fix(fix)];
    }
    configured.into_iter().map(|queue| queue_check(device, queue, facts)).collect()
}

fn queue_check(device: &IdxdDevice, queue: &IdxdQueue, facts: &AcceleratorFacts) -> Check {
    let mode = match queue.is_dedicated {
        Some(true) => "dedicated to one program",
        _ => "shared",
    };
    let what = format!(
        "{}: {mode}, {} descriptors, up to {} each",
        queue.path.display(),
        queue.size,
        size::format(queue.max_transfer_bytes)
    );
    match queue.access {
        FileAccess::Allowed => {
            let is_safe = device.version.is_some_and(|version| version >= SAFE_VERSION);
            let way = match facts.has_raw_io || is_safe {
                true => "its portal can be mapped",
                false => {
                    "the kernel may demand CAP_SYS_RAWIO to map its portal (INTEL-SA-01084); \
                     without it, descriptors go through write, without batches"
                }
            };
            let check = Check::new(NAME, Status::Ok, format!("{what}: ready; {way}"));
            check.summary(format!("DSA {}", queue.name))
        }
        FileAccess::Denied => Check::new(NAME, Status::Warn, format!("{what}: may not be opened"))
            .fix(open_command(queue)),
        FileAccess::Missing => {
            let text = format!("{what}: its file does not exist");
            Check::new(NAME, Status::Warn, text).fix("sudo udevadm trigger; sudo udevadm settle")
        }
    }
}

fn open_command(queue: &IdxdQueue) -> String {
    let path = queue.path.display();
    format!("sudo chgrp \"$(id -gn)\" {path} && sudo chmod 660 {path}")
}

/// The commands that configure the first queue of a device as a shared one and let this user open
/// it.
fn configure_commands(device: &IdxdDevice, has_tool: bool) -> String {
    let name = &device.name;
    let number = name.trim_start_matches("dsa");
    let queue = format!("wq{number}.0");
    let size = device.total_size.unwrap_or(QUEUE_SIZE).clamp(1, QUEUE_SIZE);
    let threshold = size.saturating_sub(1).max(1);
    let open =
        format!("sudo chgrp \"$(id -gn)\" /dev/dsa/{queue} && sudo chmod 660 /dev/dsa/{queue}");
    if has_tool {
        return format!(
            "sudo accel-config config-engine {name}/engine{number}.0 --group-id=0 && \
             sudo accel-config config-wq {name}/{queue} --group-id=0 --mode=shared --wq-size={size} \
             --threshold={threshold} --priority=10 --type=user --driver-name=user --name=memferry \
             --max-batch-size=64 --max-transfer-size=2097152 && \
             sudo accel-config enable-device {name} && \
             sudo accel-config enable-wq {name}/{queue} && {open}"
        );
    }
    let files = [
        (format!("engine{number}.0/group_id"), "0".to_owned()),
        (format!("{queue}/group_id"), "0".into()),
        (format!("{queue}/mode"), "shared".into()),
        (format!("{queue}/size"), size.to_string()),
        (format!("{queue}/threshold"), threshold.to_string()),
        (format!("{queue}/priority"), "10".into()),
        (format!("{queue}/type"), "user".into()),
        (format!("{queue}/driver_name"), "user".into()),
        (format!("{queue}/name"), "memferry".into()),
    ];
    let writes: Vec<String> =
        files.iter().map(|(file, value)| format!("echo {value} > {file}")).collect();
    format!(
        "sudo sh -c 'cd /sys/bus/dsa/devices/{name} && {} && \
         echo {name} > /sys/bus/dsa/drivers/idxd/bind && \
         echo {queue} > /sys/bus/dsa/drivers/user/bind' && {open}",
        writes.join(" && ")
    )
}

/// The check of the environment variable that selects queues for programs without a choice of their
/// own.
fn setting(value: &str, facts: &AcceleratorFacts) -> Check {
    let queues = facts.devices.iter().flat_map(|device| &device.queues);
    let ready = queues.filter(|queue| queue.is_usable()).count();
    let detail = match (value, ready) {
        ("off", _) => "off: only programs that ask for DSA use it".to_owned(),
        ("auto", 0) => "auto: no DSA work queue can be opened, so none is used".to_owned(),
        ("auto", _) => format!("auto: programs use {ready} DSA work queue(s)"),
        _ => format!("{value}: programs use this, and fail without it"),
    };
    Check::new(VARIABLE, Status::Ok, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(access: FileAccess) -> IdxdQueue {
        IdxdQueue {
            name: "wq0.0".into(),
            path: "/dev/dsa/wq0.0".into(),
            access,
            is_enabled: true,
            is_for_programs: true,
            is_dedicated: Some(false),
            size: 16,
            max_transfer_bytes: 2 << 20,
            max_batch: 64,
            block_on_fault: false,
        }
    }

    fn device(queues: Vec<IdxdQueue>) -> IdxdDevice {
        IdxdDevice {
            name: "dsa0".into(),
            address: Some("0000:6a:01.0".into()),
            version: Some(0x100),
            is_enabled: true,
            has_address_spaces: true,
            numa_node: Some(0),
            opcodes: None,
            total_size: Some(128),
            queues,
        }
    }

    fn facts(devices: Vec<IdxdDevice>) -> AcceleratorFacts {
        AcceleratorFacts { found: Vec::new(), devices, has_raw_io: false, has_tool: true }
    }

    #[test]
    fn a_machine_without_the_device_has_no_check_of_it() {
        assert!(checks_of(&facts(Vec::new())).is_empty());
    }

    #[test]
    fn a_queue_that_can_be_opened_is_ready_and_the_capability_is_named() {
        let facts = facts(vec![device(vec![queue(FileAccess::Allowed)])]);
        let [check] = &checks_of(&facts)[..] else { panic!("one check") };
        assert_eq!(check.status, Status::Ok);
        for part in ["/dev/dsa/wq0.0", "shared", "16 descriptors", "CAP_SYS_RAWIO", "write"] {
            assert!(check.detail.contains(part), "{part}: {}", check.detail);
        }
        let privileged = AcceleratorFacts { has_raw_io: true, ..facts };
        let [check] = &checks_of(&privileged)[..] else { panic!("one check") };
        assert!(check.detail.contains("can be mapped"), "{}", check.detail);
    }

    #[test]
    fn a_queue_that_may_not_be_opened_comes_with_the_command() {
        let facts = facts(vec![device(vec![queue(FileAccess::Denied)])]);
        let [check] = &checks_of(&facts)[..] else { panic!("one check") };
        assert_eq!(check.status, Status::Warn);
        assert!(check.fix.as_ref().unwrap().contains("chmod 660 /dev/dsa/wq0.0"));
    }

    #[test]
    fn a_device_without_queues_is_configured_with_the_tool_or_without() {
        let unused = IdxdQueue { is_enabled: false, ..queue(FileAccess::Missing) };
        let mut facts = facts(vec![device(vec![unused])]);
        let fix = |facts: &AcceleratorFacts| checks_of(facts)[0].fix.clone().unwrap();
        let tool = fix(&facts);
        for part in ["accel-config config-wq dsa0/wq0.0", "--mode=shared", "enable-wq dsa0/wq0.0"] {
            assert!(tool.contains(part), "{part}: {tool}");
        }
        facts.has_tool = false;
        let files = fix(&facts);
        for part in ["/sys/bus/dsa/devices/dsa0", "echo shared > wq0.0/mode", "drivers/user/bind"] {
            assert!(files.contains(part), "{part}: {files}");
        }
    }

    #[test]
    fn a_device_without_address_spaces_needs_another_command_line() {
        let blind = IdxdDevice { has_address_spaces: false, ..device(vec![]) };
        let check = &checks_of(&facts(vec![blind]))[0];
        assert!(check.fix.as_ref().unwrap().contains("intel_iommu=on,sm_on"));
    }

    #[test]
    fn capabilities_are_read_from_what_the_kernel_says_of_the_process() {
        assert!(has_raw_io("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_raw_io("CapEff:\t0000000000000000\n"));
        assert!(!has_raw_io("CapEff:\tbanana\n") && !has_raw_io(""));
    }

    #[test]
    fn the_setting_says_what_programs_use() {
        let facts = facts(vec![device(vec![queue(FileAccess::Allowed)])]);
        assert!(setting("auto", &facts).detail.contains("1 DSA work queue"));
        assert!(setting("off", &facts).detail.starts_with("off"));
        assert!(setting("wq0.0", &facts).detail.contains("fail without it"));
    }
}
