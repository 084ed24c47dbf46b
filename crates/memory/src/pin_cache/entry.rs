//! A pinned range that requests share.

use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::pinning::{Access, PageRange, PinToken};

/// One pin. `refcount`, `unused_since` and `cached` change only under the lock of the index;
/// `stale` is set under it and read by any thread.
#[derive(Debug)]
pub(super) struct PinEntry {
    pub(super) range: PageRange,
    pub(super) access: Access,
    pub(super) token: PinToken,
    refcount: AtomicUsize,
    unused_since: AtomicU64,
    cached: AtomicBool,
    stale: AtomicBool,
}

impl PinEntry {
    /// Creates an entry with one user, either cached or for that one use.
    pub(super) fn new(range: PageRange, access: Access, token: PinToken, cached: bool) -> Self {
        Self {
            range,
            access,
            token,
            refcount: AtomicUsize::new(1),
            unused_since: AtomicU64::new(0),
            cached: AtomicBool::new(cached),
            stale: AtomicBool::new(false),
        }
    }

    /// Adds a user; returns how many there were before.
    pub(super) fn acquire(&self) -> usize {
        self.refcount.fetch_add(1, Ordering::Relaxed)
    }

    /// Removes a user; returns how many remain.
    pub(super) fn release(&self) -> usize {
        self.refcount.fetch_sub(1, Ordering::Relaxed) - 1
    }

    /// Whether the entry has users.
    pub(super) fn is_in_use(&self) -> bool {
        self.refcount.load(Ordering::Relaxed) > 0
    }

    /// The index's tick of the last release.
    pub(super) fn unused_since(&self) -> u64 {
        self.unused_since.load(Ordering::Relaxed)
    }

    pub(super) fn set_unused_since(&self, tick: u64) {
        self.unused_since.store(tick, Ordering::Relaxed);
    }

    /// Whether requests can find the entry. It never becomes cached again.
    pub(super) fn is_cached(&self) -> bool {
        self.cached.load(Ordering::Relaxed)
    }

    pub(super) fn mark_evicted(&self) {
        self.cached.store(false, Ordering::Relaxed);
    }

    /// Whether other memory may be mapped at these addresses.
    pub(super) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Acquire)
    }

    pub(super) fn mark_stale(&self) {
        self.stale.store(true, Ordering::Release);
    }
}
