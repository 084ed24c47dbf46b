//! Memory whose owners say by themselves when it goes, so that pins of it need not be watched.
//!
//! Promises are counted. A *held* promise is of a registration that somebody keeps: its memory stays
//! mapped until the promise is withdrawn as often as it was made. A *loose* one ends when its memory
//! is forgotten. Both are of bytes: two owners of one page do not end each other's promises.

use std::sync::PoisonError;

use memferry_sys::fork;
use memferry_sys::sync::atomic::{AtomicUsize, Ordering};
use memferry_sys::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Lease, PinCache};
use crate::pinning::{Access, PageRange, PinError};

/// The promises about one cache's memory.
#[derive(Debug)]
pub struct Promises {
    list: RwLock<Vec<Promise>>,
    /// How many ranges are in the list.
    count: AtomicUsize,
    fork_generation: u64,
}

/// A range of bytes, and how often it was promised.
#[derive(Debug, Clone, Copy)]
struct Promise {
    address: usize,
    length: usize,
    held: usize,
    is_loose: bool,
}

impl Promise {
    fn pages(&self) -> Option<PageRange> {
        PageRange::covering(self.address, self.length).ok()
    }

    fn has_bytes_of(&self, address: usize, length: usize) -> bool {
        self.address < address.saturating_add(length)
            && address < self.address.saturating_add(self.length)
    }
}

impl Promises {
    /// No promises.
    pub fn new() -> Self {
        fork::watch();
        let (list, count) = (RwLock::default(), AtomicUsize::new(0));
        Self { list, count, fork_generation: fork::generation() }
    }

    /// Whether nothing is promised.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Adds a loose promise. A second one of the same bytes changes nothing.
    ///
    /// # Safety
    /// The memory must be [forgotten](Promises::forget), here and in the cache, before it is unmapped.
    pub unsafe fn add(&self, address: usize, length: usize) {
        self.change(address, length, |promise| promise.is_loose = true);
    }

    /// Adds a held promise, which ends with [`Promises::withdraw`].
    ///
    /// # Safety
    /// The memory must stay mapped until the promise is [withdrawn](Promises::withdraw) as often.
    pub unsafe fn hold(&self, address: usize, length: usize) {
        self.change(address, length, |promise| promise.held += 1);
    }

    /// Ends one held promise of exactly these bytes. Returns the pages about which nothing is promised
    /// any more: what is kept of them must be forgotten.
    pub fn withdraw(&self, address: usize, length: usize) -> Vec<PageRange> {
        let Some(mut list) = self.write() else { return Vec::new() };
        let is_it = |promise: &Promise| {
            promise.address == address && promise.length == length && promise.held > 0
        };
        if let Some(promise) = list.iter_mut().find(|promise| is_it(promise)) {
            promise.held -= 1;
        }
        list.retain(|promise| promise.held > 0 || promise.is_loose);
        self.count.store(list.len(), Ordering::Relaxed);
        left_of(address, length, list.iter())
    }

    /// Ends the loose promises that have bytes in common with a range which is about to be unmapped.
    /// Returns the pages of it that no held promise is about: what is kept of them must be forgotten.
    pub fn forget(&self, address: usize, length: usize) -> Vec<PageRange> {
        let Some(mut list) = self.write() else { return Vec::new() };
        for promise in list.iter_mut().filter(|promise| promise.has_bytes_of(address, length)) {
            promise.is_loose = false;
        }
        list.retain(|promise| promise.held > 0 || promise.is_loose);
        self.count.store(list.len(), Ordering::Relaxed);
        left_of(address, length, list.iter().filter(|promise| promise.held > 0))
    }

    /// Whether one promise is about all of these pages.
    pub fn cover(&self, address: usize, length: usize) -> bool {
        let Ok(asked) = PageRange::covering(address, length) else { return false };
        if self.is_empty() {
            return false;
        }
        let covers = |promise: &Promise| promise.pages().is_some_and(|all| all.contains(asked));
        self.read().is_some_and(|list| list.iter().any(covers))
    }

    /// Pins promised memory, or finds it pinned, and keeps the pin. `None` if it is not promised.
    pub fn acquire(
        &self,
        cache: &PinCache,
        address: usize,
        length: usize,
        access: Access,
    ) -> Option<Result<Lease, PinError>> {
        if !self.cover(address, length) {
            return None;
        }
        // SAFETY: whoever made the promise forgets the memory before it is unmapped. If that is over by
        // now, it is forgotten below.
        let acquired = unsafe { cache.acquire_promised(address, length, access) };
        // A promise that ended before the pin began did not find the pin, which must not be kept.
        if !self.cover(address, length) {
            cache.forget(address, length);
        }
        Some(acquired)
    }

    fn change(&self, address: usize, length: usize, change: impl FnOnce(&mut Promise)) {
        if length == 0 {
            return;
        }
        let Some(mut list) = self.write() else { return };
        let known = list.iter().position(|one| one.address == address && one.length == length);
        let at = known.unwrap_or_else(|| {
            list.push(Promise { address, length, held: 0, is_loose: false });
            list.len() - 1
        });
        change(&mut list[at]);
        self.count.store(list.len(), Ordering::Relaxed);
    }

    /// `None` in a forked child, where the lock may be held for ever by a thread of the parent.
    fn read(&self) -> Option<RwLockReadGuard<'_, Vec<Promise>>> {
        let is_home = fork::generation() == self.fork_generation;
        is_home.then(|| self.list.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> Option<RwLockWriteGuard<'_, Vec<Promise>>> {
        let is_home = fork::generation() == self.fork_generation;
        is_home.then(|| self.list.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Default for Promises {
    fn default() -> Self {
        Self::new()
    }
}

/// The pages of a range without those of promises.
fn left_of<'a>(
    address: usize,
    length: usize,
    promises: impl Iterator<Item = &'a Promise>,
) -> Vec<PageRange> {
    let mut left: Vec<_> = PageRange::covering(address, length).into_iter().collect();
    for pages in promises.filter_map(Promise::pages) {
        left = left.iter().flat_map(|piece| piece.without(pages)).flatten().collect();
    }
    left
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
        let (promises, page) = (Promises::new(), page_bytes());
        // SAFETY: nothing is pinned.
        unsafe { promises.hold(10 * page, 3 * page) };
        // SAFETY: nothing is pinned.
        unsafe { promises.hold(10 * page, 3 * page) };
        assert_eq!(promises.withdraw(10 * page, 3 * page), []);
        assert!(promises.cover(11 * page, page));
        assert_eq!(promises.withdraw(10 * page, 3 * page), [pages(10, 3)]);
        assert!(!promises.cover(11 * page, page));
    }

    #[test]
    fn ranges_that_share_a_page_do_not_end_each_other() {
        let (promises, page) = (Promises::new(), page_bytes());
        let (first, second) = ((10 * page, page + 100), (11 * page + 100, page));
        // SAFETY: nothing is pinned.
        unsafe { promises.hold(first.0, first.1) };
        // SAFETY: nothing is pinned.
        unsafe { promises.hold(second.0, second.1) };
        assert_eq!(promises.forget(10 * page, 3 * page), [], "held memory stays mapped");
        assert_eq!(promises.withdraw(first.0, first.1), [pages(10, 1)]);
        assert!(promises.cover(second.0, second.1) && !promises.cover(first.0, first.1));
        assert_eq!(promises.withdraw(second.0, second.1), [pages(11, 2)]);
    }

    #[test]
    fn a_loose_promise_ends_when_one_of_its_bytes_is_forgotten_and_not_with_a_neighbour() {
        let (promises, page) = (Promises::new(), page_bytes());
        // SAFETY: nothing is pinned.
        unsafe { promises.add(10 * page, 100) };
        // SAFETY: nothing is pinned.
        unsafe { promises.add(10 * page, 100) };
        assert_eq!(promises.forget(10 * page + 100, 100), [pages(10, 1)]);
        assert!(promises.cover(10 * page, 100));
        assert_eq!(promises.forget(10 * page + 99, 1), [pages(10, 1)]);
        assert!(!promises.cover(10 * page, 100));
    }
}
