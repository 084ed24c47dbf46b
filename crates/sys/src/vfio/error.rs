//! Why a device cannot be opened, for people who have to change it.

use std::fmt;
use std::io;

use super::commands;
use super::pci::{Access, Companion, Interface, PciDevice};

/// What stands between a program and a device. Each says what to type against it.
#[derive(Debug)]
pub enum OpenError {
    /// There is nothing at this address.
    NoSuchDevice {
        /// The address, as it was given.
        address: String,
    },
    /// No IOMMU stands between the device and memory.
    NoIommu {
        /// The device.
        address: String,
    },
    /// The kernel's part of VFIO is not loaded.
    NoVfio,
    /// The device has another driver, or none.
    NotHandedOver {
        /// The device.
        address: String,
        /// Its driver.
        driver: Option<String>,
        /// The commands that hand it over.
        commands: String,
    },
    /// The kernel uses the device for a network that would be gone.
    CarriesNetwork {
        /// The device.
        address: String,
        /// The interface that it is.
        interface: Interface,
    },
    /// Other devices of the group have drivers of the kernel.
    GroupNotViable {
        /// The group.
        group: u32,
        /// Those devices.
        others: Vec<Companion>,
    },
    /// A file may not be opened.
    NoPermission {
        /// The file.
        file: String,
    },
    /// The group is open already: in another process, or for another device of the same group.
    Busy {
        /// The group.
        group: u32,
    },
    /// Devices could send interrupts to each other, because the IOMMU does not check them.
    UncheckedInterrupts,
    /// The device has no registers that can be mapped in its first region (BAR 0).
    NoRegisters {
        /// The device.
        address: String,
    },
    /// Not even a page may be locked for the device.
    LockedMemory {
        /// How much the process may lock, in bytes.
        limit: Option<u64>,
    },
    /// The kernel refused something else.
    Refused {
        /// What it was asked for.
        what: &'static str,
        /// What it said.
        error: io::Error,
    },
}

impl OpenError {
    /// What is in the way.
    pub fn cause(&self) -> String {
        match self {
            Self::NoSuchDevice { address } => format!("there is no device at {address}"),
            Self::NoIommu { address } => format!("no IOMMU stands between {address} and memory"),
            Self::NoVfio => "VFIO is not there (/dev/vfio/vfio)".to_owned(),
            Self::NotHandedOver { address, driver: Some(driver), .. } => {
                format!("{address} belongs to the kernel's driver {driver}")
            }
            Self::NotHandedOver { address, driver: None, .. } => {
                format!("{address} has no driver, and programs need vfio-pci")
            }
            Self::CarriesNetwork { address, interface } => match interface.has_default_route {
                true => format!(
                    "{address} is {}, through which this machine reaches the rest of the world",
                    interface.name
                ),
                false => format!("{address} is {}, a network that is in use", interface.name),
            },
            Self::GroupNotViable { group, others } => format!(
                "group {group} has devices with drivers of the kernel ({}), and a program gets all \
                 of a group or nothing",
                list(others)
            ),
            Self::NoPermission { file } => format!("no permission to open {file}"),
            Self::Busy { group } => {
                format!("group {group} is in use, by another process or for another device of it")
            }
            Self::UncheckedInterrupts => {
                "the IOMMU does not check interrupts, so the kernel gives \
                                          no device to programs"
                    .to_owned()
            }
            Self::NoRegisters { address } => {
                format!("{address} has no registers that can be mapped (BAR 0)")
            }
            Self::LockedMemory { limit: Some(limit) } => {
                format!("no page can be locked for the device, the limit being {} KiB", limit >> 10)
            }
            Self::LockedMemory { limit: None } => "no page can be locked for the device".to_owned(),
            Self::Refused { what, error } => format!("the kernel refused {what}: {error}"),
        }
    }

    /// What to do about it.
    pub fn cure(&self) -> String {
        match self {
            Self::NoSuchDevice { .. } => "lspci -D lists those there are".to_owned(),
            Self::NoIommu { .. } => "switch it on in the firmware (VT-d, AMD-Vi) and boot with \
                                     intel_iommu=on (AMD: without amd_iommu=off) on the kernel's \
                                     command line; some machines have none"
                .to_owned(),
            Self::NoVfio => "sudo modprobe vfio-pci".to_owned(),
            Self::NotHandedOver { commands, .. } => commands.clone(),
            Self::CarriesNetwork { interface, .. } => match interface.has_default_route {
                true => "use another card, taking this one would cut the machine off".to_owned(),
                false => format!(
                    "use another card, or, if nobody needs this network, sudo ip link set {} down",
                    interface.name
                ),
            },
            Self::GroupNotViable { .. } => {
                "hand those over too, or put the card into another slot".to_owned()
            }
            Self::NoPermission { file } => format!("sudo chown $USER {file}"),
            Self::Busy { group } => {
                format!("sudo fuser -v /dev/vfio/{group} names the process, which must end first")
            }
            Self::UncheckedInterrupts => {
                "switch on interrupt remapping in the firmware, or, where \
                                          all programs are trusted, echo 1 | sudo tee \
                                          /sys/module/vfio_iommu_type1/parameters/\
                                          allow_unsafe_interrupts"
                    .to_owned()
            }
            Self::NoRegisters { .. } => "use another device".to_owned(),
            Self::LockedMemory { .. } => {
                "`ulimit -l unlimited` as root, or LimitMEMLOCK=infinity in the service".to_owned()
            }
            Self::Refused { .. } => "the last lines of sudo dmesg may tell why".to_owned(),
        }
    }
}

/// What the kernel refused, without a better name.
pub(super) fn refused(what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |error| OpenError::Refused { what, error }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause(), self.cure())
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl PciDevice {
    /// What keeps this process from opening the device, as far as that can be seen without trying.
    pub fn obstacle(&self, container: Access) -> Option<OpenError> {
        let address = self.address.clone();
        let Some(group) = &self.group else { return Some(OpenError::NoIommu { address }) };
        if let Some(interface) = self.network().cloned() {
            return Some(OpenError::CarriesNetwork { address, interface });
        }
        if !self.is_handed_over() {
            let commands = commands::hand_over(&[self]).unwrap_or_default();
            return Some(OpenError::NotHandedOver {
                address,
                driver: self.driver.clone(),
                commands,
            });
        }
        let others: Vec<Companion> =
            group.companions.iter().filter(|other| other.is_in_the_way()).cloned().collect();
        if !others.is_empty() {
            return Some(OpenError::GroupNotViable { group: group.number, others });
        }
        match (container, group.access) {
            (Access::Missing, _) | (_, Access::Missing) => Some(OpenError::NoVfio),
            (Access::Denied, _) => {
                Some(OpenError::NoPermission { file: "/dev/vfio/vfio".to_owned() })
            }
            (_, Access::Denied) => {
                Some(OpenError::NoPermission { file: format!("/dev/vfio/{}", group.number) })
            }
            (Access::Allowed, Access::Allowed) => None,
        }
    }
}

/// Devices and their drivers, as people read them.
fn list(devices: &[Companion]) -> String {
    let name = |device: &Companion| match &device.driver {
        Some(driver) => format!("{} with {driver}", device.address),
        None => device.address.clone(),
    };
    devices.iter().map(name).collect::<Vec<_>>().join(", ")
}
