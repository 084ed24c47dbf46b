//! Pinned memory under faults: mappings that change, limits, pinners that refuse, transfers that
//! are cancelled, ferries that are dropped.

use crate::common::gated;
use crate::common::pinned;

use std::sync::Arc;

use gated::GatedEngine;
use memferry_copy::{Error, Ferry, Options, PinLimits, Request};
use memferry_engine::testing::fault::{Fault, FaultEngine, FaultScript};
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_engine::{Engine, ExecutionError, MemoryKind};
use memferry_memory::pin_cache::InvalidationMode;
use memferry_memory::pinning::PinError;
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use pinned::{ENGINE, end, over, over_engine, pages, pinning};

fn copy_is_right(ferry: &Ferry, source: &Pages, target: &mut Pages) {
    target.as_mut_slice().fill(0);
    ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
    assert!(target.as_slice() == source.as_slice());
}

/// Maps fresh memory over some pages.
fn replace(pages: &mut Pages, first: usize, count: usize) {
    let (start, length) = (pages.as_ptr().wrapping_add(first * page_bytes()), count * page_bytes());
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    // SAFETY: replaces a part of the caller's own pages by memory of the same kind.
    let placed = unsafe {
        libc::mmap(
            start.cast(),
            length,
            protection,
            flags | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    assert_eq!(placed, start.cast());
}

#[test]
fn memory_that_was_replaced_is_pinned_anew_without_a_word() {
    let (ferry, ledger) = over(AuditingPinner::new());
    if pinning(&ferry).invalidation_mode != InvalidationMode::KernelEvents {
        let why = "events of mappings are not permitted";
        return memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, why);
    }
    let (source, mut target) = (pages(8, 1), pages(8, 2));
    copy_is_right(&ferry, &source, &mut target);
    copy_is_right(&ferry, &source, &mut target);
    assert_eq!(ledger.counts().pins, 2);
    replace(&mut target, 3, 2);
    copy_is_right(&ferry, &source, &mut target);
    assert_eq!(ledger.counts().pins, 3, "the target was pinned anew, the source was not");
    drop(source);
    let source = pages(8, 3);
    copy_is_right(&ferry, &source, &mut target);
    assert_eq!(ledger.counts().pins, 4, "wherever the new source is, it is pinned anew");
    assert_eq!(pinning(&ferry).cache.invalidations, 2);
    end(ferry, &ledger);
}

#[test]
fn memory_that_is_forgotten_is_pinned_anew() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(300, 1), pages(300, 2));
    copy_is_right(&ferry, &source, &mut target);
    ferry.invalidate(target.as_ptr(), target.len());
    copy_is_right(&ferry, &source, &mut target);
    assert_eq!(ledger.counts().pins, 3 * 9);
    end(ferry, &ledger);
}

#[test]
fn memory_in_flight_stays_pinned_though_it_is_forgotten_or_the_transfer_cancelled() {
    let ledger = Arc::new(AuditingPinner::new());
    let engine = Arc::new(GatedEngine::new(ledger.clone(), false));
    let ferry = over_engine(engine.clone(), PinLimits::default());
    let (source, mut target) = (pages(300, 1), pages(300, 2));
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: the pages live until after the wait.
    let transfer =
        unsafe { ferry.start_raw(Request::copy(source.as_ptr(), to, source.len())) }.unwrap();
    ferry.invalidate(source.as_ptr(), source.len());
    ferry.invalidate(to, source.len());
    transfer.cancel();
    assert!(!transfer.is_done(), "the engine stands still");
    assert_eq!(ledger.pinned_bytes(), 2 * source.len());
    engine.open();
    transfer.wait().unwrap();
    assert!(target.as_slice() == source.as_slice());
    assert_eq!(ferry.statistics().engine(ENGINE).failed, 0);
    end(ferry, &ledger);
}

#[test]
fn a_ferry_that_is_dropped_unpins_when_its_transfers_are_over() {
    let ledger = Arc::new(AuditingPinner::new());
    let engine = Arc::new(GatedEngine::new(ledger.clone(), false));
    let ferry = over_engine(engine.clone(), PinLimits::default());
    let (source, mut target) = (pages(100, 1), pages(100, 2));
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: the pages live until after the drop, which ends the transfer.
    let transfer =
        unsafe { ferry.start_raw(Request::copy(source.as_ptr(), to, source.len())) }.unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(ferry));
        assert!(!transfer.is_done());
        assert_eq!(ledger.pinned_bytes(), 2 * source.len());
        engine.open();
    });
    transfer.wait().unwrap();
    assert!(target.as_slice() == source.as_slice());
    let counts = ledger.counts();
    assert_eq!((counts.pins, ledger.pinned_bytes()), (counts.unpins, 0));
    assert_eq!((counts.unpinned_in_flight, counts.unpinned_descriptors), (0, 0));
}

#[test]
fn transfers_that_never_begin_give_their_pins_back() {
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(100, 1), pages(100, 2));
    let (from, to) = (source.as_ptr(), target.as_mut_slice().as_mut_ptr());
    // Nothing is ever mapped at the second page of a process.
    let missing = page_bytes() as *const u8;
    // SAFETY: the pages live until after the waits, and nothing is accessed before it is pinned.
    let failed = unsafe { ferry.start_raw(Request::copy(missing, to, 100)) }.unwrap();
    assert!(matches!(failed.wait(), Err(Error::Execution(ExecutionError::BadMemory { .. }))));
    for _ in 0..2 {
        let after = Options::new().after(&failed);
        // SAFETY: as above.
        let next = unsafe { ferry.start_raw(Request::copy(from, to, source.len()).with(after)) };
        assert_eq!(next.unwrap().wait(), Err(Error::Execution(ExecutionError::Predecessor)));
    }
    let device = Request::copy(from, to, 10).memory(MemoryKind::Host, MemoryKind::Device);
    // SAFETY: no engine accesses device memory, so nothing is started.
    assert!(unsafe { ferry.start_raw(device) }.is_err());
    end(ferry, &ledger);
}

#[test]
fn the_cache_keeps_no_more_than_it_may() {
    let ledger = Arc::new(AuditingPinner::new());
    let limits = PinLimits { max_bytes: 64 * page_bytes(), max_entries: 100 };
    let ferry = over_engine(Arc::new(PolledEngine::pinned_by(ledger.clone())), limits);
    for round in 0..6 {
        let (source, mut target) = (pages(100, round), pages(100, round));
        copy_is_right(&ferry, &source, &mut target);
        assert!(pinning(&ferry).cache.bytes_cached <= limits.max_bytes as u64);
    }
    let numbers = pinning(&ferry);
    assert_eq!(numbers.failures, 0, "what does not fit is pinned for its one use");
    end(ferry, &ledger);
}

#[test]
fn beyond_the_limit_of_the_pinner_the_processor_copies() {
    let (ferry, ledger) = over(AuditingPinner::new().limit(8 * page_bytes()));
    for round in 0..4 {
        let (source, mut target) = (pages(200, round), pages(200, round));
        copy_is_right(&ferry, &source, &mut target);
    }
    let numbers = pinning(&ferry);
    assert!(numbers.failures > 0 && numbers.fallback_bytes > 0);
    assert!(matches!(numbers.last_error, Some(PinError::MemlockLimit { .. })));
    assert!(ferry.statistics().engine(ENGINE).bytes > 0, "the engine had what could be pinned");
    end(ferry, &ledger);
}

#[test]
fn a_pinner_that_fails_now_and_then_costs_no_byte() {
    for every in [1, 2, 3, 7] {
        let (ferry, ledger) = over(AuditingPinner::new().failing_every(every));
        for round in 0..5 {
            let (source, mut target) = (pages(150, round), pages(150, round));
            copy_is_right(&ferry, &source, &mut target);
            assert_eq!(ferry.compare(source.as_slice(), target.as_slice()), Ok(None));
        }
        let numbers = pinning(&ferry);
        assert!(numbers.failures > 0 && ledger.counts().refused >= numbers.failures);
        assert_eq!(numbers.last_error.map(|error| error.is_shortage()), Some(false));
        assert_eq!(ferry.statistics().engine(ENGINE).submitted == 0, every == 1);
        end(ferry, &ledger);
    }
}

#[test]
fn an_engine_that_fails_half_way_is_finished_by_the_processor() {
    let ledger = Arc::new(AuditingPinner::new());
    let script = FaultScript::of([
        Fault::None,
        Fault::EngineFault { done_bytes: 0 },
        Fault::Partial { done_bytes: 100 },
    ]);
    let inner: Arc<dyn Engine> = Arc::new(PolledEngine::pinned_by(ledger.clone()));
    let engine = Arc::new(FaultEngine::new(inner, script.full([false, true]).repeating()));
    let ferry = over_engine(engine, PinLimits::default());
    let (source, mut target) = (pages(100, 1), pages(100, 2));
    for _ in 0..4 {
        copy_is_right(&ferry, &source, &mut target);
    }
    end(ferry, &ledger);
}

#[test]
fn threads_share_pinned_memory_and_cancel_as_they_like() {
    const THREADS: usize = 4;
    let ledger = Arc::new(AuditingPinner::new().limit(500 * page_bytes()).failing_every(50));
    let limits = PinLimits { max_bytes: 150 * page_bytes(), max_entries: 40 };
    let ferry = over_engine(Arc::new(PolledEngine::pinned_by(ledger.clone())), limits);
    let source = pages(60, 9);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (ferry, source) = (ferry.clone(), &source);
            scope.spawn(move || {
                let mut target = pages(60, thread as u64);
                for round in 0..100 {
                    let from = (round * 1009 + thread) % (50 * page_bytes());
                    let length = 10 * page_bytes() - round;
                    let to = target.as_mut_slice()[round..].as_mut_ptr();
                    let request = Request::copy(source.as_slice()[from..].as_ptr(), to, length);
                    // SAFETY: both are pages of this test, and the wait is below.
                    let transfer = unsafe { ferry.start_raw(request) }.unwrap();
                    if round % 3 == 0 {
                        transfer.cancel();
                    }
                    if round % 10 == 0 {
                        ferry.invalidate(source.as_ptr(), source.len());
                    }
                    if transfer.wait().is_ok() {
                        let copied = &target.as_slice()[round..round + length];
                        assert!(copied == &source.as_slice()[from..from + length]);
                    }
                }
            });
        }
    });
    end(ferry, &ledger);
}
