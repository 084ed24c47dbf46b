//! Copies never see old pages: memory is unmapped, replaced, moved, discarded and forked while it
//! is copied through the cache by a pinner of page frames.

use crate::support::child;
use crate::support::place;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use child::Child;
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheError, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::pages::page_bytes;
use memferry_testing::RingPinner;
use place::{TestMapping, memory_file, pattern};

const THREADS: u64 = 4;
const PAGES: usize = 4;

/// A monitored cache over a ring; `None`, and the test is skipped, if the system does not permit
/// it.
fn cache(mode: InvalidationMode) -> Option<(PinCache, Arc<RingPinner>)> {
    let ring = Arc::new(RingPinner::new()?);
    match PinCache::new(ring.clone(), PinCacheLimits::default(), mode) {
        Ok(cache) => Some((cache, ring)),
        Err(PinCacheError::NoEvents(denied)) => {
            memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, denied);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn length() -> usize {
    PAGES * page_bytes()
}

/// Runs `work` on several threads, each with its number.
fn on_threads(work: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        for thread in 1..=THREADS {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
}

/// Sets the stop flag on drop, also after a panic: the other threads wait for it.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn without_forget_the_old_pages_are_seen() {
    let Some((cache, ring)) = cache(InvalidationMode::Explicit) else { return };
    let (place, file) = (TestMapping::map(length()), memory_file());
    place.fill(1);
    assert_eq!(place.copied_out(&cache, &ring, &file), pattern(1, length()));
    place.map_again();
    place.fill(2);
    // The cache was not notified. The wrong copy shows that the other tests can fail.
    assert_eq!(place.copied_out(&cache, &ring, &file), pattern(1, length()));
    cache.invalidate(place.address, place.length);
    assert_eq!(place.copied_out(&cache, &ring, &file), pattern(2, length()));
    place.unmap();
}

#[test]
fn memory_mapped_again_at_the_same_address_is_copied_as_it_is() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    on_threads(|thread| {
        let (place, file) = (TestMapping::map(length()), memory_file());
        for round in 1..=1500 {
            let seed = thread << 32 | round;
            place.fill(seed);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(seed, length()));
            // A cache hit after a write: the pages are still the current ones.
            place.fill(seed + (1 << 16));
            let copied = place.copied_out(&cache, &ring, &file);
            assert_eq!(copied, pattern(seed + (1 << 16), length()));
            place.map_again();
            place.copy_in(seed, &cache, &ring, &file);
            assert!(place.holds(seed));
            place.map_again();
        }
        place.unmap();
    });
    let numbers = cache.statistics();
    // The cache was exercised: most rounds had a hit and an invalidation.
    assert!(numbers.hits > 1000 && numbers.invalidations > 1000, "{numbers:?}");
}

#[test]
fn addresses_that_another_thread_just_unmapped_show_the_new_memory() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    on_threads(|thread| {
        let file = memory_file();
        for round in 1..=3000 {
            // The kernel reuses addresses as soon as they are free, also for another thread while
            // the thread that freed them still waits for its event to be read.
            let (place, seed) = (TestMapping::map(length()), thread << 32 | round);
            place.fill(seed);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(seed, length()));
            place.unmap();
        }
    });
    assert!(cache.statistics().invalidations > 1000);
}

#[test]
fn a_part_that_is_replaced_is_seen_in_the_whole() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    on_threads(|thread| {
        let (place, file) = (TestMapping::map(length()), memory_file());
        let second = TestMapping { address: place.address + page_bytes(), length: page_bytes() };
        for round in 1..=500 {
            let seed = thread << 32 | round;
            place.fill(seed);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(seed, length()));
            second.map_again();
            let mut expected = pattern(seed, length());
            expected[page_bytes() / 8..2 * page_bytes() / 8].fill(0);
            assert_eq!(place.copied_out(&cache, &ring, &file), expected);
        }
        place.unmap();
    });
}

#[test]
fn moved_memory_is_copied_from_where_it_is() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    on_threads(|thread| {
        let (mut here, there) = (TestMapping::map(length()), TestMapping::map(length()));
        let file = memory_file();
        for round in 1..=1000 {
            let seed = thread << 32 | round;
            here.fill(seed);
            there.fill(seed + (1 << 16));
            assert_eq!(here.copied_out(&cache, &ring, &file), pattern(seed, length()));
            let other = pattern(seed + (1 << 16), length());
            assert_eq!(there.copied_out(&cache, &ring, &file), other);
            here.move_to(there);
            assert_eq!(there.copied_out(&cache, &ring, &file), pattern(seed, length()));
            // Another test may have mapped the old address by now.
            here = here.map_if_free().unwrap_or_else(|| TestMapping::map(length()));
            here.fill(seed + (2 << 16));
            let fresh = pattern(seed + (2 << 16), length());
            assert_eq!(here.copied_out(&cache, &ring, &file), fresh);
        }
        here.unmap();
        there.unmap();
    });
}

#[test]
fn discarded_memory_is_copied_as_zeroes_and_as_what_is_written_then() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    on_threads(|thread| {
        let (place, file) = (TestMapping::map(length()), memory_file());
        for round in 1..=1000 {
            let seed = thread << 32 | round;
            place.fill(seed);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(seed, length()));
            place.discard();
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(0, length()));
            place.copy_in(seed + 1, &cache, &ring, &file);
            assert!(place.holds(seed + 1));
        }
        place.unmap();
    });
}

#[test]
fn memory_that_others_copy_while_it_is_discarded_is_right_afterwards() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    let (place, over) = (TestMapping::map(length()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = memory_file();
                while !over.load(Ordering::Relaxed) {
                    // The contents are undefined: old bytes, new ones or zeroes.
                    place.copied_out(&cache, &ring, &file);
                }
            });
        }
        let file = memory_file();
        let _over = SetOnDrop(&over);
        for seed in 1..=300 {
            place.fill(seed);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(seed, length()));
            place.discard();
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(0, length()));
        }
    });
    place.unmap();
}

#[test]
fn parent_and_forked_child_each_copy_their_own_pages() {
    let Some((cache, ring)) = cache(InvalidationMode::KernelEvents) else { return };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Other threads use the cache, the ring and the allocator meanwhile, so that children are
        // forked while locks are held by threads that do not exist in them.
        for thread in 1..=2 {
            let (cache, ring, over) = (&cache, &ring, &over);
            scope.spawn(move || {
                let file = memory_file();
                let mut seed = thread << 32;
                while !over.load(Ordering::Relaxed) {
                    seed += 1;
                    let place = TestMapping::map(length());
                    place.fill(seed);
                    assert_eq!(place.copied_out(cache, ring, &file), pattern(seed, length()));
                    place.unmap();
                }
            });
        }
        let _over = SetOnDrop(&over);
        let (place, file) = (TestMapping::map(length()), memory_file());
        for round in 1..=40 {
            place.fill(round);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(round, length()));
            let lease = cache.acquire(place.address, place.length, Access::Read).unwrap();
            let child = Child::run(|| {
                let file = memory_file();
                drop(lease);
                assert_eq!(place.copied_out(&cache, &ring, &file), pattern(round, length()));
                place.fill(round + 1000);
                assert_eq!(place.copied_out(&cache, &ring, &file), pattern(round + 1000, length()));
                place.copy_in(round + 2000, &cache, &ring, &file);
                assert!(place.holds(round + 2000));
                place.unmap();
            });
            place.fill(round + 3000);
            assert_eq!(place.copied_out(&cache, &ring, &file), pattern(round + 3000, length()));
            place.copy_in(round + 4000, &cache, &ring, &file);
            assert!(place.holds(round + 4000));
            child.join();
        }
        place.unmap();
    });
}
