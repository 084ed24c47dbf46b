//! Devices of the machine in the hands of a program, through the kernel's VFIO: finding them
//! ([`Bus`]), saying how people hand them over ([`hand_over`]), and driving them ([`VfioDevice`]).
//!
//! Nothing here takes a device from the kernel: somebody hands it over by commands that are only
//! printed. An IOMMU stands between the device and memory, so that it reaches what was mapped for it
//! and nothing else.
//!
//! The structures and constants are those of the crate `vfio-bindings`. Its neighbour `vfio-ioctls`
//! is made for virtual machines: it maps memory for writing only, which memory that may only be read
//! does not allow, keeps its groups to itself, so that nothing could be added to them, and brings the
//! memory model of a guest with it. The dozen calls that are needed are in `calls.rs`.

mod addresses;
mod calls;
mod commands;
mod device;
mod error;
pub mod pci;
mod registers;
mod space;

pub use addresses::Addresses;
pub use commands::{give_back, hand_over};
pub use device::VfioDevice;
pub use error::OpenError;
pub use pci::{Bus, PciDevice};
