use std::fs;
use std::process::Command;

use memferry_sys::vfio::pci::{FileAccess, IommuGroup};

use super::super::tests::{device, queue};
use super::*;

fn unused() -> IdxdQueue {
    let (is_enabled, is_for_programs, size, group) = (false, false, 0, None);
    IdxdQueue { is_enabled, is_for_programs, size, group, ..queue(FileAccess::Missing) }
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

/// The commands for the best queue of a device, with the tool or without.
fn configure(device: &IdxdDevice, has_tool: bool) -> String {
    enable(device, best_queue(device).unwrap()).unwrap().forms(has_tool).0
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
fn a_queue_that_is_only_not_enabled_is_only_enabled() {
    let ready = IdxdQueue { name: "wq0.1".into(), is_enabled: false, ..queue(FileAccess::Missing) };
    let device = device(vec![unused(), ready]);
    let commands = configure(&device, true);
    assert!(!commands.contains("disable-device") && !commands.contains("wq-size"), "{commands}");
    assert!(commands.contains("enable-wq dsa0/wq0.1") && commands.contains("/dev/dsa/wq0.1"));
    let files = configure(&device, false);
    assert!(!files.contains("unbind") && files.contains("echo wq0.1 > "), "{files}");
}

#[test]
fn a_device_is_disabled_before_what_cannot_be_changed_while_it_is_enabled() {
    let commands = |has_tool| configure(&device(vec![unused()]), has_tool);
    assert!(commands(true).starts_with("sudo accel-config disable-device dsa0; "));
    assert!(commands(false).contains("drivers/idxd/unbind; "));
    let disabled = IdxdDevice { is_enabled: false, ..device(vec![unused()]) };
    assert!(!configure(&disabled, true).contains("disable-device"));
    let of_kernel = IdxdQueue { is_for_programs: false, ..queue(FileAccess::Missing) };
    let alone = device(vec![of_kernel.clone()]);
    let taken = enable(&alone, &alone.queues[0]).unwrap();
    assert_eq!(taken.ended_queues, ["wq0.0"]);
    let taken = taken.forms(true).0;
    assert!(taken.contains("disable-device"), "{taken}");
    // A queue of the kernel is left alone if there is another.
    let free = IdxdQueue { name: "wq0.1".into(), ..unused() };
    let both = device(vec![of_kernel, free]);
    assert!(configure(&both, true).contains("config-wq dsa0/wq0.1 "));
    // But it ends when the device is disabled.
    assert_eq!(enable(&both, &both.queues[1]).unwrap().ended_queues, ["wq0.0"]);
}

#[test]
fn that_a_device_is_disabled_first_is_said_also_if_no_queue_ends() {
    let said = |device: &IdxdDevice| enable(device, &device.queues[0]).unwrap().side_effect();
    assert_eq!(said(&device(vec![unused()])), ", and disable the device first");
    let disabled = IdxdDevice { is_enabled: false, ..device(vec![unused()]) };
    assert_eq!(said(&disabled), "");
    let ready = IdxdQueue { is_enabled: false, ..queue(FileAccess::Missing) };
    let running = IdxdQueue { name: "wq0.1".into(), ..queue(FileAccess::Allowed) };
    assert_eq!(said(&device(vec![ready, running])), "");
}

#[test]
fn a_queue_gets_only_descriptors_that_the_others_leave() {
    let sized = |name: &str, size| IdxdQueue { name: name.into(), size, ..unused() };
    let queues = vec![sized("wq0.0", 0), sized("wq0.1", 120)];
    let disabled = IdxdDevice { is_enabled: false, ..device(queues) };
    assert!(configure(&disabled, true).contains("--wq-size=8 "));
    // All descriptors belong to the second queue, so that is the one to configure.
    let queues = vec![sized("wq0.0", 0), sized("wq0.1", 128)];
    let disabled = IdxdDevice { is_enabled: false, ..device(queues) };
    assert!(configure(&disabled, true).contains("config-wq dsa0/wq0.1 "));
    // The kernel refuses any size of the first one.
    let reason = enable(&disabled, &disabled.queues[0]).unwrap_err();
    assert_eq!(
        reason,
        "the device has no descriptors left for it: wq0.1 has 128; give another queue fewer first"
    );
    // A device that is enabled gives all back when it is disabled.
    let enabled = IdxdDevice { is_enabled: true, ..disabled };
    assert!(enable(&enabled, &enabled.queues[0]).is_ok());
    for is_enabled in [true, false] {
        let empty = IdxdDevice { is_enabled, total_size: Some(0), ..device(vec![unused()]) };
        assert_eq!(enable(&empty, &empty.queues[0]).unwrap_err(), "the device has no descriptors");
    }
}

#[test]
fn the_two_forms_of_the_commands_are_both_there() {
    let device = device(vec![unused()]);
    let (first, other) = enable(&device, &device.queues[0]).unwrap().forms(true);
    let (files, tool) = enable(&device, &device.queues[0]).unwrap().forms(false);
    assert_eq!((Some(files), Some(first)), (other, tool));
    // A file has only one way to be opened.
    assert_eq!(open_to_user(Path::new("/dev/dsa/wq0.0")).forms(true).1, None);
}

/// A tree with the files of a device and of its bus, without the attributes that are named.
fn tree(absent: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let create = |file: &str| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    };
    for file in ["group_id", "mode", "size", "threshold", "priority", "type", "driver_name", "name"]
    {
        if !absent.contains(&file) {
            create(&format!("devices/dsa0/wq0.0/{file}"));
        }
    }
    // What only enables a queue runs in the queue's own folder.
    fs::create_dir_all(root.path().join("devices/wq0.0")).unwrap();
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
        let commands = ConfiguredQueue::of(&device, &device.queues[0]).unwrap().by_files(bus);
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

#[test]
fn a_queue_is_enabled_with_the_name_of_its_driver_or_without() {
    for has_name in [true, false] {
        let root = tree(&[]);
        let name = root.path().join("devices/wq0.0/driver_name");
        if has_name {
            fs::write(&name, "").unwrap();
        }
        let commands = enable_by_files("wq0.0", root.path().to_str().unwrap());
        let commands = commands.strip_prefix("sudo ").unwrap();
        let output = Command::new("sh").args(["-c", commands]).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let text = |file: &str| fs::read_to_string(root.path().join(file)).unwrap_or_default();
        assert_eq!(text("drivers/user/bind"), "wq0.0\n");
        assert_eq!(text("devices/wq0.0/driver_name"), if has_name { "user\n" } else { "" });
    }
}
