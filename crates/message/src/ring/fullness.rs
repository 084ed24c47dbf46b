//! Whether a side has room for messages that nobody has asked for yet.
//!
//! The side itself says so; the other one looks before it sends. What was sent before it could see
//! the word is taken in all the same: no more than the ring and the space hold, since a side says
//! that it is full before it gives back what it read.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU32, Ordering};

/// Payloads should stay with their sender: messages are announced instead.
pub const NO_PAYLOADS: u32 = 1;
/// Not even that: messages should not be sent.
pub const NO_MESSAGES: u32 = 2;

/// Nothing any more: the side has given up its messages, and reads no more.
pub const ENDED: u32 = 4;

/// The word of one side.
#[derive(Debug, Default)]
pub struct Fullness(AtomicU32);

impl Fullness {
    /// For the owner: what it has no room for.
    pub fn set(&self, what: u32) {
        step();
        // The store that gives cells back comes later and is a release: see above.
        self.0.store(what, Ordering::Relaxed);
    }

    /// For the other side: whether any of this should not be sent.
    #[inline]
    pub fn includes(&self, what: u32) -> bool {
        self.0.load(Ordering::Relaxed) & what != 0
    }
}
