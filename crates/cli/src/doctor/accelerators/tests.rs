use std::fs;

use memferry_sys::idxd::sysfs::IdxdQueue;
use memferry_sys::vfio::pci::IommuGroup;

use super::*;

pub(super) fn queue(access: FileAccess) -> IdxdQueue {
    IdxdQueue {
        name: "wq0.0".into(),
        path: "/dev/dsa/wq0.0".into(),
        access,
        is_enabled: true,
        state: Some("enabled".into()),
        is_for_programs: true,
        kind: Some("user".into()),
        driver: Some("user".into()),
        group: Some(0),
        is_dedicated: Some(false),
        size: 16,
        max_transfer_bytes: 2 << 20,
        max_batch: 64,
        block_on_fault: false,
    }
}

pub(super) fn device(queues: Vec<IdxdQueue>) -> IdxdDevice {
    IdxdDevice {
        name: "dsa0".into(),
        address: Some("0000:6a:01.0".into()),
        version: Some(0x100),
        is_enabled: true,
        state: Some("enabled".into()),
        has_address_spaces: true,
        numa_node: Some(0),
        opcodes: None,
        total_size: Some(128),
        queues,
    }
}

fn on_bus(driver: Option<&str>, access: FileAccess) -> PciDevice {
    PciDevice {
        address: "0000:6a:01.0".into(),
        id: (0x8086, 0x0b25),
        class: 0x8_8000,
        driver: driver.map(str::to_owned),
        group: Some(IommuGroup { number: 7, other_members: vec![], access }),
        interfaces: vec![],
    }
}

fn facts(devices: Vec<IdxdDevice>) -> AcceleratorFacts {
    AcceleratorFacts {
        found: Vec::new(),
        devices,
        container: FileAccess::Allowed,
        submission: SubmissionFacts {
            has_raw_io: false,
            has_enqcmd: true,
            has_movdir64b: true,
            release: "6.12.3".into(),
        },
        names: UserNames::default(),
        has_tool: true,
    }
}

fn with_bus(found: PciDevice, devices: Vec<IdxdDevice>) -> AcceleratorFacts {
    AcceleratorFacts { found: vec![found], ..facts(devices) }
}

#[test]
fn a_machine_without_the_device_has_no_check_of_it() {
    assert!(checks_of(&facts(Vec::new())).is_empty());
}

/// All that a check says.
fn words(check: &Check) -> String {
    let lines = std::iter::once(&check.detail).chain(&check.notes);
    lines.map(String::as_str).collect::<Vec<_>>().join("\n")
}

/// A queue that is not configured.
fn unused(name: &str) -> IdxdQueue {
    IdxdQueue {
        name: name.into(),
        path: format!("/nowhere/dsa/{name}").into(),
        is_enabled: false,
        state: Some("disabled".into()),
        is_for_programs: false,
        kind: Some("none".into()),
        driver: None,
        group: None,
        size: 0,
        ..queue(FileAccess::Missing)
    }
}

#[test]
fn a_queue_that_can_be_opened_is_ready_and_the_capability_is_named() {
    let facts = facts(vec![device(vec![queue(FileAccess::Allowed)])]);
    let [of_device, check] = &checks_of(&facts)[..] else { panic!("two checks") };
    assert_eq!((of_device.status, check.status), (Status::Ok, Status::Ok));
    assert_eq!(of_device.detail, "dsa0 at 0000:6a:01.0");
    let properties =
        "enabled, version 1.0, NUMA node 0, 1 work queue(s), which have 16 of 128 descriptors";
    assert_eq!(of_device.notes[0], properties);
    assert!(of_device.notes[1].starts_with("Linux 6.12.3 demands CAP_SYS_RAWIO"));
    let way = "through write, without batches, because this process has no CAP_SYS_RAWIO";
    assert_eq!(check.detail, format!("wq0.0: ready; descriptors go {way}"));
    let text = words(check);
    for part in ["shared, 16 descriptors of up to 2 MiB", "type user, driver user, group 0"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let submission = SubmissionFacts { has_raw_io: true, ..facts.submission.clone() };
    let privileged = AcceleratorFacts { submission, ..facts };
    let [_, check] = &checks_of(&privileged)[..] else { panic!("two checks") };
    assert!(check.detail.ends_with("to its mapped portal"), "{}", check.detail);
}

#[test]
fn a_queue_that_may_not_be_opened_comes_with_its_owner_its_way_and_the_command() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let queue = IdxdQueue { path: file.path().into(), ..queue(FileAccess::Denied) };
    let [of_device, check] = &checks_of(&facts(vec![device(vec![queue])]))[..] else {
        panic!("two checks")
    };
    assert_eq!((of_device.status, check.status), (Status::Warn, Status::Warn));
    let owner = UserNames::default().permissions(file.path()).unwrap();
    let text = words(check);
    for part in [
        "not used: this user may not open its file".into(),
        format!("{owner}; this user may not open it"),
        "once usable: descriptors go through write".into(),
        "no CAP_SYS_RAWIO".into(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    let command = format!("chmod 660 {}", file.path().display());
    assert!(check.fix.as_ref().unwrap().contains(&command));
    // The queue has the commands, so the device has none.
    assert_eq!(of_device.fix, None);
}

#[test]
fn a_queue_without_its_file_is_told() {
    let [_, check] = &checks_of(&facts(vec![device(vec![queue(FileAccess::Missing)])]))[..] else {
        panic!("two checks")
    };
    assert!(check.detail.contains("does not exist"), "{}", check.detail);
    assert!(!words(check).contains("owner"), "{}", words(check));
}

#[test]
fn a_device_without_queues_is_configured_with_the_tool_or_without() {
    let mut facts = facts(vec![device(vec![unused("wq0.0")])]);
    let fixes = |facts: &AcceleratorFacts| {
        let check = &checks_of(facts)[0];
        (check.fix.clone().unwrap(), check.other_fix.clone().unwrap())
    };
    let (tool, files) = fixes(&facts);
    for part in ["accel-config config-wq dsa0/wq0.0", "--mode=shared", "enable-wq dsa0/wq0.0"] {
        assert!(tool.contains(part), "{part}: {tool}");
    }
    for part in ["/sys/bus/dsa/devices/dsa0", "echo shared > wq0.0/mode", "drivers/user/bind"] {
        assert!(files.contains(part), "{part}: {files}");
    }
    facts.has_tool = false;
    assert_eq!(fixes(&facts), (files, tool));
}

#[test]
fn every_queue_is_named_and_those_that_are_alike_share_a_line() {
    let queues = vec![
        unused("wq0.0"),
        IdxdQueue { is_for_programs: false, kind: Some("kernel".into()), ..unused("wq0.1") },
        unused("wq0.2"),
        unused("wq0.3"),
    ];
    let checks = checks_of(&facts(vec![device(queues)]));
    let details: Vec<_> = checks.iter().map(|check| check.detail.as_str()).collect();
    assert_eq!(
        details,
        [
            "dsa0 at 0000:6a:01.0: none of its work queues can be used",
            "wq0.0: not used: it is not configured",
            "wq0.1: not used: it is not configured",
            "wq0.2, wq0.3: not used: it is not configured",
        ]
    );
    assert!(words(&checks[1]).contains("disabled, type none, driver none, group none"));
    assert!(words(&checks[2]).contains("type kernel"), "{}", words(&checks[2]));
    assert!(words(&checks[3]).contains("once usable: descriptors go"), "{}", words(&checks[3]));
}

#[test]
fn queues_beside_a_usable_one_are_optional_and_what_ends_it_is_said() {
    let other = IdxdQueue {
        name: "wq0.1".into(),
        is_for_programs: false,
        kind: Some("kernel".into()),
        ..queue(FileAccess::Missing)
    };
    let ready = IdxdQueue { size: 8, is_for_programs: true, group: Some(0), ..unused("wq0.3") };
    let queues = vec![queue(FileAccess::Allowed), other, unused("wq0.2"), ready];
    let checks = checks_of(&facts(vec![device(queues)]));
    let signs: Vec<_> = checks.iter().map(|check| (check.status, check.need)).collect();
    let spare = (Status::Missing, Need::OptionalHardware);
    let ok = (Status::Ok, Need::Usual);
    assert_eq!(signs, [ok, ok, spare, spare, spare]);
    assert!(checks[2].detail.contains("another use (type kernel)"), "{}", checks[2].detail);
    // Its commands would end the usable queue: they are not offered for copying.
    assert_eq!(checks[3].fix, None);
    assert!(words(&checks[3]).contains("which ends wq0.0, wq0.1"), "{}", words(&checks[3]));
    assert!(checks[4].fix.as_ref().unwrap().contains("enable-wq dsa0/wq0.3"));
    assert!(checks[4].other_fix.as_ref().unwrap().contains("drivers/user/bind"));
}

#[test]
fn the_report_for_scripts_has_every_queue_with_its_commands() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let closed = IdxdQueue { path: file.path().into(), ..queue(FileAccess::Denied) };
    let facts = facts(vec![device(vec![closed, unused("wq0.1")])]);
    let json = serde_json::to_value(DsaReport::all(&facts)).unwrap();
    let device = &json[0];
    assert_eq!((&device["name"], &device["version"]), (&"dsa0".into(), &"1.0".into()));
    assert_eq!((&device["address"], &device["driver"]), (&"0000:6a:01.0".into(), &"idxd".into()));
    let [closed, unused] = &device["queues"].as_array().unwrap()[..] else { panic!("two queues") };
    for (field, value) in [("mode", "shared"), ("state", "enabled"), ("type", "user")] {
        assert_eq!(closed[field], value, "{field}");
    }
    assert_eq!((&closed["size"], &closed["group"]), (&16.into(), &0.into()));
    assert_eq!((&closed["may_open"], &closed["is_usable"]), (&false.into(), &false.into()));
    assert_eq!(closed["permissions"]["mode"], "600");
    assert_eq!((&closed["way"], &closed["when_usable"]["way"]), (&().into(), &"write".into()));
    assert_eq!(closed["when_usable"]["capability"]["is_demanded"], "yes");
    assert_eq!(unused["obstacle"], "it is not configured");
    let commands = &unused["commands"];
    assert!(commands["accel_config"].as_str().unwrap().contains("config-wq dsa0/wq0.1"));
    assert!(commands["sysfs"].as_str().unwrap().contains("echo wq0.1 > "));
    assert_eq!(commands["is_disabled_first"], true);
    assert_eq!(commands["ended_queues"], serde_json::json!(["wq0.0"]));
}

#[test]
fn that_the_commands_take_a_running_queue_from_the_kernel_is_said() {
    let of_kernel = IdxdQueue {
        is_for_programs: false,
        kind: Some("kernel".into()),
        driver: Some("dmaengine".into()),
        ..queue(FileAccess::Missing)
    };
    let facts = facts(vec![device(vec![of_kernel])]);
    let check = &checks_of(&facts)[0];
    assert!(check.fix.as_ref().unwrap().contains("disable-device dsa0"));
    let effect = "the commands configure wq0.0 as a shared queue, and disable the device first, which \
                  ends wq0.0";
    assert!(check.notes.iter().any(|note| note == effect), "{:?}", check.notes);
    let json = serde_json::to_value(DsaReport::all(&facts)).unwrap();
    let commands = &json[0]["queues"][0]["commands"];
    assert_eq!(commands["is_disabled_first"], true);
    assert_eq!(commands["ended_queues"], serde_json::json!(["wq0.0"]));
}

#[test]
fn the_way_of_a_queue_that_is_not_usable_is_that_of_the_queue_that_its_commands_make() {
    let mut facts = facts(vec![]);
    facts.submission.has_raw_io = true;
    facts.submission.has_enqcmd = false;
    // Only a dedicated queue has a portal on this processor.
    let way = |device: IdxdDevice| {
        let json = serde_json::to_value(DsaReport::of(&device, &facts)).unwrap();
        json["queues"][0]["when_usable"]["way"].as_str().unwrap().to_owned()
    };
    let dedicated = IdxdQueue { is_dedicated: Some(true), ..queue(FileAccess::Allowed) };
    assert_eq!(way(device(vec![dedicated.clone()])), "portal");
    let closed = IdxdQueue { access: FileAccess::Denied, ..dedicated.clone() };
    assert_eq!(way(device(vec![closed])), "portal");
    let disabled = IdxdQueue { is_enabled: false, ..dedicated.clone() };
    assert_eq!(way(device(vec![disabled.clone()])), "portal", "it is only enabled");
    let of_kernel = IdxdQueue { is_for_programs: false, ..dedicated };
    assert_eq!(way(device(vec![of_kernel])), "write");
    let off = IdxdDevice { is_enabled: false, ..device(vec![disabled.clone()]) };
    assert_eq!(way(off), "write");
    let no_group = IdxdQueue { group: None, ..disabled };
    assert_eq!(way(device(vec![no_group])), "write");
}

#[test]
fn a_queue_for_which_no_descriptors_are_left_has_the_reason_in_place_of_commands() {
    let large = IdxdQueue { size: 128, ..unused("wq0.1") };
    let queues = vec![unused("wq0.0"), large];
    let facts = facts(vec![IdxdDevice { is_enabled: false, ..device(queues) }]);
    let checks = checks_of(&facts);
    assert!(checks[0].fix.as_ref().unwrap().contains("config-wq dsa0/wq0.1 "));
    assert!(words(&checks[1]).contains("wq0.1 has 128; give another queue fewer first"));
    let json = serde_json::to_value(DsaReport::all(&facts)).unwrap();
    let [first, large] = &json[0]["queues"].as_array().unwrap()[..] else { panic!("two queues") };
    assert_eq!((&first["commands"], &large["why_no_commands"]), (&().into(), &().into()));
    assert!(first["why_no_commands"].is_string() && large["commands"].is_object());
}

#[test]
fn devices_of_other_drivers_are_reported_too() {
    let bound = with_bus(on_bus(Some("vfio-pci"), FileAccess::Allowed), vec![]);
    let json = serde_json::to_value(DsaReport::all(&bound)).unwrap();
    assert_eq!((&json[0]["driver"], &json[0]["name"]), (&"vfio-pci".into(), &().into()));
    // One that the kernel's driver has is reported once.
    let of_kernel = on_bus(Some("idxd"), FileAccess::Missing);
    assert_eq!(DsaReport::all(&with_bus(of_kernel.clone(), vec![device(vec![])])).len(), 1);
    // Its driver may have failed.
    let [check] = &checks_of(&with_bus(of_kernel, vec![]))[..] else { panic!("one check") };
    assert!(check.detail.contains("lists no device"), "{}", check.detail);
}

#[test]
fn a_device_without_address_spaces_needs_another_command_line_or_vfio() {
    let blind = || vec![IdxdDevice { has_address_spaces: false, ..device(vec![]) }];
    let fix = |facts: &AcceleratorFacts| checks_of(facts)[0].fix.clone().unwrap();
    let alone = fix(&facts(blind()));
    assert!(alone.contains("intel_iommu=on,sm_on") && !alone.contains("vfio"), "{alone}");
    let bus = on_bus(Some("idxd"), FileAccess::Missing);
    let both = fix(&with_bus(bus.clone(), blind()));
    assert!(both.contains("sm_on") && both.contains("modprobe vfio-pci"), "{both}");
    let no_iommu = PciDevice { group: None, ..bus };
    assert!(!fix(&with_bus(no_iommu, blind())).contains("vfio"));
    // Its queues are named, without commands.
    let queues = vec![queue(FileAccess::Missing), unused("wq0.1"), unused("wq0.2")];
    let checks =
        checks_of(&facts(vec![IdxdDevice { has_address_spaces: false, ..device(queues) }]));
    let names: Vec<_> = checks[1..].iter().map(|check| check.detail.split(": ").next()).collect();
    assert_eq!(names, [Some("wq0.0"), Some("wq0.1, wq0.2")]);
    assert!(checks[1..].iter().all(|check| check.fix.is_none()));
}

#[test]
fn a_device_that_no_driver_has_is_bound_to_the_kernels() {
    let facts = with_bus(on_bus(None, FileAccess::Missing), vec![]);
    let [check] = &checks_of(&facts)[..] else { panic!("one check") };
    assert_eq!(check.status, Status::Warn);
    assert!(check.fix.as_ref().unwrap().contains("modprobe idxd"));
}

#[test]
fn a_device_bound_to_vfio_is_checked_as_other_devices_are() {
    let check = |access, container| {
        let facts =
            AcceleratorFacts { container, ..with_bus(on_bus(Some("vfio-pci"), access), vec![]) };
        let [check] = &checks_of(&facts)[..] else { panic!("one check") };
        check.clone()
    };
    let ready = check(FileAccess::Allowed, FileAccess::Allowed);
    assert_eq!((ready.status, ready.name), (Status::Ok, NAME));
    assert!(ready.detail.contains("0000:6a:01.0") && ready.summary.is_some(), "{}", ready.detail);
    let closed = check(FileAccess::Denied, FileAccess::Allowed);
    assert_eq!(closed.fix.unwrap(), "sudo chown $USER /dev/vfio/7");
    let no_container = check(FileAccess::Allowed, FileAccess::Missing);
    assert_eq!(no_container.status, Status::Warn);
    let no_iommu = PciDevice { group: None, ..on_bus(Some("vfio-pci"), FileAccess::Allowed) };
    let checks = checks_of(&with_bus(no_iommu, vec![]));
    assert!(checks[0].detail.contains("no IOMMU"), "{}", checks[0].detail);
}

#[test]
fn a_device_bound_to_vfio_needs_the_instruction_of_portals() {
    let mut facts = with_bus(on_bus(Some("vfio-pci"), FileAccess::Allowed), vec![]);
    facts.submission.has_movdir64b = false;
    let checks = checks_of(&facts);
    assert_eq!(checks.len(), 2);
    assert_eq!(checks[1].status, Status::Missing);
    assert!(checks[1].detail.contains("movdir64b"), "{}", checks[1].detail);
    assert!(setting("auto", &facts).detail.contains("programs try 1 DSA device"));
}

#[test]
fn the_setting_says_what_programs_use() {
    let ready = facts(vec![device(vec![queue(FileAccess::Allowed)])]);
    assert!(setting("auto", &ready).detail.contains("1 DSA work queue"));
    let blind = IdxdDevice { has_address_spaces: false, ..ready.devices[0].clone() };
    assert!(setting("auto", &facts(vec![blind])).detail.ends_with("none is used"));
    assert!(setting("off", &ready).detail.starts_with("off"));
    assert!(setting("wq0.0", &ready).detail.contains("fail without it"));
    assert!(setting("auto", &facts(vec![])).detail.ends_with("none is used"));
    let bound = with_bus(on_bus(Some("vfio-pci"), FileAccess::Allowed), vec![]);
    let detail = setting("auto", &bound).detail;
    assert!(detail.contains("programs use 1 DSA device(s) bound to vfio-pci"), "{detail}");
    let closed = with_bus(on_bus(Some("vfio-pci"), FileAccess::Denied), vec![]);
    assert!(setting("auto", &closed).detail.contains("programs try 1 DSA device"));
}

#[test]
fn a_setting_that_makes_programs_fail_is_warned_of_with_a_cure() {
    let disabled = IdxdQueue { is_enabled: false, ..unused("wq0.1") };
    let usual = facts(vec![device(vec![queue(FileAccess::Allowed), disabled])]);
    let kernels = with_bus(on_bus(Some("idxd"), FileAccess::Allowed), vec![]);
    let mut no_store = with_bus(on_bus(Some("vfio-pci"), FileAccess::Allowed), vec![]);
    no_store.submission.has_movdir64b = false;
    for (value, facts, detail) in [
        ("nonsense", &usual, "nonsense: not valid, and programs fail"),
        ("wq0.0,6a:01.0", &usual, "wq0.0,6a:01.0: not valid, and programs fail"),
        ("wq9.9", &usual, "wq9.9: there is no such work queue, and programs fail"),
        ("wq0.0,wq0.1", &usual, "wq0.1: it is not configured, and programs fail"),
        ("6a:02.0", &kernels, "6a:02.0: no DSA has this address, and programs fail"),
        (
            "6a:01.0",
            &kernels,
            "6a:01.0: 0000:6a:01.0 is bound to the kernel driver idxd, and programs fail",
        ),
        ("6a:01.0", &no_store, "6a:01.0: this processor has no movdir64b, and programs fail"),
    ] {
        let check = setting(value, facts);
        assert_eq!((check.status, check.detail.as_str()), (Status::Warn, detail));
        assert_eq!(check.fix.unwrap(), "unset MEMFERRY_DSA, or set it to auto");
    }
    let bound = with_bus(on_bus(Some("vfio-pci"), FileAccess::Allowed), vec![]);
    assert_eq!(setting("6a:01.0", &bound).status, Status::Ok);
    assert_eq!(setting("wq0.0", &usual).status, Status::Ok);
}

#[test]
fn a_tree_of_sysfs_is_checked_from_its_files() {
    let root = tempfile::tempdir().unwrap();
    let devices = root.path().join("sys/bus/dsa/devices");
    let write = |file: &str, text: &str| {
        let path = devices.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for (file, text) in [("state", "enabled"), ("pasid_enabled", "1"), ("version", "0x100")] {
        write(&format!("dsa0/{file}"), text);
    }
    for (file, text) in [
        ("state", "enabled"),
        ("type", "user"),
        ("mode", "dedicated"),
        ("size", "16"),
        ("max_transfer_size", "2097152"),
    ] {
        write(&format!("wq0.0/{file}"), text);
    }
    fs::create_dir_all(root.path().join("dev/dsa")).unwrap();
    fs::write(root.path().join("dev/dsa/wq0.0"), "").unwrap();
    // A second queue as the kernel shows it before it is configured, and a third without any file.
    for (file, text) in [("state", "disabled"), ("type", "none"), ("mode", "shared"), ("size", "0")]
    {
        write(&format!("wq0.1/{file}"), text);
    }
    write("wq0.1/group_id", "-1");
    fs::create_dir_all(devices.join("wq0.2")).unwrap();
    let mut facts = facts(IdxdBus::with_root(root.path()).devices());
    facts.submission.has_movdir64b = false;
    let [_, check, second, third] = &checks_of(&facts)[..] else { panic!("four checks") };
    assert_eq!(check.status, Status::Ok);
    let text = words(check);
    for part in [
        "dedicated to one program",
        "owner ",
        "mode ",
        "may open it",
        "no movdir64b",
        "through write",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(words(second).contains("shared, 0 descriptors"), "{}", words(second));
    assert!(words(third).contains("no mode, 0 descriptors"), "{}", words(third));
    assert!(words(third).contains("state unknown, type none"), "{}", words(third));
}
