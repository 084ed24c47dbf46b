//! The commands that bind and configure a device. They are only printed. Each step works if it was done
//! before, and steps that may fail then are joined by `;`.

use std::path::Path;

use memferry_sys::idxd::sysfs::{IdxdDevice, IdxdQueue};
use memferry_sys::vfio::{PciDevice, bind_commands};

/// The number of descriptors of the queue that the commands configure.
const QUEUE_SIZE: u32 = 16;
/// The devices that vfio-pci refuses by its denylist, because of INTEL-SA-01084.
const DENIED_ID: (u16, u16) = (0x8086, 0x0b25);

/// The commands that bind a device to the kernel's driver.
pub(super) fn bind_to_idxd(device: &PciDevice) -> String {
    let at = &device.address;
    let unbind = match device.driver {
        Some(_) => format!("echo {at} | sudo tee /sys/bus/pci/devices/{at}/driver/unbind; "),
        None => String::new(),
    };
    format!("sudo modprobe idxd; {unbind}echo {at} | sudo tee /sys/bus/pci/drivers/idxd/bind")
}

/// The commands that bind a device to vfio-pci.
pub(super) fn bind_to_vfio(device: &PciDevice) -> Option<String> {
    const LOAD: &str = "sudo modprobe vfio-pci";
    let commands = bind_commands(&[device])?;
    if device.id != DENIED_ID {
        return Some(commands);
    }
    // The option is read when the module is loaded.
    let load = format!("sudo modprobe -r vfio-pci; {LOAD} disable_denylist=1");
    Some(commands.replacen(LOAD, &load, 1))
}

/// The commands that let this user open the file of a queue.
pub(super) fn open_to_user(path: &Path) -> String {
    let path = path.display();
    format!("sudo chgrp \"$(id -gn)\" {path}; sudo chmod 660 {path}")
}

/// The commands that configure a queue of a device as a shared one and let this user open it.
pub(super) fn configure(device: &IdxdDevice, has_tool: bool) -> String {
    let target = ConfiguredQueue::of(device);
    let configure = if has_tool { target.by_tool() } else { target.by_files("/sys/bus/dsa") };
    let open = open_to_user(Path::new(&format!("/dev/dsa/{}", target.queue)));
    format!("{configure}; sudo udevadm settle; {open}")
}

/// The queue to configure, and the values that depend on the device.
#[derive(Debug)]
struct ConfiguredQueue {
    device: String,
    engine: String,
    queue: String,
    size: u32,
    threshold: u32,
    /// The device has to be disabled before: it is enabled, and this queue has no descriptors, which
    /// cannot be changed then, or is enabled for another use.
    is_disabled_first: bool,
}

impl ConfiguredQueue {
    /// A queue that is configured for programs already, or else one that is not enabled, or else the
    /// first.
    fn of(device: &IdxdDevice) -> Self {
        let number = device.name.trim_start_matches("dsa");
        let is_configured = |queue: &&IdxdQueue| queue.is_for_programs && queue.size > 0;
        let queues = || device.queues.iter();
        let found = queues().find(is_configured);
        let found = found.or_else(|| queues().find(|queue| !queue.is_enabled));
        let found = found.or(device.queues.first());
        let size = device.total_size.unwrap_or(QUEUE_SIZE).clamp(1, QUEUE_SIZE);
        let is_ready = found.is_some_and(|queue| queue.size > 0 && !queue.is_enabled);
        Self {
            engine: format!("engine{number}.0"),
            queue: found.map_or_else(|| format!("wq{number}.0"), |queue| queue.name.clone()),
            size,
            threshold: size.saturating_sub(1).max(1),
            is_disabled_first: device.is_enabled && !is_ready,
            device: device.name.clone(),
        }
    }

    fn by_tool(&self) -> String {
        let Self { device, engine, queue, size, threshold, is_disabled_first } = self;
        let disable = match is_disabled_first {
            true => format!("sudo accel-config disable-device {device}; "),
            false => String::new(),
        };
        // Kernels with the attribute demand the driver's name; older ones, and older versions of the
        // tool, do not know it.
        let driver = format!(
            "$(test ! -e /sys/bus/dsa/devices/{queue}/driver_name || echo --driver-name=user)"
        );
        format!(
            "{disable}sudo accel-config config-engine {device}/{engine} --group-id=0; \
             sudo accel-config config-wq {device}/{queue} --group-id=0 --mode=shared --wq-size={size} \
             --threshold={threshold} --priority=10 --type=user {driver} --name=memferry \
             --max-batch-size=64 --max-transfer-size=2097152; \
             sudo accel-config enable-device {device}; \
             sudo accel-config enable-wq {device}/{queue}"
        )
    }

    /// The commands by the files of sysfs, below the folder of the bus.
    fn by_files(&self, bus: &str) -> String {
        let Self { device, engine, queue, size, threshold, is_disabled_first } = self;
        let files = [
            (format!("{engine}/group_id"), "0".to_owned()),
            (format!("{queue}/group_id"), "0".into()),
            (format!("{queue}/mode"), "shared".into()),
            (format!("{queue}/size"), size.to_string()),
            (format!("{queue}/threshold"), threshold.to_string()),
            (format!("{queue}/priority"), "10".into()),
            (format!("{queue}/type"), "user".into()),
            (format!("{queue}/driver_name"), "user".into()),
            (format!("{queue}/name"), "memferry".into()),
        ];
        // Kernels differ in their attributes.
        let write =
            |(file, value): &(String, String)| format!("test ! -e {file} || echo {value} > {file}");
        let writes: Vec<String> = files.iter().map(write).collect();
        let disable = match is_disabled_first {
            true => format!("echo {device} > {bus}/drivers/idxd/unbind; "),
            false => String::new(),
        };
        format!(
            "sudo sh -c 'cd {bus}/devices/{device} || exit; {disable}{}; \
             echo {device} > {bus}/drivers/idxd/bind; \
             echo {queue} > {bus}/drivers/user/bind'",
            writes.join("; ")
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use memferry_sys::vfio::pci::{FileAccess, IommuGroup};

    use super::super::tests::{device, queue};
    use super::*;

    fn unused() -> IdxdQueue {
        let (is_enabled, is_for_programs, size) = (false, false, 0);
        IdxdQueue { is_enabled, is_for_programs, size, ..queue(FileAccess::Missing) }
    }

    fn pci_device(id: (u16, u16), driver: Option<&str>) -> PciDevice {
        let access = FileAccess::Missing;
        PciDevice {
            address: "0000:6a:01.0".into(),
            id,
            class: 0x8_8000,
            driver: driver.map(str::to_owned),
            group: Some(IommuGroup { number: 7, other_members: vec![], access }),
            interfaces: vec![],
        }
    }

    #[test]
    fn a_device_of_another_driver_is_taken_from_it() {
        let free = bind_to_idxd(&pci_device(DENIED_ID, None));
        assert!(free.starts_with("sudo modprobe idxd; echo 0000:6a:01.0 | "), "{free}");
        assert!(free.ends_with("/drivers/idxd/bind") && !free.contains("unbind"), "{free}");
        assert!(bind_to_idxd(&pci_device(DENIED_ID, Some("uio"))).contains("driver/unbind; "));
    }

    #[test]
    fn a_device_on_the_denylist_of_vfio_is_bound_with_the_option() {
        let denied = bind_to_vfio(&pci_device(DENIED_ID, Some("idxd"))).unwrap();
        assert!(denied.contains("sudo modprobe vfio-pci disable_denylist=1 && "), "{denied}");
        let newer = bind_to_vfio(&pci_device((0x8086, 0x1212), Some("idxd"))).unwrap();
        assert!(!newer.contains("denylist") && newer.contains("driver_override"), "{newer}");
    }

    #[test]
    fn a_step_that_is_done_does_not_end_the_commands() {
        for has_tool in [true, false] {
            let commands = configure(&device(vec![unused()]), has_tool);
            assert!(!commands.contains("&&"), "{commands}");
            assert!(commands.ends_with("sudo chmod 660 /dev/dsa/wq0.0"), "{commands}");
        }
    }

    #[test]
    fn a_queue_that_is_only_not_enabled_keeps_its_device_enabled() {
        let ready =
            IdxdQueue { name: "wq0.1".into(), is_enabled: false, ..queue(FileAccess::Missing) };
        let commands = configure(&device(vec![unused(), ready]), true);
        assert!(!commands.contains("disable-device"), "{commands}");
        assert!(commands.contains("enable-wq dsa0/wq0.1") && commands.contains("/dev/dsa/wq0.1"));
    }

    #[test]
    fn a_device_is_disabled_before_what_cannot_be_changed_while_it_is_enabled() {
        let commands = |has_tool| configure(&device(vec![unused()]), has_tool);
        assert!(commands(true).starts_with("sudo accel-config disable-device dsa0; "));
        assert!(commands(false).contains("drivers/idxd/unbind; "));
        let disabled = IdxdDevice { is_enabled: false, ..device(vec![unused()]) };
        assert!(!configure(&disabled, true).contains("disable-device"));
        let of_kernel = IdxdQueue { is_for_programs: false, ..queue(FileAccess::Missing) };
        let taken = configure(&device(vec![of_kernel.clone()]), true);
        assert!(taken.contains("disable-device"), "{taken}");
        // A queue of the kernel is left alone if there is another.
        let free = IdxdQueue { name: "wq0.1".into(), ..unused() };
        assert!(configure(&device(vec![of_kernel, free]), true).contains("config-wq dsa0/wq0.1 "));
    }

    /// A tree with the files of a device and of its bus, without the attributes that are named.
    fn tree(absent: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let create = |file: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        for file in
            ["group_id", "mode", "size", "threshold", "priority", "type", "driver_name", "name"]
        {
            if !absent.contains(&file) {
                create(&format!("devices/dsa0/wq0.0/{file}"));
            }
        }
        for file in ["devices/dsa0/engine0.0/group_id", "drivers/idxd/bind", "drivers/user/bind"] {
            create(file);
        }
        root
    }

    #[test]
    fn the_files_of_sysfs_are_written_whether_all_attributes_exist_or_not() {
        for absent in [&[][..], &["driver_name"], &["driver_name", "threshold"]] {
            let root = tree(absent);
            let bus = root.path().to_str().unwrap();
            let device = IdxdDevice { is_enabled: false, ..device(vec![unused()]) };
            let commands = ConfiguredQueue::of(&device).by_files(bus);
            let commands = commands.strip_prefix("sudo ").unwrap();
            // Twice: every step is done already then.
            for _ in 0..2 {
                let output = Command::new("sh").args(["-c", commands]).output().unwrap();
                assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            }
            let text = |file: &str| fs::read_to_string(root.path().join(file)).unwrap_or_default();
            assert_eq!(text("devices/dsa0/wq0.0/mode"), "shared\n");
            assert_eq!(text("devices/dsa0/wq0.0/size"), "16\n");
            assert_eq!(text("drivers/idxd/bind"), "dsa0\n");
            assert_eq!(text("drivers/user/bind"), "wq0.0\n");
            let is_there = root.path().join("devices/dsa0/wq0.0/driver_name").exists();
            assert_eq!(is_there, !absent.contains(&"driver_name"));
        }
    }
}
