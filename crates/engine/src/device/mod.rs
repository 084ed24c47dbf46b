//! What engines of devices have in common: a channel around a queue of hardware, and memory that a
//! driver shares with its device.
//!
//! A channel has no thread. Whoever submits writes the device's orders and rings its bell; whoever
//! polls looks at what the device has written back. A driver is a `Hardware`: it knows registers
//! and descriptors, and nothing of transfers.

mod channel;
mod measure;
mod memory;
mod open;
mod seats;

use std::fmt::Debug;
use std::time::{Duration, Instant};

pub(crate) use channel::DeviceChannel;
pub(crate) use measure::measure;
pub(crate) use memory::{Region, SharedMemory};
pub use open::ready;
pub(crate) use open::{CUT_OFF, open_all, refused};
pub(crate) use seats::{Seat, Seats};

use crate::contract::{Descriptor, Notice};

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

/// What became of a descriptor that was to be posted.
#[derive(Debug)]
pub(crate) enum Posted {
    /// The hardware has it, and will say how it ended.
    Taken,
    /// There is no room: it comes again later.
    Full,
    /// It is over already.
    Over(Ended),
}

/// How a descriptor ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Well.
    Well,
    /// Well, and the notice behind it has landed.
    Noticed,
    /// Not at all, and the device will not touch its memory any more. The processor does it.
    Failed(&'static str),
}

/// The driver of one queue. Calls come one at a time.
///
/// # Safety
/// Callers give memory back on its word: the device must not touch the memory of a descriptor after
/// its end was reported, nor after the value was dropped.
pub(crate) unsafe trait Hardware: Send + Debug {
    /// Makes a descriptor ready, and the notice that comes behind it, if one is given. A descriptor
    /// of no length is not posted.
    fn post(&mut self, descriptor: &Descriptor, notice: Option<Notice>) -> Posted;

    /// Tells the device of everything that was posted.
    fn ring(&mut self);

    /// Says of the oldest posted descriptors how they ended, in order. Behind one that failed, here
    /// or when it was posted, no other is posted until the processor has done it.
    fn look(&mut self, ended: &mut Vec<Ended>);
}
