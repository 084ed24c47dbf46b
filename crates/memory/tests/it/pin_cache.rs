//! The pin cache with a pinner that records every call, and with the kernel's limits.

use crate::support::child;
use crate::support::recorder;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use child::Child;
use memferry_memory::pin_cache::{
    InvalidationMode, Lease, PinCache, PinCacheError, PinCacheLimits,
};
use memferry_memory::pinning::{Access, MlockPinner, PinError};
use memferry_sys::pages::{Pages, page_bytes};
use recorder::Recorder;

fn limits(max_pages: usize, max_entries: usize) -> PinCacheLimits {
    PinCacheLimits { max_bytes: max_pages * page_bytes(), max_entries }
}

fn explicit(recorder: &Arc<Recorder>, limits: PinCacheLimits) -> PinCache {
    PinCache::new(recorder.clone(), limits, InvalidationMode::Explicit).unwrap()
}

/// A lease of pages by page number: the recorder needs no mapped memory.
fn acquire(cache: &PinCache, first: usize, pages: usize) -> Lease {
    cache.acquire(first * page_bytes(), pages * page_bytes(), Access::Write).unwrap()
}

/// A monitored cache; `None`, and the test is skipped, if userfaultfd is not available.
fn monitored(recorder: &Arc<Recorder>, limits: PinCacheLimits) -> Option<PinCache> {
    match PinCache::new(recorder.clone(), limits, InvalidationMode::KernelEvents) {
        Ok(cache) => Some(cache),
        Err(PinCacheError::NoEvents(denied)) => {
            memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, denied);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn memory_is_pinned_once_and_found_again() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 10));
    let token = acquire(&cache, 10, 5).token().number();
    assert_eq!(acquire(&cache, 11, 2).token().number(), token);
    assert_eq!(recorder.pinned().len(), 1);
    let numbers = cache.statistics();
    assert_eq!((numbers.hits, numbers.misses, numbers.entries), (1, 1, 1));
    assert_eq!(numbers.bytes_pinned, 5 * page_bytes() as u64);
    drop(cache);
    assert_eq!(recorder.pinned(), []);
}

#[test]
fn a_pin_for_reading_is_not_found_for_writing() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 10));
    let read = cache.acquire(page_bytes(), 1, Access::Read).unwrap();
    let write = cache.acquire(page_bytes(), 1, Access::Write).unwrap();
    assert_ne!(read.token().number(), write.token().number());
    assert_eq!(
        cache.acquire(page_bytes(), 1, Access::Read).unwrap().token().number(),
        write.token().number()
    );
}

#[test]
fn overlapping_requests_merge_and_what_is_in_use_stays_pinned() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 10));
    let small = acquire(&cache, 10, 5);
    let merged = acquire(&cache, 13, 10);
    assert_eq!((merged.range().start(), merged.range().pages()), (10 * page_bytes(), 13));
    assert!(recorder.is_pinned(small.token().number()) && !small.is_cached() && !small.is_stale());
    let token = small.token().number();
    drop(small);
    assert!(!recorder.is_pinned(token));
    assert_eq!(acquire(&cache, 10, 13).token().number(), merged.token().number());
    assert_eq!(cache.statistics().merges, 1);
}

#[test]
fn when_a_merged_range_cannot_be_pinned_the_request_alone_is() {
    let recorder = Arc::new(Recorder::with_max_bytes(12 * page_bytes()));
    let cache = explicit(&recorder, limits(100, 10));
    let used = acquire(&cache, 10, 5);
    // Together they have ten pages, and five are in use: the limit of this pinner is exceeded.
    let alone = acquire(&cache, 14, 6);
    assert_eq!(alone.range().pages(), 6);
    assert!(alone.is_cached() && !used.is_cached() && recorder.is_pinned(used.token().number()));
}

#[test]
fn the_longest_unused_goes_first() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 3));
    let [a, b, c] = [10, 20, 30].map(|first| acquire(&cache, first, 5));
    let tokens = [a.token().number(), b.token().number(), c.token().number()];
    drop((b, a, c));
    // A hit makes it the most recently used.
    drop(acquire(&cache, 20, 5));
    drop(acquire(&cache, 40, 5));
    assert_eq!(tokens.map(|token| recorder.is_pinned(token)), [false, true, true]);
    assert_eq!(cache.statistics().evictions, 1);
}

#[test]
fn with_everything_in_use_a_request_is_pinned_for_its_use_alone() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(10, 10));
    let used = acquire(&cache, 10, 8);
    let extra = acquire(&cache, 30, 5);
    assert!(used.is_cached() && !extra.is_cached());
    let token = extra.token().number();
    drop(extra);
    assert!(!recorder.is_pinned(token) && recorder.is_pinned(used.token().number()));
    assert_eq!((cache.statistics().uncached, cache.statistics().entries), (1, 1));
    let too_large = acquire(&cache, 100, 11);
    assert!(!too_large.is_cached());
}

#[test]
fn forgotten_memory_is_unpinned_when_its_last_lease_is_dropped() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 10));
    let [used, unused] = [10, 20].map(|first| acquire(&cache, first, 5));
    let (old, other) = (used.token().number(), unused.token().number());
    drop(unused);
    cache.invalidate(12 * page_bytes(), 10 * page_bytes());
    assert!(used.is_stale() && recorder.is_pinned(old) && !recorder.is_pinned(other));
    let fresh = acquire(&cache, 10, 5);
    assert_ne!(fresh.token().number(), old);
    drop(used);
    assert!(!recorder.is_pinned(old) && recorder.is_pinned(fresh.token().number()));
    assert_eq!(cache.statistics().invalidations, 2);
    cache.invalidate_all();
    assert!(fresh.is_stale() && cache.statistics().entries == 0);
}

#[test]
fn a_lease_outlives_its_cache() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(100, 10));
    let lease = acquire(&cache, 10, 5);
    drop(cache);
    assert!(recorder.is_pinned(lease.token().number()));
    drop(lease);
    assert_eq!(recorder.pinned(), []);
}

#[test]
fn at_the_pinners_limit_unused_memory_is_given_up_and_used_memory_is_not() {
    let recorder = Arc::new(Recorder::with_max_bytes(10 * page_bytes()));
    let cache = explicit(&recorder, limits(100, 10));
    drop(acquire(&cache, 10, 4));
    let used = acquire(&cache, 20, 4);
    drop(acquire(&cache, 30, 5));
    assert_eq!(cache.statistics().evictions, 1);
    let error = cache.acquire(40 * page_bytes(), 7 * page_bytes(), Access::Write).unwrap_err();
    assert!(matches!(error, PinError::MemlockLimit { .. }));
    assert!(recorder.is_pinned(used.token().number()));
}

#[test]
fn at_the_limit_of_locked_memory_unused_locks_make_room() {
    Child::run(|| {
        child::limit_locked_memory(16 * page_bytes() as u64);
        let cache = PinCache::new(
            Arc::new(MlockPinner::new()),
            limits(100, 10),
            InvalidationMode::Explicit,
        )
        .unwrap();
        let pages = Pages::new(64 * page_bytes()).unwrap();
        let acquire = |first: usize, count: usize| {
            let address = pages.as_ptr() as usize + first * page_bytes();
            cache.acquire(address, count * page_bytes(), Access::Write)
        };
        drop(acquire(0, 8).unwrap());
        let used = acquire(20, 8).unwrap();
        let second = acquire(40, 8).unwrap();
        assert_eq!(cache.statistics().evictions, 1);
        assert!(matches!(acquire(60, 1), Err(PinError::MemlockLimit { .. })));
        drop((used, second));
        acquire(60, 1).unwrap();
    })
    .join();
}

/// Pages that have been touched.
fn touched(pages: usize) -> Pages {
    let mut pages = Pages::new(pages * page_bytes()).unwrap();
    pages.as_mut_slice().fill(1);
    pages
}

#[test]
fn new_memory_is_kept_from_its_second_use_on() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    let mut pages = Pages::new(8 * page_bytes()).unwrap();
    let is_kept = |pages: &Pages| {
        let lease = cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write);
        lease.unwrap().is_cached()
    };
    assert!(!is_kept(&pages));
    pages.as_mut_slice().fill(1);
    assert!(is_kept(&pages));
    assert_eq!(cache.statistics().uncached, 1);
}

#[test]
fn unmapped_memory_is_unpinned_without_a_request() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    let pages = touched(8);
    drop(cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap());
    assert_eq!(recorder.pinned().len(), 1);
    drop(pages);
    // The reaper unpins it; without the reaper this loop would never end, and the test would time
    // out.
    while !recorder.pinned().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(cache.statistics().invalidations, 1);
}

#[test]
fn a_lease_of_unmapped_memory_says_so_and_stays_pinned() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    let pages = touched(8);
    let lease = cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap();
    assert!(lease.is_cached() && !lease.is_stale());
    drop(pages);
    assert_eq!(cache.statistics().entries, 0);
    assert!(lease.is_stale() && !lease.is_cached() && recorder.is_pinned(lease.token().number()));
}

#[test]
fn mapped_files_are_pinned_for_one_use() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    // The code of this test is a mapped file.
    let code = mapped_files_are_pinned_for_one_use as fn() as usize;
    let lease = cache.acquire(code, 1, Access::Read).unwrap();
    assert!(!lease.is_cached());
    assert_eq!(cache.statistics().uncached, 1);
}

#[test]
fn events_are_active_or_the_reason_is_known() {
    let recorder = Arc::new(Recorder::new());
    let cache =
        PinCache::new(recorder, PinCacheLimits::default(), InvalidationMode::Automatic).unwrap();
    assert_eq!(
        cache.invalidation_mode() == InvalidationMode::Explicit,
        cache.events_denied().is_some()
    );
}

#[test]
fn with_no_mapping_left_memory_is_pinned_for_one_use() {
    let pages = Pages::new(8 * page_bytes()).unwrap();
    Child::run(|| {
        let recorder = Arc::new(Recorder::new());
        let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
        child::use_up_all_mappings();
        let middle = pages.as_ptr() as usize + 3 * page_bytes();
        let lease = cache.acquire(middle, page_bytes(), Access::Write).unwrap();
        assert!(!lease.is_cached());
    })
    .join();
}

#[test]
fn dropped_regions_leave_no_mappings_split() {
    let recorder = Arc::new(Recorder::new());
    let pages = touched(1000);
    // In a child, because other tests map memory in this process.
    Child::run(|| {
        let Some(cache) = monitored(&recorder, limits(4, 4)) else { return };
        let before = memferry_sys::residency::map_count();
        for number in 0..400 {
            let address = pages.as_ptr() as usize + 2 * number * page_bytes();
            drop(cache.acquire(address, page_bytes(), Access::Write).unwrap());
        }
        assert!(memferry_sys::residency::map_count() < before + 50);
        assert_eq!(cache.statistics().entries, 4);
    })
    .join();
}

#[test]
fn many_changes_between_two_requests_are_not_missed() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(10_000, 10_000)) else { return };
    let all: Vec<Pages> = (0..600).map(|_| touched(1)).collect();
    let lease = |pages: &Pages| cache.acquire(pages.as_ptr() as usize, 1, Access::Write);
    let leases: Vec<Lease> = all.iter().map(|pages| lease(pages).unwrap()).collect();
    assert!(leases.iter().all(Lease::is_cached));
    drop(all);
    assert_eq!(cache.statistics().entries, 0);
    assert!(leases.iter().all(Lease::is_stale));
}

#[test]
fn threads_share_a_cache_and_nothing_is_unpinned_in_use() {
    let recorder = Arc::new(Recorder::new());
    let cache = explicit(&recorder, limits(40, 6));
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..=4u64 {
            let (cache, recorder, failed) = (&cache, &recorder, &failed);
            scope.spawn(move || {
                let (mut state, mut held) = (seed, Vec::new());
                let mut random = move |below: u64| {
                    // A linear congruential step is enough to shuffle a test.
                    state =
                        state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    ((state >> 33) % below) as usize
                };
                for _ in 0..5_000 {
                    held.push(acquire(cache, 1 + random(60), 1 + random(8)));
                    if held.len() > 4 {
                        held.swap_remove(random(4));
                    }
                    if random(50) == 0 {
                        cache.invalidate((1 + random(60)) * page_bytes(), page_bytes());
                    }
                    let pinned =
                        held.iter().all(|lease| recorder.is_pinned(lease.token().number()));
                    failed.fetch_or(!pinned, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(!failed.into_inner());
    let numbers = cache.statistics();
    assert_eq!(numbers.hits + numbers.misses, 20_000);
    assert_eq!(numbers.bytes_pinned, numbers.bytes_cached);
    assert!(numbers.bytes_cached <= 40 * page_bytes() as u64 && numbers.entries <= 6);
    drop(cache);
    assert_eq!(recorder.pinned(), []);
}

#[test]
fn in_a_forked_child_requests_are_pinned_for_one_use_and_parents_leases_do_nothing() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    let pages = touched(8);
    let lease = cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap();
    Child::run(|| {
        let token = lease.token().number();
        let own = cache.acquire(pages.as_ptr() as usize, 1, Access::Write).unwrap();
        assert!(!own.is_cached() && own.token().number() != token);
        let own_token = own.token().number();
        drop(own);
        drop(lease);
        assert!(!recorder.is_pinned(own_token) && recorder.is_pinned(token));
        cache.invalidate_all();
        assert_eq!(cache.statistics(), Default::default());
        drop(pages);
        drop(cache);
    })
    .join();
}

#[test]
fn a_cache_that_is_gone_keeps_nobody_waiting_even_while_a_child_lives() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(100, 10)) else { return };
    let pages = touched(8);
    let lease = cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap();
    let mut ends = [0; 2];
    // SAFETY: the call writes two descriptors into an array of two.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let child = Child::run(|| {
        let mut byte = 0u8;
        // SAFETY: the call reads one byte into a local variable; the parent's write ends the child.
        assert_eq!(unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) }, 1);
    });
    drop(cache);
    // If the memory were still monitored, this would wait forever: no thread reads events any more.
    drop(pages);
    drop(lease);
    // SAFETY: the calls write one byte and close the descriptors that were opened above.
    unsafe {
        assert_eq!(libc::write(ends[1], [1u8].as_ptr().cast(), 1), 1);
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
    child.join();
}

#[test]
fn memory_that_is_unmapped_is_not_found_again_and_unpinned() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(1000, 100)) else { return };
    for _ in 0..20 {
        let mut pages = Pages::new(8 * page_bytes()).unwrap();
        pages.as_mut_slice().fill(1);
        let lease = cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap();
        let token = lease.token().number();
        assert!(lease.is_cached());
        drop(lease);
        assert!(recorder.is_pinned(token));
        drop(pages);
        // A thread that unmaps continues when the reader has read its event. A request waits until
        // the events that were read are in the queue.
        let mut others = Pages::new(8 * page_bytes()).unwrap();
        others.as_mut_slice().fill(2);
        let lease = cache.acquire(others.as_ptr() as usize, others.len(), Access::Write).unwrap();
        assert_ne!(lease.token().number(), token, "a pin of unmapped memory was found");
        assert!(!recorder.is_pinned(token), "unmapped memory is still pinned");
    }
}

#[test]
fn memory_is_remembered_until_it_is_unmapped_and_never_pinned_for_that() {
    let recorder = Arc::new(Recorder::new());
    let Some(cache) = monitored(&recorder, limits(1000, 100)) else { return };
    let mut pages = Pages::new(8 * page_bytes()).unwrap();
    pages.as_mut_slice().fill(1);
    let (address, length) = (pages.as_ptr() as usize, pages.len());
    assert!(!cache.note_first_use(address, length));
    assert!(!cache.covers(address, length, Access::Read));
    assert_eq!(recorder.pinned(), []);
    assert!(
        cache.note_first_use(address + page_bytes(), page_bytes()),
        "a part of recorded memory counts as new"
    );

    // A record is dropped when it is found, so that chunks of it can be pinned separately.
    assert!(!cache.note_first_use(address, length));
    drop(pages);
    let mut again = Pages::new(8 * page_bytes()).unwrap();
    again.as_mut_slice().fill(1);
    assert!(
        !cache.note_first_use(again.as_ptr() as usize, length),
        "new memory counts as recorded"
    );

    // Pinned memory is cached, not recorded.
    cache.invalidate_all();
    drop(cache.acquire(again.as_ptr() as usize, page_bytes(), Access::Read).unwrap());
    assert!(!cache.note_first_use(again.as_ptr() as usize, length));
    assert!(!cache.note_first_use(again.as_ptr() as usize, length));
    assert!(cache.covers(again.as_ptr() as usize, page_bytes(), Access::Read));
}
