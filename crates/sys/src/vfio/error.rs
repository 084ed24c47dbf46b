//! Why a device cannot be opened, and how to fix it.

use std::fmt;
use std::io;

use super::commands;
use super::pci::{FileAccess, GroupMember, NetInterface, PciDevice};

/// The reason why a device cannot be opened. [`VfioError::fix`] gives the commands that remove it.
#[derive(Debug)]
pub enum VfioError {
    /// No device has this address.
    NoSuchDevice {
        /// The address as given by the caller.
        address: String,
    },
    /// No IOMMU controls the device's access to memory.
    NoIommu {
        /// Address of the device.
        address: String,
    },
    /// The VFIO kernel modules are not loaded.
    NoVfio,
    /// The device is bound to another driver, or to none.
    NotBoundToVfio {
        /// Address of the device.
        address: String,
        /// The current driver.
        driver: Option<String>,
        /// The commands that bind it to `vfio-pci`.
        commands: String,
    },
    /// The kernel uses the device as an active network interface.
    InterfaceInUse {
        /// Address of the device.
        address: String,
        /// The interface.
        interface: NetInterface,
    },
    /// Other devices of the group are bound to kernel drivers.
    GroupNotViable {
        /// Number of the group.
        group: u32,
        /// The other devices.
        other_members: Vec<GroupMember>,
    },
    /// No permission to open a file.
    NoPermission {
        /// The file.
        file: String,
    },
    /// The group is already open: in another process, or for another device of the group.
    Busy {
        /// Number of the group.
        group: u32,
    },
    /// The IOMMU does not remap interrupts, so a device could send interrupts to other devices'
    /// handlers.
    NoInterruptRemapping,
    /// BAR 0 of the device cannot be mapped.
    NoRegisters {
        /// Address of the device.
        address: String,
    },
    /// The process cannot lock a single page for the device.
    LockedMemory {
        /// The limit of locked memory, in bytes.
        limit: Option<u64>,
    },
    /// The kernel refused another operation.
    Refused {
        /// The operation.
        what: &'static str,
        /// The error.
        error: io::Error,
    },
}

impl VfioError {
    /// The cause, for display.
    pub fn cause(&self) -> String {
        match self {
            Self::NoSuchDevice { address } => format!("no device has the address {address}"),
            Self::NoIommu { address } => format!("no IOMMU controls {address}"),
            Self::NoVfio => "VFIO is not loaded (no /dev/vfio/vfio)".to_owned(),
            Self::NotBoundToVfio { address, driver: Some(driver), .. } => {
                format!("{address} is bound to the kernel driver {driver}")
            }
            Self::NotBoundToVfio { address, driver: None, .. } => {
                format!("{address} is not bound to vfio-pci")
            }
            Self::InterfaceInUse { address, interface } => match interface.has_default_route {
                true => format!(
                    "{address} is {}, the interface of this machine's default route",
                    interface.name
                ),
                false => format!("{address} is {}, an active network interface", interface.name),
            },
            Self::GroupNotViable { group, other_members: others } => format!(
                "IOMMU group {group} has other devices with kernel drivers ({}), and a program can \
                 use only a whole group",
                list(others)
            ),
            Self::NoPermission { file } => format!("no permission to open {file}"),
            Self::Busy { group } => {
                format!("IOMMU group {group} is in use, by another process or for another device")
            }
            Self::NoInterruptRemapping => {
                "the IOMMU does not remap interrupts, so the kernel denies \
                                          devices to programs"
                    .to_owned()
            }
            Self::NoRegisters { address } => {
                format!("BAR 0 of {address} cannot be mapped")
            }
            Self::LockedMemory { limit: Some(limit) } => {
                format!("no memory can be locked for the device (limit: {} KiB)", limit >> 10)
            }
            Self::LockedMemory { limit: None } => {
                "no memory can be locked for the device".to_owned()
            }
            Self::Refused { what, error } => format!("the kernel refused {what}: {error}"),
        }
    }

    /// The fix, for display.
    pub fn fix(&self) -> String {
        match self {
            Self::NoSuchDevice { .. } => "lspci -D lists the devices".to_owned(),
            Self::NoIommu { .. } => "enable it in the firmware (VT-d, AMD-Vi) and boot with \
                                     intel_iommu=on (AMD: without amd_iommu=off) on the kernel's \
                                     command line; some machines have no IOMMU"
                .to_owned(),
            Self::NoVfio => "sudo modprobe vfio-pci".to_owned(),
            Self::NotBoundToVfio { commands, .. } => commands.clone(),
            Self::InterfaceInUse { interface, .. } => match interface.has_default_route {
                true => {
                    "use another card, unbinding this one would disconnect the machine".to_owned()
                }
                false => format!(
                    "use another card, or, if this network is not needed, sudo ip link set {} down",
                    interface.name
                ),
            },
            Self::GroupNotViable { .. } => {
                "bind those to vfio-pci too, or put the card into another slot".to_owned()
            }
            Self::NoPermission { file } => format!("sudo chown $USER {file}"),
            Self::Busy { group } => {
                format!("sudo fuser -v /dev/vfio/{group} shows the process, which must exit first")
            }
            Self::NoInterruptRemapping => "enable interrupt remapping in the firmware, or, if \
                                          all programs are trusted, echo 1 | sudo tee \
                                          /sys/module/vfio_iommu_type1/parameters/\
                                          allow_unsafe_interrupts"
                .to_owned(),
            Self::NoRegisters { .. } => "use another device".to_owned(),
            Self::LockedMemory { .. } => {
                "`ulimit -l unlimited` as root, or LimitMEMLOCK=infinity in the service".to_owned()
            }
            Self::Refused { .. } => "see the last lines of sudo dmesg".to_owned(),
        }
    }
}

/// Converts an error that has no variant of its own.
pub(super) fn refused(what: &'static str) -> impl FnOnce(io::Error) -> VfioError {
    move |error| VfioError::Refused { what, error }
}

impl fmt::Display for VfioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause(), self.fix())
    }
}

impl std::error::Error for VfioError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl PciDevice {
    /// The reason why this process cannot open the device, as far as it is visible without opening
    /// it.
    pub fn open_blocker(&self, container: FileAccess) -> Option<VfioError> {
        let address = self.address.clone();
        let Some(group) = &self.group else { return Some(VfioError::NoIommu { address }) };
        if let Some(interface) = self.active_interface().cloned() {
            return Some(VfioError::InterfaceInUse { address, interface });
        }
        if !self.is_bound_to_vfio() {
            let commands = commands::bind_commands(&[self]).unwrap_or_default();
            return Some(VfioError::NotBoundToVfio {
                address,
                driver: self.driver.clone(),
                commands,
            });
        }
        let others: Vec<GroupMember> =
            group.other_members.iter().filter(|other| other.blocks_group()).cloned().collect();
        if !others.is_empty() {
            return Some(VfioError::GroupNotViable { group: group.number, other_members: others });
        }
        match (container, group.access) {
            (FileAccess::Missing, _) | (_, FileAccess::Missing) => Some(VfioError::NoVfio),
            (FileAccess::Denied, _) => {
                Some(VfioError::NoPermission { file: "/dev/vfio/vfio".to_owned() })
            }
            (_, FileAccess::Denied) => {
                Some(VfioError::NoPermission { file: format!("/dev/vfio/{}", group.number) })
            }
            (FileAccess::Allowed, FileAccess::Allowed) => None,
        }
    }
}

/// Formats devices with their drivers.
fn list(devices: &[GroupMember]) -> String {
    let name = |device: &GroupMember| match &device.driver {
        Some(driver) => format!("{} with {driver}", device.address),
        None => device.address.clone(),
    };
    devices.iter().map(name).collect::<Vec<_>>().join(", ")
}
