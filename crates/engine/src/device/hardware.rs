//! What a channel wants of the driver of a device.

use std::fmt::Debug;

use crate::contract::{Descriptor, Notice};

/// What became of a descriptor that was to be posted.
#[derive(Debug)]
pub enum Posted {
    /// The hardware has it, and will say how it ended.
    Taken,
    /// There is no room: it comes again later.
    Full,
    /// It is over already.
    Over(Ended),
}

/// How a descriptor ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
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
pub unsafe trait Hardware: Send + Debug {
    /// Makes a descriptor ready, and the notice that comes behind it, if one is given. A descriptor
    /// of no length is not posted.
    fn post(&mut self, descriptor: &Descriptor, notice: Option<Notice>) -> Posted;

    /// Tells the device of everything that was posted.
    fn ring(&mut self);

    /// Says of the oldest posted descriptors how they ended, in order. Behind one that failed, here
    /// or when it was posted, no other is posted until the processor has done it.
    fn look(&mut self, ended: &mut Vec<Ended>);
}
