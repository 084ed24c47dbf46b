//! Unmonitored ranges: their owners guarantee to invalidate them before they are unmapped, so that
//! pins of them can be cached without monitoring.
//!
//! Guarantees are counted. A *counted* one belongs to a registration: its memory stays mapped until
//! the guarantee is removed as often as it was added. An *uncounted* one ends when its memory is
//! invalidated. Both apply to bytes: two owners of one page do not end each other's guarantees.

use std::sync::PoisonError;

use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::{AtomicUsize, Ordering};
use memferry_sys::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Lease, PinCache};
use crate::pinning::{Access, PageRange, PinError};

/// The unmonitored ranges of one cache.
#[derive(Debug)]
pub struct UnmonitoredRanges {
    ranges: RwLock<Vec<UnmonitoredRange>>,
    /// The length of the list.
    count: AtomicUsize,
    owner: OwnerProcess,
}

/// A range of bytes, and how often it was added.
#[derive(Debug, Clone, Copy)]
struct UnmonitoredRange {
    address: usize,
    length: usize,
    refcount: usize,
    is_uncounted: bool,
}

impl UnmonitoredRange {
    fn pages(&self) -> Option<PageRange> {
        PageRange::covering(self.address, self.length).ok()
    }

    fn overlaps(&self, address: usize, length: usize) -> bool {
        self.address < address.saturating_add(length)
            && address < self.address.saturating_add(self.length)
    }
}

impl UnmonitoredRanges {
    /// Creates an empty list.
    pub fn new() -> Self {
        let (ranges, count) = (RwLock::default(), AtomicUsize::new(0));
        Self { ranges, count, owner: OwnerProcess::current() }
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Adds an uncounted range. Adding the same bytes again has no effect.
    ///
    /// # Safety
    /// The caller must [invalidate](UnmonitoredRanges::invalidate) the memory, here and in the
    /// cache, before it is unmapped.
    pub unsafe fn add(&self, address: usize, length: usize) {
        self.change(address, length, |range| range.is_uncounted = true);
    }

    /// Adds a counted range, which ends with [`UnmonitoredRanges::remove_ref`].
    ///
    /// # Safety
    /// The memory must stay mapped until the range is [removed](UnmonitoredRanges::remove_ref) as
    /// often.
    pub unsafe fn add_ref(&self, address: usize, length: usize) {
        self.change(address, length, |range| range.refcount += 1);
    }

    /// Removes one count of exactly these bytes. Returns the pages that no range covers any more:
    /// the caller must invalidate them in the cache.
    pub fn remove_ref(&self, address: usize, length: usize) -> Vec<PageRange> {
        let Some(mut ranges) = self.write() else { return Vec::new() };
        let is_match = |range: &UnmonitoredRange| {
            range.address == address && range.length == length && range.refcount > 0
        };
        if let Some(range) = ranges.iter_mut().find(|range| is_match(range)) {
            range.refcount -= 1;
        }
        ranges.retain(|range| range.refcount > 0 || range.is_uncounted);
        self.count.store(ranges.len(), Ordering::Relaxed);
        uncovered_pages(address, length, ranges.iter())
    }

    /// Ends the uncounted ranges that overlap a range that is about to be unmapped. Returns the
    /// pages of it that no counted range covers: the caller must invalidate them in the cache.
    pub fn invalidate(&self, address: usize, length: usize) -> Vec<PageRange> {
        let Some(mut ranges) = self.write() else { return Vec::new() };
        for range in ranges.iter_mut().filter(|range| range.overlaps(address, length)) {
            range.is_uncounted = false;
        }
        ranges.retain(|range| range.refcount > 0 || range.is_uncounted);
        self.count.store(ranges.len(), Ordering::Relaxed);
        uncovered_pages(address, length, ranges.iter().filter(|range| range.refcount > 0))
    }

    /// Whether one range covers all of these pages.
    pub fn covers(&self, address: usize, length: usize) -> bool {
        let Ok(requested) = PageRange::covering(address, length) else { return false };
        if self.is_empty() {
            return false;
        }
        let covers =
            |range: &UnmonitoredRange| range.pages().is_some_and(|all| all.contains(requested));
        self.read().is_some_and(|ranges| ranges.iter().any(covers))
    }

    /// Pins unmonitored memory, or finds it pinned, and caches the pin. `None` if no range covers
    /// the memory.
    pub fn acquire(
        &self,
        cache: &PinCache,
        address: usize,
        length: usize,
        access: Access,
    ) -> Option<Result<Lease, PinError>> {
        if !self.covers(address, length) {
            return None;
        }
        // SAFETY: the owner that added the range invalidates the memory before it is unmapped. If
        // the owner has done so already, the code below invalidates it again.
        let acquired = unsafe { cache.acquire_unmonitored(address, length, access) };
        // A range that was removed before the pin was cached did not invalidate the pin, which must
        // not stay cached.
        if !self.covers(address, length) {
            cache.invalidate(address, length);
        }
        Some(acquired)
    }

    fn change(&self, address: usize, length: usize, change: impl FnOnce(&mut UnmonitoredRange)) {
        if length == 0 {
            return;
        }
        let Some(mut ranges) = self.write() else { return };
        let existing = ranges.iter().position(|one| one.address == address && one.length == length);
        let at = existing.unwrap_or_else(|| {
            ranges.push(UnmonitoredRange { address, length, refcount: 0, is_uncounted: false });
            ranges.len() - 1
        });
        change(&mut ranges[at]);
        self.count.store(ranges.len(), Ordering::Relaxed);
    }

    /// `None` in a forked child, where a thread of the parent may hold the lock forever.
    fn read(&self) -> Option<RwLockReadGuard<'_, Vec<UnmonitoredRange>>> {
        let is_owner = self.owner.is_current();
        is_owner.then(|| self.ranges.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> Option<RwLockWriteGuard<'_, Vec<UnmonitoredRange>>> {
        let is_owner = self.owner.is_current();
        is_owner.then(|| self.ranges.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Default for UnmonitoredRanges {
    fn default() -> Self {
        Self::new()
    }
}

/// The pages of a range that none of `ranges` covers.
fn uncovered_pages<'a>(
    address: usize,
    length: usize,
    ranges: impl Iterator<Item = &'a UnmonitoredRange>,
) -> Vec<PageRange> {
    let mut remaining: Vec<_> = PageRange::covering(address, length).into_iter().collect();
    for pages in ranges.filter_map(UnmonitoredRange::pages) {
        remaining = remaining.iter().flat_map(|part| part.subtract(pages)).flatten().collect();
    }
    remaining
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::pages::page_bytes;

    fn pages(first: usize, count: usize) -> PageRange {
        PageRange::covering(first * page_bytes(), count * page_bytes()).unwrap()
    }

    #[test]
    fn a_range_that_is_held_twice_is_promised_until_it_is_withdrawn_twice() {
        let (ranges, page) = (UnmonitoredRanges::new(), page_bytes());
        // SAFETY: nothing is pinned.
        unsafe { ranges.add_ref(10 * page, 3 * page) };
        // SAFETY: nothing is pinned.
        unsafe { ranges.add_ref(10 * page, 3 * page) };
        assert_eq!(ranges.remove_ref(10 * page, 3 * page), []);
        assert!(ranges.covers(11 * page, page));
        assert_eq!(ranges.remove_ref(10 * page, 3 * page), [pages(10, 3)]);
        assert!(!ranges.covers(11 * page, page));
    }

    #[test]
    fn ranges_that_share_a_page_do_not_end_each_other() {
        let (ranges, page) = (UnmonitoredRanges::new(), page_bytes());
        let (first, second) = ((10 * page, page + 100), (11 * page + 100, page));
        // SAFETY: nothing is pinned.
        unsafe { ranges.add_ref(first.0, first.1) };
        // SAFETY: nothing is pinned.
        unsafe { ranges.add_ref(second.0, second.1) };
        assert_eq!(ranges.invalidate(10 * page, 3 * page), [], "counted ranges stay mapped");
        assert_eq!(ranges.remove_ref(first.0, first.1), [pages(10, 1)]);
        assert!(ranges.covers(second.0, second.1) && !ranges.covers(first.0, first.1));
        assert_eq!(ranges.remove_ref(second.0, second.1), [pages(11, 2)]);
    }

    #[test]
    fn a_loose_promise_ends_when_one_of_its_bytes_is_forgotten_and_not_with_a_neighbour() {
        let (ranges, page) = (UnmonitoredRanges::new(), page_bytes());
        // SAFETY: nothing is pinned.
        unsafe { ranges.add(10 * page, 100) };
        // SAFETY: nothing is pinned.
        unsafe { ranges.add(10 * page, 100) };
        assert_eq!(ranges.invalidate(10 * page + 100, 100), [pages(10, 1)]);
        assert!(ranges.covers(10 * page, 100));
        assert_eq!(ranges.invalidate(10 * page + 99, 1), [pages(10, 1)]);
        assert!(!ranges.covers(10 * page, 100));
    }
}
