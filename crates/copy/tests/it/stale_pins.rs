//! Memory that was copied is unmapped, and other memory is mapped at its address: the next copy
//! accesses the new memory, over an engine that copies page frames, with and without events of the
//! kernel for changed mappings.

use crate::common::frames;
use crate::common::pinned;

use std::sync::Arc;

use crate::common::pattern;
use frames::{FrameEngine, unwatched};
use memferry_copy::{Ferry, PinLimits};
use memferry_engine::testing::polled::AuditingPinner;
use memferry_memory::pin_cache::InvalidationMode;
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use memferry_testing::RingPinner;

const PAGES: usize = 20;

/// A ferry over an engine that copies page frames by io_uring; `None` where io_uring is not
/// permitted.
fn over_frames() -> Option<Ferry> {
    // SAFETY: a new file, whose descriptor only this value has.
    let file = unsafe {
        use std::os::fd::FromRawFd;
        let descriptor = libc::memfd_create(c"frames".as_ptr(), libc::MFD_CLOEXEC);
        assert!(descriptor >= 0);
        std::fs::File::from_raw_fd(descriptor)
    };
    let engine = Arc::new(FrameEngine::new(RingPinner::new()?, file));
    Some(pinned::over_engine(engine, PinLimits::default()))
}

/// Addresses at which the test maps new memory repeatedly.
struct MappedArea(Pages);

impl MappedArea {
    fn new() -> Self {
        Self(Pages::new(PAGES * page_bytes()).unwrap())
    }

    /// Fresh zeroed memory at the same addresses.
    fn map_anew(&mut self) {
        let (rights, length) = (libc::PROT_READ | libc::PROT_WRITE, self.0.len());
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let address = self.0.as_ptr().cast();
        // SAFETY: in place of pages that are this value's alone; no reference to them is left.
        let mapped = unsafe { libc::mmap(address, length, rights, flags, -1, 0) };
        assert_eq!(mapped, address);
    }
}

/// Copies to and from an address repeatedly, with fresh memory mapped there before each copy.
fn copies_follow_the_mapping(ferry: &Ferry) {
    let (mut place, mut other) = (MappedArea::new(), vec![0; PAGES * page_bytes()]);
    for seed in 1..20 {
        let expected = pattern(other.len(), seed);
        other.copy_from_slice(&expected);
        ferry.copy(&other, place.0.as_mut_slice()).unwrap();
        assert!(place.0.as_slice() == expected, "to new memory, the {seed}. time");
        // Once more: a cached pin is found.
        place.0.as_mut_slice().fill(0);
        ferry.copy(&other, place.0.as_mut_slice()).unwrap();
        assert!(place.0.as_slice() == expected, "to the same memory, the {seed}. time");
        place.map_anew();
        let expected = pattern(other.len(), seed + 100);
        place.0.as_mut_slice().copy_from_slice(&expected);
        ferry.copy(place.0.as_slice(), &mut other).unwrap();
        assert!(other == expected, "from new memory, the {seed}. time");
        place.map_anew();
    }
}

fn invalidation_mode(ferry: &Ferry) -> InvalidationMode {
    ferry
        .statistics()
        .pinning("frames")
        .expect("an engine that needs pinned memory")
        .invalidation_mode
}

#[test]
fn a_copy_of_memory_mapped_anew_is_right_where_the_kernel_tells_of_changes() {
    let Some(ferry) = over_frames() else { return };
    if invalidation_mode(&ferry) != InvalidationMode::KernelEvents {
        let why = "the pins of this ferry are not watched";
        return memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, why);
    }
    copies_follow_the_mapping(&ferry);
    assert!(ferry.statistics().pinning("frames").is_some_and(|pins| pins.cache.hits > 0));
}

#[test]
fn a_copy_of_memory_mapped_anew_is_right_where_nobody_tells_of_changes() {
    unwatched(|| {
        let Some(ferry) = over_frames() else { return };
        assert_eq!(invalidation_mode(&ferry), InvalidationMode::Explicit);
        copies_follow_the_mapping(&ferry);
    });
}

#[test]
fn a_vector_that_is_dropped_and_allocated_again_is_copied_as_it_is_where_nobody_tells_of_changes() {
    unwatched(|| {
        let Some(ferry) = over_frames() else { return };
        // Larger than the allocator caches: it is unmapped when it is dropped, and the next one is
        // usually mapped at the same address.
        let length = 64 << 20;
        for seed in 1..4 {
            let (source, mut target) = (pattern(length, seed), vec![0; length]);
            ferry.copy(&source, &mut target).unwrap();
            assert!(source == target, "the {seed}. time");
        }
    });
}

#[test]
fn nothing_stays_pinned_where_nobody_tells_of_changes_unless_its_owner_promises_to() {
    unwatched(|| {
        let (ferry, ledger) = pinned::over(AuditingPinner::new());
        let (source, mut target) = (pinned::pages(30, 1), pinned::pages(30, 2));
        let mut copy = || ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
        // A pin for one use is released with its descriptor, which may be after completion.
        let pinned = |bytes: usize| {
            memferry_testing::until("as much is pinned as should be", || {
                ledger.pinned_bytes() == bytes
            });
        };
        copy();
        pinned(0);
        // SAFETY: it is invalidated below, before it is unmapped.
        unsafe { ferry.mark_unmonitored(source.as_ptr(), source.len()) };
        // SAFETY: the pages live until the end of the test.
        let region = unsafe { ferry.register(source.as_ptr(), source.len()) }.unwrap();
        copy();
        pinned(source.len());
        ferry.invalidate(source.as_ptr(), source.len());
        copy();
        // Only the region is left.
        pinned(source.len());
        drop(region);
        pinned(0);
        copy();
        pinned(0);
        pinned::end(ferry, &ledger);
    });
}
