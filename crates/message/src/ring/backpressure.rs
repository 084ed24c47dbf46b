//! Backpressure of one side of a connection: whether the side has space for messages that no
//! receive has matched.
//!
//! The receiving side publishes the flags; the sending side reads them before it sends. Messages
//! that were sent before the flags became visible are still accepted. They are at most the content
//! of the ring and of the bounce ring, because a side sets the flags before it frees the cells that
//! it has read.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU32, Ordering};

/// The sender keeps payloads and announces messages instead.
pub const NO_EAGER: u32 = 1;
/// The sender also stops announcing messages.
pub const NO_RTS: u32 = 2;

/// The side is closed: it drops its messages and reads no more cells.
pub const CLOSED: u32 = 4;

/// The backpressure word of one side.
#[derive(Debug, Default)]
pub struct Backpressure(AtomicU32);

impl Backpressure {
    /// Publishes the flags of this side. Called by the owner of the word.
    pub fn set(&self, flags: u32) {
        step();
        // Relaxed is enough: the store that frees cells comes later and is a release (see the
        // module).
        self.0.store(flags, Ordering::Relaxed);
    }

    /// Returns whether any of the flags in `what` is set. Called by the peer before it sends.
    #[inline]
    pub fn includes(&self, flags: u32) -> bool {
        self.0.load(Ordering::Relaxed) & flags != 0
    }
}
