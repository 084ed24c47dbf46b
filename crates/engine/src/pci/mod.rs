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
#[doc(hidden)]
pub mod hardware;
#[cfg(not(loom))]
mod measure;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod open;

use std::time::{Duration, Instant};

pub(crate) use channel::DeviceChannel;
pub(crate) use channel_slots::{ChannelSlot, ChannelSlots};
pub(crate) use hardware::{HardwareQueue, HwStatus, PostResult};
pub(crate) use measure::measure;
pub(crate) use memory::{CoherentMemory, DmaArray};
pub use open::available_devices;
pub(crate) use open::{ACCESS_REVOKED, open_all, open_error};

/// Polls a condition until it holds or `limit` expires; returns whether it holds.
pub(crate) fn poll_until(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !condition() {
        if Instant::now() > deadline {
            return condition();
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    true
}
