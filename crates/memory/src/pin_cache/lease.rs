//! Leases of pinned memory.

use std::sync::Arc;

use memferry_sys::fork::OwnerProcess;

use crate::pinning::{Access, PageRange, PinToken};

use super::entry::PinEntry;
use super::shared::PinCacheShared;

/// A lease of pinned memory: it stays pinned until the lease is dropped, whatever happens to the
/// cache or the mapping. The copy that accesses the memory owns its lease.
///
/// A lease is not valid in a forked child, and dropping it there has no effect.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<PinCacheShared>,
    entry: Arc<PinEntry>,
    owner: OwnerProcess,
}

impl Lease {
    pub(super) fn new(shared: &Arc<PinCacheShared>, entry: Arc<PinEntry>) -> Self {
        Self { shared: Arc::clone(shared), entry, owner: OwnerProcess::current() }
    }

    /// The pinned range, which contains the requested pages.
    #[inline]
    pub fn range(&self) -> PageRange {
        self.entry.range
    }

    /// The pinner's token.
    #[inline]
    pub fn token(&self) -> &PinToken {
        &self.entry.token
    }

    /// The access that the memory is pinned for: at least the requested one.
    pub fn access(&self) -> Access {
        self.entry.access
    }

    /// Whether the mapping of some of these pages has changed, or they were invalidated, since they
    /// were pinned. A running copy continues with the old pages. A pin for one use is not monitored
    /// and never becomes stale.
    pub fn is_stale(&self) -> bool {
        self.entry.is_stale()
    }

    /// Whether the memory is cached, so that the next request finds it.
    pub fn is_cached(&self) -> bool {
        self.entry.is_cached()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.shared.release(&self.entry);
        }
    }
}
