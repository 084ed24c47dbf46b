//! The use of pinned memory.

use std::sync::Arc;

use memferry_sys::fork;

use crate::pinning::{Access, PageRange, Token};

use super::region::Region;
use super::shared::Shared;

/// Pinned memory in use: it stays pinned until this is dropped, whatever happens to the cache or to
/// the mapping. Keep it with the copy that works on the memory.
///
/// In a forked child a lease of the parent means nothing, and dropping it there does nothing.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    region: Arc<Region>,
    generation: u64,
}

impl Lease {
    pub(super) fn new(shared: &Arc<Shared>, region: Arc<Region>) -> Self {
        Self { shared: Arc::clone(shared), region, generation: fork::generation() }
    }

    /// What is pinned: at least the pages asked for.
    pub fn range(&self) -> PageRange {
        self.region.range
    }

    /// What the pinner calls it.
    pub fn token(&self) -> Token {
        self.region.token
    }

    /// What it was pinned for: at least what was asked for.
    pub fn access(&self) -> Access {
        self.region.access
    }

    /// Whether the mapping of some of these pages was changed, or forgotten, since they were pinned.
    /// A copy that is under way goes on with the pages as they were. What was pinned for one use is
    /// not followed, and never called stale after that.
    pub fn is_stale(&self) -> bool {
        self.region.is_stale()
    }

    /// Whether the next request for this memory will find it.
    pub fn is_kept(&self) -> bool {
        self.region.is_kept()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if fork::generation() == self.generation {
            self.shared.release(&self.region);
        }
    }
}
