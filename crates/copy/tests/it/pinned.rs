//! The copy core over an engine that accesses only pinned memory: every byte arrives, and memory is
//! pinned once, part by part, and found in the cache again.

use crate::common::gated;
use crate::common::pinned;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{SIZES, pattern};
use gated::GatedEngine;
use memferry_copy::plan::{CopyQuery, CopyReason};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{BuildError, Ferry, Options, PinLimits, Request};
use memferry_engine::contract::{Capabilities, CopyDirection, Pinner, RegistrationMode};
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_engine::{Channel, ChannelOptions, CostLine, Engine, OpenError};
use memferry_sys::pages::page_bytes;
use pinned::{ENGINE, end, keep, over, over_engine, pages, pinning};

#[test]
fn copies_fills_and_comparisons_of_all_sizes_are_right() {
    let (ferry, ledger) = over(AuditingPinner::new());
    for length in SIZES {
        let source = pattern(length + 3, 1);
        let mut target = vec![0u8; length + 5];
        ferry.copy(&source[3..], &mut target[5..]).unwrap();
        assert!(source[3..] == target[5..], "{length}");
        assert_eq!(ferry.compare(&source[3..], &target[5..]), Ok(None));
        if length > 0 {
            target[5 + length / 2] ^= 1;
            assert_eq!(ferry.compare(&source[3..], &target[5..]), Ok(Some(length / 2)));
        }
        ferry.fill(&mut target, 3).unwrap();
        assert!(target.iter().all(|&byte| byte == 3));
        let (source, copy) =
            ferry.icopy(source[3..].to_vec(), vec![0u8; length]).unwrap().wait().unwrap();
        assert!(source == copy, "{length}");
    }
    let statistics = ferry.statistics().engine(ENGINE);
    assert_eq!(statistics.failed, 0);
    assert!(statistics.bytes > 10 << 20, "the engine did the work: {statistics:?}");
    assert_eq!(pinning(&ferry).failures, 0);
    end(ferry, &ledger);
}

#[test]
fn overlapping_moves_are_right_within_the_limits_of_the_engine_and_beyond() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let mut memory = pages(40, 7);
    for (length, from, to) in [(100, 10, 50), (2000, 900, 800), (60_000, 1, 4097), (60_000, 9, 8)] {
        let mut expected = memory.as_slice().to_vec();
        expected.copy_within(from..from + length, to);
        let start = memory.as_mut_slice().as_mut_ptr();
        // SAFETY: both ranges lie inside the pages, which live until after the wait.
        let moved =
            unsafe { ferry.start_raw(Request::copy(start.add(from), start.add(to), length)) };
        moved.unwrap().wait().unwrap();
        assert!(memory.as_slice() == expected, "{length} bytes from {from} to {to}");
    }
    // An engine counts a descriptor right after it has reported it.
    let deadline = Instant::now() + Duration::from_secs(200);
    while ferry.statistics().engine(ENGINE).completed < 4 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let statistics = ferry.statistics().engine(ENGINE);
    assert_eq!((statistics.submitted, statistics.failed), (4, 2), "two are longer than a page");
    end(ferry, &ledger);
}

#[test]
fn memory_that_may_only_be_read_is_compared_with_a_part_of_itself() {
    let (ferry, ledger) = over(AuditingPinner::new());
    for pages in [1, 8, 40] {
        let length = pages * page_bytes();
        let memory = self::pages(pages + 1, 7);
        let start = memory.as_ptr().cast();
        // SAFETY: nothing writes to the pages any more.
        assert_eq!(unsafe { libc::mprotect(start, memory.len(), libc::PROT_READ) }, 0);
        let bytes = memory.as_slice();
        let differs = (0..length).find(|&at| bytes[at] != bytes[at + 8]);
        assert_eq!(ferry.compare(&bytes[..length], &bytes[8..length + 8]), Ok(differs));
        assert_eq!(ferry.compare(&bytes[..length], &bytes[..length]), Ok(None));
    }
    assert_eq!(pinning(&ferry).failures, 0);
    end(ferry, &ledger);
}

#[test]
fn a_device_with_one_channel_gets_short_copies_whatever_the_policy() {
    for policy in [PolicyKind::Adaptive, PolicyKind::Dedicated] {
        let ledger = Arc::new(AuditingPinner::new());
        let engine = Arc::new(PolledEngine::pinned_by(ledger.clone()));
        let builder = crate::common::builder().engine(engine, 1).policy(policy);
        let ferry = builder.split_bytes(0).inline_bytes(0).build().unwrap();
        let (source, mut target) = (pages(1, 1), pages(1, 2));
        ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
        assert!(source.as_slice() == target.as_slice());
        assert_eq!(ferry.statistics().engine(ENGINE).submitted, 1, "{policy:?}");
        end(ferry, &ledger);
    }
}

#[test]
fn a_long_copy_is_pinned_in_growing_pieces_and_a_short_one_at_once() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(300, 1), pages(300, 2));
    ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
    // 1, 2, 4 and so on to 128 pages, then 45, on either side.
    assert_eq!(ledger.counts().pins, 2 * 9);
    assert!(target.as_slice() == source.as_slice());
    let (source, mut target) = (pages(8, 1), pages(8, 2));
    ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
    assert_eq!(ledger.counts().pins, 2 * 9 + 2);
    end(ferry, &ledger);
}

#[test]
fn the_engine_has_the_first_bytes_before_the_later_pages_are_pinned() {
    let ledger = Arc::new(AuditingPinner::new());
    let engine = Arc::new(GatedEngine::new(ledger.clone(), true));
    let ferry = over_engine(engine.clone(), PinLimits::default());
    let (source, mut target) = (pages(300, 1), pages(300, 2));
    ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
    assert!(target.as_slice() == source.as_slice());
    // Two pins for each part, with all descriptors of the parts before it submitted.
    let expected = [0, 0, 1, 1, 3, 3, 7, 7, 15, 15, 31, 31, 63, 63, 127, 127, 255, 255];
    assert_eq!(engine.submitted_at_pins(), expected);
    end(ferry, &ledger);
}

#[test]
fn no_page_of_a_shifted_copy_is_pinned_twice() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(400, 3), pages(400, 4));
    keep(&ferry, &source);
    keep(&ferry, &target);
    let length = 390 * page_bytes();
    ferry
        .copy(&source.as_slice()[17..][..length], &mut target.as_mut_slice()[5001..][..length])
        .unwrap();
    assert!(target.as_slice()[5001..][..length] == source.as_slice()[17..][..length]);
    let numbers = pinning(&ferry).cache;
    assert_eq!((numbers.merges, numbers.uncached, numbers.hits), (0, 0, 0));
    assert_eq!(numbers.bytes_pinned, 2 * 391 * page_bytes() as u64);
    end(ferry, &ledger);
}

#[test]
fn buffers_that_are_used_again_are_found_pinned() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(300, 1), pages(300, 2));
    keep(&ferry, &source);
    keep(&ferry, &target);
    for _ in 0..5 {
        ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
        ferry.fill(target.as_mut_slice(), 9).unwrap();
        assert_eq!(ledger.counts().pins, 18, "the first copy pinned everything");
    }
    let numbers = pinning(&ferry).cache;
    assert_eq!((numbers.misses, numbers.hits), (18, 4 * 18 + 5 * 9));
    end(ferry, &ledger);
}

#[test]
fn what_the_cache_has_in_one_region_is_one_piece() {
    let ledger = Arc::new(AuditingPinner::new());
    let engine = Arc::new(GatedEngine::new(ledger.clone(), true));
    let ferry = over_engine(engine.clone(), PinLimits::default());
    let mut memory = pages(301, 5);
    keep(&ferry, &memory);
    let start = memory.as_mut_slice().as_mut_ptr();
    let length = 300 * page_bytes();
    // SAFETY: both ranges lie inside the pages, which live until after the wait. A move is pinned
    // as one range.
    let moved = unsafe { ferry.start_raw(Request::copy(start, start.add(page_bytes()), length)) };
    moved.unwrap().wait().unwrap();
    assert_eq!(ledger.counts().pins, 1);
    ferry.fill(memory.as_mut_slice(), 1).unwrap();
    let numbers = pinning(&ferry).cache;
    assert_eq!((ledger.counts().pins, numbers.hits), (1, 1));
    end(ferry, &ledger);
}

#[test]
fn the_memory_of_a_transfer_that_waits_for_another_is_pinned_too() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let source = pages(100, 1);
    let (mut middle, mut target) = (pages(100, 2), pages(100, 3));
    let length = source.len();
    let (from, over, to) =
        (source.as_ptr(), middle.as_mut_slice().as_mut_ptr(), target.as_mut_slice().as_mut_ptr());
    // SAFETY: all pages live until after the waits; the ordering keeps the two apart.
    let (first, second) = unsafe {
        let first = ferry.start_raw(Request::copy(from, over, length)).unwrap();
        let after = Options::new().after(&first);
        (first, ferry.start_raw(Request::copy(over, to, length).with(after)).unwrap())
    };
    second.wait().unwrap();
    first.wait().unwrap();
    assert!(target.as_slice() == source.as_slice());
    end(ferry, &ledger);
}

/// An engine that declares that it needs pinned memory but names no pinner.
#[derive(Debug)]
struct IncompleteEngine {
    capabilities: Capabilities,
    pinner: Option<Arc<dyn Pinner>>,
}

impl Engine for IncompleteEngine {
    fn name(&self) -> &'static str {
        "incomplete"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        PolledEngine::new().cost(direction)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        self.pinner.clone()
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        PolledEngine::new().open_channel(options)
    }
}

#[test]
fn an_engine_that_cannot_be_served_is_refused_when_the_ferry_is_built() {
    let plain = PolledEngine::new().capabilities().clone();
    let needs = Capabilities { registration: RegistrationMode::BySubmitter, ..plain };
    let claims = Capabilities { claims_chunks: true, ..needs.clone() };
    let pinner: Arc<dyn Pinner> = Arc::new(AuditingPinner::new());
    for (capabilities, pinner) in [(needs, None), (claims, Some(pinner))] {
        let engine = Arc::new(IncompleteEngine { capabilities, pinner });
        let built = Ferry::builder().engine(engine, 1).build();
        assert!(matches!(built, Err(BuildError::Setting { name: "engine", .. })));
    }
}

#[test]
fn the_plan_says_that_memory_is_pinned() {
    let (ferry, _) = over(AuditingPinner::new());
    let plan = ferry.explain(&CopyQuery::copy(1 << 20, true)).unwrap();
    assert_eq!(plan.reason, CopyReason::PinnedParts);
    assert!(plan.reason.to_string().contains("pinned"));
}
