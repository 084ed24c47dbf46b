//! What engines of devices have in common: a channel around a queue of hardware, and memory that a
//! driver shares with its device.
//!
//! A channel has no thread. Whoever submits writes the device's orders and rings its bell; whoever
//! polls looks at what the device has written back. A driver is a `Hardware`: it knows registers
//! and descriptors, and nothing of transfers.

#[doc(hidden)]
pub mod channel;
#[doc(hidden)]
pub mod hardware;
mod measure;
mod memory;
mod open;
mod seats;

use std::time::{Duration, Instant};

pub(crate) use channel::DeviceChannel;
pub(crate) use hardware::{Ended, Hardware, Posted};
pub(crate) use measure::measure;
pub(crate) use memory::{Region, SharedMemory};
pub use open::ready;
pub(crate) use open::{CUT_OFF, open_all, refused};
pub(crate) use seats::{Seat, Seats};

/// Waits until something is so, but not for ever. Returns whether it is.
pub(crate) fn until(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !is_so() {
        if Instant::now() > deadline {
            return is_so();
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    true
}
