//! A pinned stretch of memory that requests share.

use memferry_sys::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::pinning::{Access, PageRange, Token};

/// One pin. `users`, `unused_since` and `kept` change only under the lock of the index; `stale` is
/// set under it and read by anybody.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) range: PageRange,
    pub(super) access: Access,
    pub(super) token: Token,
    users: AtomicUsize,
    unused_since: AtomicU64,
    kept: AtomicBool,
    stale: AtomicBool,
}

impl Region {
    /// A region with one user, which the index keeps or which is for that one use.
    pub(super) fn new(range: PageRange, access: Access, token: Token, kept: bool) -> Self {
        Self {
            range,
            access,
            token,
            users: AtomicUsize::new(1),
            unused_since: AtomicU64::new(0),
            kept: AtomicBool::new(kept),
            stale: AtomicBool::new(false),
        }
    }

    /// Counts a user in; returns how many there were.
    pub(super) fn enter(&self) -> usize {
        self.users.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a user out; returns how many are left.
    pub(super) fn leave(&self) -> usize {
        self.users.fetch_sub(1, Ordering::Relaxed) - 1
    }

    /// Whether somebody uses it.
    pub(super) fn is_used(&self) -> bool {
        self.users.load(Ordering::Relaxed) > 0
    }

    /// When the last user left, on the index's clock.
    pub(super) fn unused_since(&self) -> u64 {
        self.unused_since.load(Ordering::Relaxed)
    }

    pub(super) fn set_unused_since(&self, tick: u64) {
        self.unused_since.store(tick, Ordering::Relaxed);
    }

    /// Whether requests can find it. Once it is not, it never is again.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    pub(super) fn set_left(&self) {
        self.kept.store(false, Ordering::Relaxed);
    }

    /// Whether the memory at these addresses may be other memory by now.
    pub(super) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Acquire)
    }

    pub(super) fn set_stale(&self) {
        self.stale.store(true, Ordering::Release);
    }
}
