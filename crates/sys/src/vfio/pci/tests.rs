use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;
use crate::vfio::VfioError;

/// A sysfs tree with an IOMMU, a bridge, a network card, a disk and two copy engines.
struct FakeSysfs(TempDir);

impl FakeSysfs {
    fn new() -> Self {
        let tree = Self(TempDir::new().unwrap());
        tree.device("0000:00:1c.0", (0x8086, 0x8c10), "0x060400", Some("pcieport"), Some(2));
        tree.device("0000:02:00.0", (0x8086, 0x10d3), "0x020000", Some("e1000e"), Some(2));
        tree.device("0000:03:00.0", (0x144d, 0xa808), "0x010802", Some("nvme"), Some(3));
        tree.device("0000:00:04.0", (0x8086, 0x2021), "0x088000", Some("ioatdma"), Some(30));
        tree.device("0000:00:04.1", (0x8086, 0x2021), "0x088000", None, Some(31));
        tree.write("dev/vfio/vfio", "");
        tree
    }

    fn bus(&self) -> PciBus {
        PciBus::with_root(self.0.path())
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.0.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn link(&self, link: &str, target: &str) {
        let link = self.0.path().join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&link);
        symlink(target, link).unwrap();
    }

    fn device(&self, at: &str, id: PciId, class: &str, driver: Option<&str>, group: Option<u32>) {
        let folder = format!("sys/bus/pci/devices/{at}");
        self.write(&format!("{folder}/vendor"), &format!("{:#06x}\n", id.0));
        self.write(&format!("{folder}/device"), &format!("{:#06x}\n", id.1));
        self.write(&format!("{folder}/class"), &format!("{class}\n"));
        if let Some(driver) = driver {
            self.link(&format!("{folder}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        }
        if let Some(group) = group {
            self.link(
                &format!("{folder}/iommu_group"),
                &format!("../../../kernel/iommu_groups/{group}"),
            );
            self.link(&format!("sys/kernel/iommu_groups/{group}/devices/{at}"), "elsewhere");
        }
    }

    fn interface(&self, at: &str, name: &str, flags: &str) {
        self.write(&format!("sys/bus/pci/devices/{at}/net/{name}/flags"), flags);
        self.write(&format!("sys/class/net/{name}/flags"), flags);
    }

    fn bind_to_vfio(&self, at: &str) {
        self.link(&format!("sys/bus/pci/devices/{at}/driver"), "../drivers/vfio-pci");
    }
}

const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n\
                      br0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                      eth1\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

#[test]
fn a_device_is_read_with_its_driver_and_its_group() {
    let tree = FakeSysfs::new();
    let card = tree.bus().device("0000:02:00.0").unwrap();
    assert_eq!((card.id, card.class), ((0x8086, 0x10d3), 0x2_0000));
    assert_eq!(card.driver.as_deref(), Some("e1000e"));
    let group = card.group.unwrap();
    assert_eq!((group.number, group.access), (2, FileAccess::Missing));
    let bridge = &group.other_members[..];
    assert!(matches!(bridge, [other] if other.address == "0000:00:1c.0"), "{bridge:?}");
    assert!(!bridge[0].blocks_group(), "a bridge may keep its driver");
    assert!(card.interfaces.is_empty());
}

#[test]
fn devices_are_found_by_their_numbers_in_the_order_of_their_addresses() {
    let tree = FakeSysfs::new();
    let addresses = |found: Vec<PciDevice>| -> Vec<String> {
        found.into_iter().map(|device| device.address).collect()
    };
    assert_eq!(addresses(tree.bus().find(IOAT)), ["0000:00:04.0", "0000:00:04.1"]);
    assert_eq!(addresses(tree.bus().find(E1000E)), ["0000:02:00.0"]);
    assert_eq!(tree.bus().devices().len(), 5);
    assert_eq!(tree.bus().group_count(), 4);
    let empty = PciBus::with_root(tree.0.path().join("empty"));
    assert_eq!((empty.devices(), empty.group_count()), (vec![], 0));
    assert_eq!(empty.container_access(), FileAccess::Missing);
}

#[test]
fn the_domain_of_an_address_may_be_left_out_and_nonsense_is_no_address() {
    let tree = FakeSysfs::new();
    assert_eq!(tree.bus().device("02:00.0").unwrap().address, "0000:02:00.0");
    assert_eq!(full_address("10000:E1:00.0").as_deref(), Some("10000:e1:00.0"));
    for invalid in ["", "02:00", "../..:02:00.0", "0000:02:00.0/net", "0000:2:0.0", "a:b:c:d.e"] {
        assert_eq!(tree.bus().device(invalid), None, "{invalid}");
    }
}

#[test]
fn an_interface_that_is_part_of_a_bridge_has_the_route_of_the_bridge() {
    let tree = FakeSysfs::new();
    tree.interface("0000:02:00.0", "eth0", "0x1003\n");
    tree.link("sys/class/net/eth0/upper_bond0", "../bond0");
    tree.link("sys/class/net/bond0/upper_br0", "../br0");
    tree.link("sys/class/net/bond0/lower_eth0", "../eth0");
    let card = || tree.bus().device("0000:02:00.0").unwrap();
    assert!(!card().active_interface().unwrap().has_default_route, "no interface has a route");
    tree.write("proc/net/route", ROUTES);
    let found = card();
    let network = found.active_interface().unwrap();
    assert!(network.name == "eth0" && network.is_up && network.has_default_route, "{network:?}");
}

#[test]
fn an_interface_that_is_switched_off_carries_nothing() {
    let tree = FakeSysfs::new();
    tree.interface("0000:02:00.0", "eth1", "0x1002\n");
    tree.write("proc/net/route", ROUTES);
    let card = tree.bus().device("0000:02:00.0").unwrap();
    assert_eq!(card.interfaces.len(), 1);
    assert_eq!(card.active_interface(), None);
}

#[test]
fn a_default_route_of_the_sixth_version_counts() {
    let tree = FakeSysfs::new();
    tree.interface("0000:02:00.0", "eth0", "0x1003\n");
    let zero = "0".repeat(32);
    let loopback = format!("{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n");
    tree.write("proc/net/ipv6_route", &loopback);
    let has_route = || tree.bus().device("0000:02:00.0").unwrap().interfaces[0].has_default_route;
    assert!(!has_route());
    let route = format!("{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000003 eth0\n");
    tree.write("proc/net/ipv6_route", &(loopback + &route));
    assert!(has_route());
}

#[test]
fn each_obstacle_is_named_with_its_cure_until_none_is_left() {
    let tree = FakeSysfs::new();
    let blocker = || {
        let bus = tree.bus();
        bus.device("0000:02:00.0").unwrap().open_blocker(bus.container_access())
    };
    let says = |error: &Option<VfioError>| error.as_ref().unwrap().to_string();
    let bound = blocker();
    assert!(says(&bound).starts_with("0000:02:00.0 is bound to the kernel driver e1000e: sudo"));
    tree.bind_to_vfio("0000:02:00.0");
    assert!(says(&blocker()).contains("sudo modprobe vfio-pci"), "the group has no file yet");
    tree.device("0000:02:00.1", (0x8086, 0x1533), "0x020000", Some("igb"), Some(2));
    assert!(says(&blocker()).contains("0000:02:00.1 with igb"), "{}", says(&blocker()));
    tree.bind_to_vfio("0000:02:00.1");
    tree.write("dev/vfio/2", "");
    assert!(blocker().is_none());
}

#[test]
fn a_device_without_a_group_needs_an_iommu() {
    let tree = FakeSysfs::new();
    tree.device("0000:05:00.0", (0x8086, 0x10d3), "0x020000", Some("vfio-pci"), None);
    let card = tree.bus().device("0000:05:00.0").unwrap();
    let text = card.open_blocker(FileAccess::Allowed).unwrap().to_string();
    assert!(text.contains("intel_iommu=on") && text.contains("0000:05:00.0"), "{text}");
}

#[test]
fn nobody_is_told_to_take_a_card_that_carries_the_network() {
    let tree = FakeSysfs::new();
    tree.interface("0000:02:00.0", "eth0", "0x1003\n");
    let says = || {
        let card = tree.bus().device("0000:02:00.0").unwrap();
        card.open_blocker(FileAccess::Allowed).unwrap().to_string()
    };
    assert!(says().contains("sudo ip link set eth0 down"), "{}", says());
    assert!(!says().contains("unbind"), "{}", says());
    tree.write("proc/net/route", &ROUTES.replace("br0", "eth0"));
    assert!(says().contains("disconnect the machine") && !says().contains("sudo"), "{}", says());
}
