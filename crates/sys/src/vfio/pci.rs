//! What the kernel tells of the devices on the PCI bus, and of who has them. Nothing is changed.
//!
//! Everything is read from files under one root folder, `/` on a machine and a made-up tree in tests.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access as Ask, access};

/// The driver through which programs reach devices.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// A maker and one of its devices, as the bus numbers them.
pub type Id = (u16, u16);

const INTEL: u16 = 0x8086;

/// I/OAT, the copy engine in the chipset of Intel's servers: all that Linux drives.
#[rustfmt::skip]
pub const IOAT: &[Id] = &[
    // The first with the registers of version 3.
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
    // Atom for servers, and Broadwell with the same device.
    (INTEL, 0x0c50), (INTEL, 0x0c51), (INTEL, 0x0c52), (INTEL, 0x0c53),
    (INTEL, 0x6f50), (INTEL, 0x6f51), (INTEL, 0x6f52), (INTEL, 0x6f53),
    // Broadwell.
    (INTEL, 0x6f20), (INTEL, 0x6f21), (INTEL, 0x6f22), (INTEL, 0x6f23), (INTEL, 0x6f24),
    (INTEL, 0x6f25), (INTEL, 0x6f26), (INTEL, 0x6f27), (INTEL, 0x6f2e), (INTEL, 0x6f2f),
    // Skylake and Cascade Lake, Ice Lake.
    (INTEL, 0x2021), (INTEL, 0x0b00),
];

/// Network cards with the registers and descriptors of the 82574L: that one and the 82574LA.
pub const E1000E: &[Id] = &[(INTEL, 0x10d3), (INTEL, 0x10f6)];

/// A device and who has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciDevice {
    /// Where it is, such as `0000:02:00.0`.
    pub address: String,
    /// Its maker and which of the maker's devices it is.
    pub id: Id,
    /// What kind of device: class, subclass and interface in three bytes.
    pub class: u32,
    /// The kernel's driver that has it.
    pub driver: Option<String>,
    /// Its group; `None` where no IOMMU stands between it and memory.
    pub group: Option<Group>,
    /// The network interfaces that are this device.
    pub interfaces: Vec<Interface>,
}

/// Devices that the IOMMU cannot tell apart: a program gets all of them or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its number, which is the name of its file in `/dev/vfio`.
    pub number: u32,
    /// The other devices in it.
    pub companions: Vec<Companion>,
    /// Whether this process may open it.
    pub access: Access,
}

/// Another device of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    /// Where it is.
    pub address: String,
    /// The kernel's driver that has it.
    pub driver: Option<String>,
}

impl Companion {
    /// Whether its driver keeps the group from programs.
    pub fn is_in_the_way(&self) -> bool {
        let harmless = |driver: &str| ["pcieport", "pci-stub"].contains(&driver);
        self.driver.as_deref().is_some_and(|driver| !driver.contains("vfio") && !harmless(driver))
    }
}

/// Whether a file can be opened for reading and writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It can.
    Allowed,
    /// Its rights forbid it.
    Denied,
    /// It is not there.
    Missing,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// What it is called.
    pub name: String,
    /// Whether somebody has switched it on.
    pub is_up: bool,
    /// Whether packets to the rest of the world leave through it, be it as a part of a bridge or bond.
    pub has_default_route: bool,
}

impl PciDevice {
    /// The interface whose network would be gone if the device were taken away.
    pub fn network(&self) -> Option<&Interface> {
        let up = || self.interfaces.iter().find(|interface| interface.is_up);
        self.interfaces.iter().find(|interface| interface.has_default_route).or_else(up)
    }

    /// Whether programs may have it, as far as its driver is asked.
    pub fn is_handed_over(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_DRIVER)
    }
}

/// The bus, as the kernel shows it in files.
#[derive(Debug, Clone)]
pub struct Bus {
    root: PathBuf,
}

impl Default for Bus {
    fn default() -> Self {
        Self::under("/")
    }
}

impl Bus {
    /// A bus in the files under `root`.
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// All devices, in the order of their addresses; none where there is no bus.
    pub fn devices(&self) -> Vec<PciDevice> {
        self.addresses().iter().filter_map(|address| self.read(address)).collect()
    }

    /// The devices that have one of these numbers, in the order of their addresses.
    pub fn find(&self, ids: &[Id]) -> Vec<PciDevice> {
        let wanted = |address: &&String| self.id(address).is_some_and(|id| ids.contains(&id));
        self.addresses().iter().filter(wanted).filter_map(|address| self.read(address)).collect()
    }

    /// The device at an address. The domain may be left out: `02:00.0` is `0000:02:00.0`.
    pub fn device(&self, address: &str) -> Option<PciDevice> {
        self.read(&full_address(address)?)
    }

    /// How many groups the IOMMU has; none where it is off.
    pub fn groups(&self) -> usize {
        names(&self.root.join("sys/kernel/iommu_groups")).len()
    }

    /// Whether this process may open the file through which all groups are reached.
    pub fn container(&self) -> Access {
        may_open(&self.root.join("dev/vfio/vfio"))
    }

    fn addresses(&self) -> Vec<String> {
        names(&self.root.join("sys/bus/pci/devices"))
    }

    fn folder(&self, address: &str) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address)
    }

    fn id(&self, address: &str) -> Option<Id> {
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

    fn group(&self, address: &str) -> Option<Group> {
        let number = link_name(&self.folder(address).join("iommu_group"))?.parse().ok()?;
        let members = self.root.join(format!("sys/kernel/iommu_groups/{number}/devices"));
        let others = names(&members).into_iter().filter(|member| member != address);
        let companions =
            others.map(|address| Companion { driver: self.driver(&address), address }).collect();
        let access = may_open(&self.root.join(format!("dev/vfio/{number}")));
        Some(Group { number, companions, access })
    }

    fn interfaces(&self, folder: &Path) -> Vec<Interface> {
        let interfaces = names(folder);
        if interfaces.is_empty() {
            return Vec::new();
        }
        let routes = self.default_routes();
        interfaces
            .into_iter()
            .map(|name| {
                let mut stack = BTreeSet::new();
                self.built_upon(&name, &mut stack);
                let has_default_route = !stack.is_disjoint(&routes);
                Interface { is_up: self.is_up(&name), has_default_route, name }
            })
            .collect()
    }

    /// The interface and all bridges, bonds and virtual networks that are made of it.
    fn built_upon(&self, name: &str, stack: &mut BTreeSet<String>) {
        if !stack.insert(name.to_owned()) {
            return;
        }
        for entry in names(&self.root.join("sys/class/net").join(name)) {
            if let Some(upper) = entry.strip_prefix("upper_") {
                self.built_upon(upper, stack);
            }
        }
    }

    fn is_up(&self, interface: &str) -> bool {
        const UP: u32 = 1;
        let flags = self.root.join("sys/class/net").join(interface).join("flags");
        hexadecimal(&flags).is_some_and(|flags| flags & UP != 0)
    }

    /// The interfaces through which packets to everywhere leave.
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

/// An address with its domain, if it is one at all.
fn full_address(address: &str) -> Option<String> {
    let full = match address.matches(':').count() {
        1 => format!("0000:{address}"),
        _ => address.to_owned(),
    };
    let [domain, bus, rest] = full.split(':').collect::<Vec<_>>()[..] else { return None };
    let (slot, function) = rest.split_once('.')?;
    let parts = [(domain, 4..=8), (bus, 2..=2), (slot, 2..=2), (function, 1..=1)];
    let is_one = parts.iter().all(|(part, digits)| {
        digits.contains(&part.len()) && part.bytes().all(|digit| digit.is_ascii_hexdigit())
    });
    is_one.then(|| full.to_ascii_lowercase())
}

/// The names in a folder, sorted; none where there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The last part of where a link points to.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// A number that is written with `0x` before it.
fn hexadecimal(file: &Path) -> Option<u32> {
    let text = fs::read_to_string(file).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

fn may_open(file: &Path) -> Access {
    match access(file, Ask::READ_OK | Ask::WRITE_OK).map_err(|error| io::Error::from(error).kind())
    {
        Ok(()) => Access::Allowed,
        Err(io::ErrorKind::NotFound) => Access::Missing,
        Err(_) => Access::Denied,
    }
}

#[cfg(test)]
mod tests;
