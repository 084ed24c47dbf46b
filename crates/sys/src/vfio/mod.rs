//! Devices of the machine in user space, through VFIO: finding them ([`PciBus`]), the commands that
//! bind them to `vfio-pci` ([`bind_commands`]), and access to them ([`VfioDevice`]).
//!
//! This module never unbinds a device from a kernel driver: the user does, by commands that are
//! only printed. An IOMMU restricts the device to the memory that is mapped for it.
//!
//! Structures and constants come from the crate `vfio-bindings`. The crate `vfio-ioctls` is not
//! used, because it is made for virtual machines: it maps memory only for writing, which read-only
//! memory does not allow, it does not let other devices join its groups, and it depends on the
//! memory model of a guest. The dozen calls that are needed are in `ioctl.rs`.

mod address_space;
mod commands;
mod device;
mod error;
mod ioctl;
mod iova;
pub mod pci;
mod registers;

pub use commands::{bind_commands, unbind_commands};
pub use device::VfioDevice;
pub use error::VfioError;
pub use iova::IovaAllocator;
pub use pci::{PciBus, PciDevice};
