//! The gate of a channel's driver: one thread at a time is inside, and nobody waits in front of it.
//!
//! A thread that finds the gate occupied leaves a request, and whoever is inside serves it before it
//! leaves. So a thread that submits is never blocked by one that is inside for long, such as a thread
//! that resets a device or executes what the device could not. Both facts, that somebody is inside and
//! that somebody asked, are bits of one word, so neither side can miss the other.

use memferry_sys::sync::atomic::{AtomicU32, Ordering};

const OCCUPIED: u32 = 1;
const REQUESTED: u32 = 2;

/// The gate.
#[derive(Debug)]
pub struct DriverGate(AtomicU32);

impl DriverGate {
    /// An empty gate.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Enters if nobody is inside.
    #[inline]
    pub fn try_enter(&self) -> bool {
        // A load first: pollers must not take the cache line from the thread inside.
        self.0.load(Ordering::Relaxed) & OCCUPIED == 0
            && self.0.fetch_or(OCCUPIED, Ordering::Acquire) & OCCUPIED == 0
    }

    /// Leaves a request, and enters if nobody is inside. The requests are served by
    /// [`DriverGate::leave`], of this thread or of the one inside.
    #[inline]
    pub fn request(&self) -> bool {
        self.0.fetch_or(OCCUPIED | REQUESTED, Ordering::AcqRel) & OCCUPIED == 0
    }

    /// Leaves, after all requests are served: `serve` is called until there is none.
    pub fn leave(&self, mut serve: impl FnMut()) {
        loop {
            let left = self.0.compare_exchange(OCCUPIED, 0, Ordering::Release, Ordering::Relaxed);
            if left.is_ok() {
                return;
            }
            // Acquire: what was submitted before the request is visible to `serve`.
            self.0.fetch_and(!REQUESTED, Ordering::Acquire);
            serve();
        }
    }

    /// Empties the gate after a thread inside unwound. No other thread may use it.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Default for DriverGate {
    fn default() -> Self {
        Self::new()
    }
}
