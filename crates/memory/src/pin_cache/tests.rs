//! Tests of the cache's own state.

use super::*;
use crate::pinning::PopulatePinner;
use memferry_sys::pages::page_bytes;
use memferry_sys::{Pages, clock};

#[test]
fn pins_of_memory_under_quarantine_are_not_kept() {
    let cache = PinCache::new(
        Arc::new(PopulatePinner),
        PinCacheLimits::default(),
        InvalidationMode::Explicit,
    )
    .unwrap();
    let pages = Pages::new(8 * page_bytes()).unwrap();
    let address = pages.as_ptr() as usize;
    let second = PageRange::covering(address + page_bytes(), 1).unwrap();
    // One hour in the future, so that it does not expire during the test.
    let later_ns = clock::now_ns() + 3_600_000_000_000;
    cache.shared.with(None, |index, _| index.quarantine.add(Some(second), later_ns));
    assert!(!cache.acquire(address, pages.len(), Access::Write).unwrap().is_cached());
    assert!(cache.acquire(address, page_bytes(), Access::Write).unwrap().is_cached());
    assert_eq!(cache.statistics().uncached, 1);
}

#[test]
fn two_ranges_are_found_together_or_neither_is_held() {
    let cache = PinCache::new(
        Arc::new(PopulatePinner),
        PinCacheLimits { max_entries: 2, ..PinCacheLimits::default() },
        InvalidationMode::Explicit,
    )
    .unwrap();
    let (pages, page) = (Pages::new(4 * page_bytes()).unwrap(), page_bytes());
    let address = pages.as_ptr() as usize;
    let wanted = [(address, page, Access::Read), (address + 2 * page, page, Access::Write)];
    assert!(cache.find_both(wanted).is_none());
    drop(cache.acquire(address, page, Access::Read).unwrap());
    assert!(cache.find_both(wanted).is_none());
    drop(cache.acquire(address + 2 * page, page, Access::Read).unwrap());
    assert!(cache.find_both(wanted).is_none(), "not for writing");
    assert_eq!(cache.statistics().hits, 0);
    drop(cache.acquire(address + 2 * page, page, Access::Write).unwrap());
    let hits = cache.statistics().hits;
    let leases = cache.find_both(wanted).unwrap();
    assert_eq!(leases.each_ref().map(Lease::access), [Access::Read, Access::Write]);
    assert_eq!(cache.statistics().hits, hits + 2);
    drop(leases);
    // Nothing keeps them in use: they make space for others.
    for at in [address + page, address + 3 * page] {
        assert!(cache.acquire(at, page, Access::Write).unwrap().is_cached());
    }
}

#[test]
fn a_reader_that_panics_lets_the_application_unmap_and_nothing_is_kept() {
    use std::sync::atomic::Ordering;
    use std::time::Duration;
    let cache = PinCache::new(
        Arc::new(PopulatePinner),
        PinCacheLimits::default(),
        InvalidationMode::KernelEvents,
    );
    let cache = match cache {
        Ok(cache) => cache,
        Err(PinCacheError::NoEvents(denied)) => {
            return memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, denied);
        }
        Err(error) => panic!("{error}"),
    };
    let touched = || {
        let mut pages = Pages::new(4 * page_bytes()).unwrap();
        pages.as_mut_slice().fill(1);
        pages
    };
    let acquire =
        |pages: &Pages| cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap();
    let (first, second) = (touched(), touched());
    assert!(acquire(&first).is_cached() && acquire(&second).is_cached());
    cache.monitor().unwrap().events.panics.store(true, Ordering::SeqCst);
    let (done_sender, done_receiver) = std::sync::mpsc::channel();
    let unmapping = std::thread::spawn(move || {
        drop(first);
        let _ = done_sender.send(());
    });
    done_receiver
        .recv_timeout(Duration::from_secs(60))
        .expect("unmapping blocks: the reader does not release its waiters");
    unmapping.join().unwrap();

    assert!(!cache.covers(second.as_ptr() as usize, second.len(), Access::Write));
    for pages in [&second, &touched()] {
        assert!(!acquire(pages).is_cached());
    }
    assert_eq!(cache.statistics().entries, 0);
    drop((second, cache));
}
