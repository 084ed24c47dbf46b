//! Devices on the PCI bus and their drivers, as sysfs describes them. Nothing is changed.
//!
//! All files are under one root directory: `/` on a machine, a temporary tree in tests.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access as Ask, access};

/// The kernel driver that gives programs access to devices.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// PCI vendor and device id.
pub type PciId = (u16, u16);

const INTEL: u16 = 0x8086;

/// I/OAT, the copy engine of Intel's server chipsets: all models that Linux supports.
#[rustfmt::skip]
pub const IOAT: &[PciId] = &[
    // The first models with version 3 registers.
    (INTEL, 0x3429), (INTEL, 0x342a), (INTEL, 0x342b), (INTEL, 0x342c),
    (INTEL, 0x3430), (INTEL, 0x3431), (INTEL, 0x3432), (INTEL, 0x3433),
    // Jasper Forest.
    (INTEL, 0x3710), (INTEL, 0x3711), (INTEL, 0x3712), (INTEL, 0x3713), (INTEL, 0x3714),
    (INTEL, 0x3715), (INTEL, 0x3716), (INTEL, 0x3717), (INTEL, 0x3718), (INTEL, 0x3719),
    // Sandy Bridge.
    (INTEL, 0x3c20), (INTEL, 0x3c21), (INTEL, 0x3c22), (INTEL, 0x3c23), (INTEL, 0x3c24),
    (INTEL, 0x3c25), (INTEL, 0x3c26), (INTEL, 0x3c27), (INTEL, 0x3c2e), (INTEL, 0x3c2f),
    // Ivy Bridge.
    (INTEL, 0x0e20), (INTEL, 0x0e21), (INTEL, 0x0e22), (INTEL, 0x0e23), (INTEL, 0x0e24),
    (INTEL, 0x0e25), (INTEL, 0x0e26), (INTEL, 0x0e27), (INTEL, 0x0e2e), (INTEL, 0x0e2f),
    // Haswell.
    (INTEL, 0x2f20), (INTEL, 0x2f21), (INTEL, 0x2f22), (INTEL, 0x2f23), (INTEL, 0x2f24),
    (INTEL, 0x2f25), (INTEL, 0x2f26), (INTEL, 0x2f27), (INTEL, 0x2f2e), (INTEL, 0x2f2f),
    // Server Atom, and Broadwell with the same device.
    (INTEL, 0x0c50), (INTEL, 0x0c51), (INTEL, 0x0c52), (INTEL, 0x0c53),
    (INTEL, 0x6f50), (INTEL, 0x6f51), (INTEL, 0x6f52), (INTEL, 0x6f53),
    // Broadwell.
    (INTEL, 0x6f20), (INTEL, 0x6f21), (INTEL, 0x6f22), (INTEL, 0x6f23), (INTEL, 0x6f24),
    (INTEL, 0x6f25), (INTEL, 0x6f26), (INTEL, 0x6f27), (INTEL, 0x6f2e), (INTEL, 0x6f2f),
    // Skylake and Cascade Lake, Ice Lake.
    (INTEL, 0x2021), (INTEL, 0x0b00),
];

/// DSA, the data streaming accelerator of Intel's server processors since 2023: all models that
/// Linux supports.
pub const DSA: &[PciId] = &[(INTEL, 0x0b25), (INTEL, 0x11fb), (INTEL, 0x1212)];

/// Network cards with the registers and descriptors of the 82574L: 82574L and 82574LA.
pub const E1000E: &[PciId] = &[(INTEL, 0x10d3), (INTEL, 0x10f6)];

/// A PCI device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciDevice {
    /// Address on the bus, such as `0000:02:00.0`.
    pub address: String,
    /// Vendor and device id.
    pub id: PciId,
    /// Class, subclass and programming interface in three bytes.
    pub class: u32,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// IOMMU group; `None` without an IOMMU.
    pub group: Option<IommuGroup>,
    /// The network interfaces of this device.
    pub interfaces: Vec<NetInterface>,
}

/// Devices that the IOMMU cannot isolate from each other: a program gets all of them or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IommuGroup {
    /// Group number, which is the name of its file in `/dev/vfio`.
    pub number: u32,
    /// The other devices of the group.
    pub other_members: Vec<GroupMember>,
    /// Whether this process may open the group.
    pub access: FileAccess,
}

/// Another device of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMember {
    /// Address on the bus.
    pub address: String,
    /// The driver that it is bound to.
    pub driver: Option<String>,
}

impl GroupMember {
    /// Whether the driver of this device prevents programs from using the group.
    pub fn blocks_group(&self) -> bool {
        let harmless = |driver: &str| ["pcieport", "pci-stub"].contains(&driver);
        self.driver.as_deref().is_some_and(|driver| !driver.contains("vfio") && !harmless(driver))
    }
}

/// Whether a file can be opened for reading and writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAccess {
    /// It can be opened.
    Allowed,
    /// Its permissions forbid it.
    Denied,
    /// The file does not exist.
    Missing,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetInterface {
    /// Name of the interface.
    pub name: String,
    /// Whether the interface is up.
    pub is_up: bool,
    /// Whether the default route uses the interface, directly or through a bridge or bond.
    pub has_default_route: bool,
}

impl PciDevice {
    /// The interface that would be lost if the device were unbound: the one with the default route,
    /// or one that is up.
    pub fn active_interface(&self) -> Option<&NetInterface> {
        let up = || self.interfaces.iter().find(|interface| interface.is_up);
        self.interfaces.iter().find(|interface| interface.has_default_route).or_else(up)
    }

    /// Whether the device is bound to `vfio-pci`.
    pub fn is_bound_to_vfio(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_DRIVER)
    }
}

/// The PCI bus in sysfs.
#[derive(Debug, Clone)]
pub struct PciBus {
    root: PathBuf,
}

impl Default for PciBus {
    fn default() -> Self {
        Self::with_root("/")
    }
}

impl PciBus {
    /// The bus in the files under `root`.
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// All devices, sorted by address; empty without a bus.
    pub fn devices(&self) -> Vec<PciDevice> {
        self.addresses().iter().filter_map(|address| self.read(address)).collect()
    }

    /// The devices with one of these ids, sorted by address.
    pub fn find(&self, ids: &[PciId]) -> Vec<PciDevice> {
        let wanted = |address: &&String| self.id(address).is_some_and(|id| ids.contains(&id));
        self.addresses().iter().filter(wanted).filter_map(|address| self.read(address)).collect()
    }

    /// The device at an address. The domain is optional: `02:00.0` is `0000:02:00.0`.
    pub fn device(&self, address: &str) -> Option<PciDevice> {
        self.read(&full_address(address)?)
    }

    /// The number of IOMMU groups; 0 without an IOMMU.
    pub fn group_count(&self) -> usize {
        names(&self.root.join("sys/kernel/iommu_groups")).len()
    }

    /// Whether this process may open the VFIO container file.
    pub fn container_access(&self) -> FileAccess {
        file_access(&self.root.join("dev/vfio/vfio"))
    }

    fn addresses(&self) -> Vec<String> {
        names(&self.root.join("sys/bus/pci/devices"))
    }

    fn folder(&self, address: &str) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address)
    }

    fn id(&self, address: &str) -> Option<PciId> {
        let folder = self.folder(address);
        let number = |file| u16::try_from(hexadecimal(&folder.join(file))?).ok();
        Some((number("vendor")?, number("device")?))
    }

    fn read(&self, address: &str) -> Option<PciDevice> {
        let folder = self.folder(address);
        Some(PciDevice {
            address: address.to_owned(),
            id: self.id(address)?,
            class: hexadecimal(&folder.join("class")).unwrap_or(0),
            driver: self.driver(address),
            group: self.group(address),
            interfaces: self.interfaces(&folder.join("net")),
        })
    }

    fn driver(&self, address: &str) -> Option<String> {
        link_name(&self.folder(address).join("driver"))
    }

    fn group(&self, address: &str) -> Option<IommuGroup> {
        let number = link_name(&self.folder(address).join("iommu_group"))?.parse().ok()?;
        let members = self.root.join(format!("sys/kernel/iommu_groups/{number}/devices"));
        let others = names(&members).into_iter().filter(|member| member != address);
        let other_members =
            others.map(|address| GroupMember { driver: self.driver(&address), address }).collect();
        let access = file_access(&self.root.join(format!("dev/vfio/{number}")));
        Some(IommuGroup { number, other_members, access })
    }

    fn interfaces(&self, folder: &Path) -> Vec<NetInterface> {
        let interfaces = names(folder);
        if interfaces.is_empty() {
            return Vec::new();
        }
        let routes = self.default_routes();
        interfaces
            .into_iter()
            .map(|name| {
                let mut stack = BTreeSet::new();
                self.collect_upper(&name, &mut stack);
                let has_default_route = !stack.is_disjoint(&routes);
                NetInterface { is_up: self.is_up(&name), has_default_route, name }
            })
            .collect()
    }

    /// Collects the interface and all bridges, bonds and virtual interfaces on top of it.
    fn collect_upper(&self, name: &str, stack: &mut BTreeSet<String>) {
        if !stack.insert(name.to_owned()) {
            return;
        }
        for entry in names(&self.root.join("sys/class/net").join(name)) {
            if let Some(upper) = entry.strip_prefix("upper_") {
                self.collect_upper(upper, stack);
            }
        }
    }

    fn is_up(&self, interface: &str) -> bool {
        const UP: u32 = 1;
        let flags = self.root.join("sys/class/net").join(interface).join("flags");
        hexadecimal(&flags).is_some_and(|flags| flags & UP != 0)
    }

    /// The interfaces of default routes.
    fn default_routes(&self) -> BTreeSet<String> {
        let read = |file: &str| fs::read_to_string(self.root.join(file)).unwrap_or_default();
        let mut names = BTreeSet::new();
        for line in read("proc/net/route").lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [name, "00000000", _, _, _, _, _, "00000000", ..] = fields[..] {
                names.insert(name.to_owned());
            }
        }
        for line in read("proc/net/ipv6_route").lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [target, "00", .., name] = fields[..]
                && target.bytes().all(|digit| digit == b'0')
                && name != "lo"
            {
                names.insert(name.to_owned());
            }
        }
        names
    }
}

/// Normalises an address and adds the domain; `None` if it is no PCI address.
pub fn full_address(address: &str) -> Option<String> {
    let full = match address.matches(':').count() {
        1 => format!("0000:{address}"),
        _ => address.to_owned(),
    };
    let [domain, bus, rest] = full.split(':').collect::<Vec<_>>()[..] else { return None };
    let (slot, function) = rest.split_once('.')?;
    let parts = [(domain, 4..=8), (bus, 2..=2), (slot, 2..=2), (function, 1..=1)];
    let is_valid = parts.iter().all(|(part, digits)| {
        digits.contains(&part.len()) && part.bytes().all(|digit| digit.is_ascii_hexdigit())
    });
    is_valid.then(|| full.to_ascii_lowercase())
}

/// The names in a directory, sorted; empty if it does not exist.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The file name of a link's target.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Reads a number with the prefix `0x`.
fn hexadecimal(file: &Path) -> Option<u32> {
    let text = fs::read_to_string(file).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

pub(crate) fn file_access(file: &Path) -> FileAccess {
    match access(file, Ask::READ_OK | Ask::WRITE_OK).map_err(|error| io::Error::from(error).kind())
    {
        Ok(()) => FileAccess::Allowed,
        Err(io::ErrorKind::NotFound) => FileAccess::Missing,
        Err(_) => FileAccess::Denied,
    }
}

#[cfg(test)]
mod tests;
