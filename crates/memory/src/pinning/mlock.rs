//! Pinning by `mlock`, within the process's limit of locked memory.

use std::io;

use memferry_sys::residency;
use memferry_sys::sync::{Mutex, lock};

use super::refcount::PageRefcounts;
use super::{Access, ForkLocal, PageRange, PinError, PinToken, Pinner};

/// Pins pages by `mlock`. Pins of overlapping ranges from one `MlockPinner` are independent. Memory
/// that the application locks itself should not be pinned by it, because the kernel does not count
/// locks. A forked child inherits no locks.
#[derive(Debug)]
pub struct MlockPinner {
    refcounts: ForkLocal<Mutex<PageRefcounts>>,
}

impl MlockPinner {
    /// Creates a pinner without pins.
    pub fn new() -> Self {
        Self { refcounts: ForkLocal::new(|| Mutex::new(PageRefcounts::default())) }
    }

    fn release_refs(&self, range: PageRange) {
        // The pages are unlocked while the refcounts are locked: otherwise a pin that starts
        // concurrently would be undone.
        let mut refcounts = lock(self.refcounts.get());
        for free in refcounts.remove(range) {
            unlock(free);
        }
    }
}

impl Default for MlockPinner {
    fn default() -> Self {
        Self::new()
    }
}

impl Pinner for MlockPinner {
    fn name(&self) -> &'static str {
        "lock"
    }

    fn pin(&self, range: PageRange, _access: Access) -> Result<PinToken, PinError> {
        // The refcounts are raised first, so that no other thread unlocks the pages. Pages with a
        // refcount are locked again, because other memory may have been mapped there since.
        lock(self.refcounts.get()).add(range);
        let locked = residency::lock(range.start(), range.bytes());
        locked.map(|()| PinToken::new(0)).map_err(|error| {
            self.release_refs(range);
            cause(range, &error)
        })
    }

    fn unpin(&self, range: PageRange, _token: &PinToken) {
        self.release_refs(range);
    }

    fn tracks_mapping(&self) -> bool {
        true
    }
}

/// Unlocks the mapped parts of a range. The kernel stops at the first hole, so a range with holes
/// is halved until each hole is isolated.
fn unlock(range: PageRange) {
    let mut left = vec![range];
    while let Some(range) = left.pop() {
        if residency::unlock(range.start(), range.bytes()).is_err() && range.pages() > 1 {
            let (front, back) = range.split(range.pages() / 2);
            left.push(front);
            left.extend(back);
        }
    }
}

/// Determines the reason of a failure: most reasons share one error number.
fn cause(range: PageRange, error: &io::Error) -> PinError {
    let requested_bytes = range.bytes() as u64;
    if !residency::is_mapped(range.start(), range.bytes()) {
        return PinError::BadMemory { range };
    }
    let locked_bytes = residency::locked_bytes();
    if let Some(limit_bytes) = residency::lock_limit_bytes()
        && locked_bytes + requested_bytes > limit_bytes
    {
        return PinError::MemlockLimit { limit_bytes, locked_bytes, requested_bytes };
    }
    // Locking the middle of a mapping splits it in three.
    let (maps, max_maps) = (residency::map_count(), residency::max_map_count());
    if maps + 2 > max_maps {
        return PinError::MapCount { map_count: maps, max_map_count: max_maps };
    }
    match error.kind() {
        io::ErrorKind::WouldBlock => PinError::OutOfMemory,
        io::ErrorKind::OutOfMemory => PinError::BadMemory { range },
        _ => PinError::Refused { what: "mlock", code: error.raw_os_error().unwrap_or(0) },
    }
}
