//! The gate of a channel's driver: one thread at a time is inside, and nobody waits in front of it.
//!
//! A thread that finds the gate occupied leaves a request, and whoever is inside serves it before it
//! leaves. So a thread that submits is never blocked by one that is inside for long, such as a thread
//! that resets a device or executes what the device could not.
//!
//! One word says whether somebody is inside, whether somebody asked, whether the channel is closed,
//! and how many descriptors it has accepted. So a submit that finds the gate free enters it and gets
//! its numbers by one instruction, and leaves by another. While the gate is free there is no request:
//! everything with a lower number has come inside.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

const OCCUPIED: u64 = 1;
const REQUESTED: u64 = 2;
const CLOSED: u64 = 4;
/// One accepted descriptor.
const ONE: u64 = 8;

/// The gate.
#[derive(Debug, Default)]
pub struct DriverGate(AtomicU64);

/// What the gate of a channel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateState(u64);

impl GateState {
    /// The number of accepted descriptors.
    #[inline]
    pub fn accepted(self) -> u64 {
        self.0 / ONE
    }

    /// Whether the channel accepts no descriptors any more.
    #[inline]
    pub fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    /// Whether a thread is inside.
    #[inline]
    pub fn is_occupied(self) -> bool {
        self.0 & OCCUPIED != 0
    }
}

impl DriverGate {
    /// An empty gate.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// What the gate says now.
    #[inline]
    pub fn state(&self) -> GateState {
        GateState(self.0.load(Ordering::Acquire))
    }

    /// Enters if nobody is inside.
    #[inline]
    pub fn try_enter(&self) -> bool {
        // A load first: pollers must not take the cache line from the thread inside.
        self.0.load(Ordering::Relaxed) & OCCUPIED == 0
            && self.0.fetch_or(OCCUPIED, Ordering::Acquire) & OCCUPIED == 0
    }

    /// Accepts `count` descriptors and enters, if nobody has come since `seen`, when nobody was
    /// inside. The caller brings them inside itself.
    #[inline]
    pub fn try_enter_with(&self, seen: GateState, count: u64) -> bool {
        let next = (seen.0 + count * ONE) | OCCUPIED;
        // Acquire: what the last thread inside did is visible.
        let (order, failure) = (Ordering::Acquire, Ordering::Relaxed);
        !seen.is_occupied() && self.0.compare_exchange(seen.0, next, order, failure).is_ok()
    }

    /// Accepts `count` descriptors, leaves a request for them, and enters if nobody is inside;
    /// returns whether it did. `Err` with what the gate says if it has changed since `seen`.
    /// The requests are served by [`DriverGate::leave`], of this thread or of the one inside.
    #[inline]
    pub fn request_with(&self, seen: GateState, count: u64) -> Result<bool, GateState> {
        let next = (seen.0 + count * ONE) | OCCUPIED | REQUESTED;
        let (order, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let swapped = self.0.compare_exchange(seen.0, next, order, failure);
        swapped.map(|_| !seen.is_occupied()).map_err(GateState)
    }

    /// Leaves a request, and enters if nobody is inside.
    #[inline]
    pub fn request(&self) -> bool {
        self.0.fetch_or(OCCUPIED | REQUESTED, Ordering::AcqRel) & OCCUPIED == 0
    }

    /// Leaves, after all requests are served: `serve` is called until there is none.
    #[inline]
    pub fn leave(&self, mut serve: impl FnMut()) {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            if seen & REQUESTED != 0 {
                // Acquire: what was submitted before the request is visible to `serve`.
                seen = self.0.fetch_and(!REQUESTED, Ordering::Acquire) & !REQUESTED;
                serve();
            }
            let (order, failure) = (Ordering::Release, Ordering::Relaxed);
            match self.0.compare_exchange(seen, seen & !OCCUPIED, order, failure) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Lets no descriptor be accepted any more.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Empties the gate after a thread inside unwound. No other thread may use it.
    pub fn reset(&self) {
        self.0.fetch_and(!(OCCUPIED | REQUESTED), Ordering::Relaxed);
    }
}
