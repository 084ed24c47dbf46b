use std::fs;

use memferry_sys::vfio::pci::IommuGroup;

use super::*;

pub(super) fn queue(access: FileAccess) -> IdxdQueue {
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

pub(super) fn device(queues: Vec<IdxdQueue>) -> IdxdDevice {
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

#[test]
fn a_queue_that_can_be_opened_is_ready_and_the_capability_is_named() {
    let facts = facts(vec![device(vec![queue(FileAccess::Allowed)])]);
    let [check] = &checks_of(&facts)[..] else { panic!("one check") };
    assert_eq!(check.status, Status::Ok);
    for part in ["/dev/dsa/wq0.0", "shared", "16 descriptors", "CAP_SYS_RAWIO", "6.12.3", "write"] {
        assert!(check.detail.contains(part), "{part}: {}", check.detail);
    }
    let submission = SubmissionFacts { has_raw_io: true, ..facts.submission.clone() };
    let privileged = AcceleratorFacts { submission, ..facts };
    let [check] = &checks_of(&privileged)[..] else { panic!("one check") };
    assert!(check.detail.contains("can be mapped"), "{}", check.detail);
}

#[test]
fn a_queue_that_may_not_be_opened_comes_with_its_owner_and_the_command() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let queue = IdxdQueue { path: file.path().into(), ..queue(FileAccess::Denied) };
    let [check] = &checks_of(&facts(vec![device(vec![queue])]))[..] else { panic!("one check") };
    assert_eq!(check.status, Status::Warn);
    let owner = UserNames::default().permissions(file.path()).unwrap();
    assert!(check.detail.contains(&format!("({owner})")), "{}", check.detail);
    let command = format!("chmod 660 {}", file.path().display());
    assert!(check.fix.as_ref().unwrap().contains(&command));
}

#[test]
fn a_queue_without_its_file_is_told() {
    let [check] = &checks_of(&facts(vec![device(vec![queue(FileAccess::Missing)])]))[..] else {
        panic!("one check")
    };
    assert!(check.detail.contains("does not exist"), "{}", check.detail);
    assert!(!check.detail.contains("owner"), "{}", check.detail);
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
    let mut facts = facts(IdxdBus::with_root(root.path()).devices());
    facts.submission.has_movdir64b = false;
    let [check] = &checks_of(&facts)[..] else { panic!("one check") };
    assert_eq!(check.status, Status::Ok);
    for part in ["dedicated to one program", "owner ", "mode ", "no movdir64b", "through write"] {
        assert!(check.detail.contains(part), "{part}: {}", check.detail);
    }
}
