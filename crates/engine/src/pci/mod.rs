//! Common parts of the device engines: a channel around a hardware queue, and memory that a driver
//! shares with its device.
//!
//! A channel has no thread. The submitter writes the device's descriptors and rings its doorbell;
//! the poller reads what the device has written back. A driver is a `HardwareQueue`: it knows
//! registers and descriptors, and nothing of transfers.

#[doc(hidden)]
pub mod channel;
#[cfg(not(loom))]
mod channel_slots;
#[cfg(not(loom))]
mod factory;
#[doc(hidden)]
pub mod gate;
#[doc(hidden)]
pub mod hardware;
#[cfg(not(loom))]
mod measure;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod open;
#[doc(hidden)]
pub mod reset_guard;

#[cfg(not(loom))]
pub use open::available_devices;
#[cfg(not(loom))]
pub(crate) use {
    channel::{ChannelInterrupt, DeviceChannel},
    channel_slots::{ChannelSlot, ChannelSlots},
    factory::{PciFactory, is_address},
    hardware::{HardwareQueue, HwStatus, PostResult},
    measure::{MeasuredChannel, MeasuredCopy, measure},
    memory::{CoherentMemory, DmaArray},
    open::{ACCESS_REVOKED, distinct, open_all, open_error, open_vfio, poll_until},
    reset_guard::ResetGuard,
};
