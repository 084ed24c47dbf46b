use memferry_sys::vfio::pci::{IommuGroup, NetInterface};

use super::*;

const CARD: DeviceFamily = FAMILIES[1];

fn engine(function: u32, driver: Option<&str>, access: FileAccess) -> PciDevice {
    PciDevice {
        address: format!("0000:00:04.{function}"),
        id: (0x8086, 0x2021),
        class: 0x8_8000,
        driver: driver.map(str::to_owned),
        group: Some(IommuGroup { number: 30 + function, other_members: vec![], access }),
        interfaces: vec![],
    }
}

fn card(driver: &str, access: FileAccess) -> PciDevice {
    let id = (0x8086, 0x10d3);
    PciDevice { id, class: 0x2_0000, ..engine(0, Some(driver), access) }
}

fn interface(has_default_route: bool) -> NetInterface {
    NetInterface { name: "eth0".into(), is_up: true, has_default_route }
}

#[test]
fn an_iommu_that_is_off_comes_with_the_cure_of_its_maker() {
    assert_eq!(iommu(30, "", CpuVendor::Intel).status, Status::Ok);
    let cure = |line, maker| {
        let check = iommu(0, line, maker);
        assert_eq!(check.status, Status::Missing);
        check.fix.unwrap()
    };
    assert!(cure("quiet", CpuVendor::Intel).contains("add intel_iommu=on"));
    assert!(cure("quiet intel_iommu=on", CpuVendor::Intel).contains("switch on VT-d"));
    assert!(cure("quiet", CpuVendor::Amd).contains("AMD-Vi"));
    assert!(cure("amd_iommu=off", CpuVendor::Amd).contains("take amd_iommu=off out of"));
    assert!(cure("", CpuVendor::Other).contains("SMMU"));
}

#[test]
fn the_maker_is_read_from_what_the_kernel_says_of_the_processor() {
    assert_eq!(CpuVendor::of("vendor_id\t: GenuineIntel\n"), CpuVendor::Intel);
    assert_eq!(CpuVendor::of("vendor_id\t: AuthenticAMD\n"), CpuVendor::Amd);
    assert_eq!(CpuVendor::of("CPU implementer\t: 0x41\n"), CpuVendor::Other);
}

#[test]
fn vfio_that_is_not_loaded_is_loaded_by_one_command() {
    assert_eq!(vfio(FileAccess::Allowed).status, Status::Ok);
    assert_eq!(vfio(FileAccess::Missing).fix.unwrap(), "sudo modprobe vfio-pci");
    assert!(vfio(FileAccess::Denied).fix.unwrap().contains("/dev/vfio/vfio"));
}

#[test]
fn a_small_limit_of_memory_for_devices_is_noticed() {
    assert_eq!(locked(None).status, Status::Ok);
    assert_eq!(locked(Some(1 << 30)).status, Status::Ok);
    let little = locked(Some(8 << 20));
    assert_eq!(little.status, Status::Warn);
    assert!(little.fix.unwrap().contains("ulimit -l"));
}

#[test]
fn a_machine_without_such_devices_is_told_that_nothing_is_broken() {
    let check = no_devices();
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.contains("nothing is broken"), "{}", check.detail);
}

#[test]
fn engines_that_are_alike_share_a_line_and_a_command() {
    let mut devices: Vec<PciDevice> =
        (0..8).map(|number| engine(number, Some("ioatdma"), FileAccess::Missing)).collect();
    devices[5] = engine(5, Some("vfio-pci"), FileAccess::Allowed);
    let sets = group_alike(&devices);
    assert_eq!(sets.iter().map(Vec::len).collect::<Vec<_>>(), [7, 1]);
    let check = family_check(&FAMILIES[0], &sets[0], FileAccess::Allowed);
    assert_eq!((check.name, check.status), ("I/OAT", Status::Warn));
    assert!(
        check
            .detail
            .starts_with("7 from 0000:00:04.0 to 0000:00:04.7 (8086:2021, groups 30 to 37)"),
        "{}",
        check.detail
    );
    assert!(check.fix.unwrap().contains("for at in 0000:00:04.0"));
    let ready = family_check(&FAMILIES[0], &sets[1], FileAccess::Allowed);
    assert_eq!((ready.status, ready.fix), (Status::Ok, None));
    assert!(ready.detail.contains("ready; given back"), "{}", ready.detail);
}

#[test]
fn nobody_is_told_how_to_take_the_card_that_carries_the_network() {
    for has_default_route in [true, false] {
        let interfaces = vec![interface(has_default_route)];
        let card = PciDevice { interfaces, ..card("e1000e", FileAccess::Missing) };
        let check = family_check(&CARD, &[&card], FileAccess::Allowed);
        assert_eq!((check.status, check.fix), (Status::Warn, None));
        assert!(check.detail.contains("eth0"), "{}", check.detail);
        assert_eq!(check.detail.contains("DO NOT TAKE IT"), has_default_route, "{}", check.detail);
    }
}

#[test]
fn a_card_whose_network_is_off_can_be_handed_over() {
    let interface = NetInterface { is_up: false, ..interface(false) };
    let card = PciDevice { interfaces: vec![interface], ..card("e1000e", FileAccess::Missing) };
    let check = family_check(&CARD, &[&card], FileAccess::Allowed);
    assert!(check.detail.ends_with("the kernel's driver e1000e has it"), "{}", check.detail);
    let cure = check.fix.unwrap();
    assert!(cure.starts_with("sudo modprobe vfio-pci && ") && cure.ends_with("/dev/vfio/30"));
}

#[test]
fn companions_in_the_group_are_named() {
    let mut card = card("e1000e", FileAccess::Missing);
    let disk = GroupMember { address: "0000:03:00.0".into(), driver: Some("nvme".into()) };
    card.group.as_mut().unwrap().other_members.push(disk);
    let check = family_check(&CARD, &[&card], FileAccess::Allowed);
    assert!(check.detail.contains("0000:03:00.0 (nvme) shares its group"), "{}", check.detail);
    assert!(check.fix.unwrap().starts_with("put the card into another slot"));
    card.driver = Some("vfio-pci".into());
    let check = family_check(&CARD, &[&card], FileAccess::Allowed);
    assert!(check.detail.contains("0000:03:00.0 with nvme"), "{}", check.detail);
}

#[test]
fn a_group_that_may_not_be_opened_is_made_the_users() {
    let card = card("vfio-pci", FileAccess::Denied);
    let check = family_check(&CARD, &[&card], FileAccess::Allowed);
    assert_eq!(check.fix.unwrap(), "sudo chown $USER /dev/vfio/30");
}

#[test]
fn without_an_iommu_a_device_cannot_be_had() {
    let card = PciDevice { group: None, ..card("e1000e", FileAccess::Missing) };
    let check = family_check(&CARD, &[&card], FileAccess::Missing);
    assert!(check.detail.contains("no IOMMU") && check.fix.unwrap().contains("intel_iommu=on"));
}

#[test]
fn programs_are_looked_for_where_shells_do() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = env::join_paths([Path::new("/nowhere"), folder.path()]).unwrap();
    assert_eq!(program("qemu", Some(&path)), None);
    assert_eq!(program("qemu", None), None);
    fs::write(folder.path().join("qemu"), "").unwrap();
    let found = program("qemu", Some(&path));
    assert_eq!(emulator(found).status, Status::Ok);
    assert!(emulator(None).fix.unwrap().contains("sudo apt install qemu-system-x86"));
}

#[test]
fn a_variable_that_asks_for_devices_is_told_what_comes_of_it() {
    let check = |value, devices: &[PciDevice]| {
        setting("MEMFERRY_IOAT", value, &FAMILIES[0], devices, FileAccess::Allowed)
    };
    let ready: Vec<_> =
        (0..8).map(|number| engine(number, Some("vfio-pci"), FileAccess::Allowed)).collect();
    assert!(check("auto", &[]).detail.contains("none is used"));
    assert!(check("auto", &ready).detail.contains("8 handed over"));
    assert!(check("off", &ready).detail.starts_with("off:"));
    for named in ["0000:00:04.0", "00:04.0", "00:04.0,00:04.7"] {
        let check = check(named, &ready);
        assert_eq!(check.status, Status::Ok, "{}", check.detail);
        assert!(check.detail.contains("fail without it"), "{}", check.detail);
    }
}

#[test]
fn a_variable_that_names_what_cannot_be_used_is_warned_of_with_a_cure() {
    let kernels = [engine(0, Some("ioatdma"), FileAccess::Allowed)];
    for (variable, value, detail) in [
        ("MEMFERRY_IOAT", "nonsense", "nonsense: not valid, and programs fail"),
        ("MEMFERRY_NIC", "00:04.0,00:04.1", "00:04.0,00:04.1: not valid, and programs fail"),
        ("MEMFERRY_IOAT", "00:05.0", "00:05.0: no I/OAT has this address, and programs fail"),
        (
            "MEMFERRY_IOAT",
            "00:04.0",
            "00:04.0: 0000:00:04.0 is bound to the kernel driver ioatdma, and programs fail",
        ),
    ] {
        let check = setting(variable, value, &FAMILIES[0], &kernels, FileAccess::Allowed);
        assert_eq!((check.status, check.detail.as_str()), (Status::Warn, detail));
        assert_eq!(check.fix.unwrap(), format!("unset {variable}, or set it to auto"));
    }
}
