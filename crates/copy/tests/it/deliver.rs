//! Gather copies of many segments: one transfer, one notification, whichever thread copies which
//! segment.

use crate::common::models;
use crate::common::packets;

use std::sync::Arc;
use std::time::Duration;

use crate::common::builder;
use memferry_copy::policy::PolicyKind;
use memferry_copy::{Error, Ferry, Notification, Options, Request, Segment, ValidationError};
use memferry_engine::cuda::{CudaEngine, CudaProfile};
use memferry_engine::ioat::IoatEngine;
use memferry_engine::testing::cuda_model::CudaModel;
use memferry_engine::testing::ioat_model::{self as ioat_model, FaultSchedule, IoatModel};
use memferry_engine::testing::nic_model;
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError};
use memferry_sys::Pages;
use models::{card, ioat};
use packets::{PACKET, RefusingEngine, is_complete_when_it_is_notified, packets, raw, ring, start};

/// A ferry that submits everything to this engine.
fn over(engine: Arc<dyn Engine>, capacity: usize) -> Ferry {
    builder().engine(engine, 1).capacity(capacity).inline_bytes(0).split_bytes(0).build().unwrap()
}

#[test]
fn a_delivery_is_notified_behind_its_last_byte_however_little_a_channel_holds() {
    let (ioat, copy_engine) = ioat(2);
    let (nic, network_card) = card();
    let ring = ring(3000);
    let packets = packets(&ring);
    for capacity in [2, 64] {
        let ferries = [
            builder().inline_bytes(0).capacity(capacity).build().unwrap(),
            over(Arc::new(PolledEngine::new()), capacity),
            over(copy_engine.clone(), capacity),
            over(network_card.clone(), capacity),
        ];
        for ferry in &ferries {
            is_complete_when_it_is_notified(ferry, &packets, 5);
            is_complete_when_it_is_notified(ferry, &packets[..5], 50);
        }
    }
    assert!(network_card.counters().notification_writes > 0);
    assert_eq!(ioat.protocol_violations(), Vec::<String>::new());
    assert_eq!(nic.stats().protocol_violations, Vec::<String>::new());
}

#[test]
fn the_bytes_of_a_delivery_become_ready_piece_by_piece() {
    const PIECES: usize = 100;
    let model = IoatModel::builder().contiguous(true).service(Duration::from_micros(500)).build();
    let ferry = over(Arc::new(IoatEngine::over_model(model.clone()).unwrap()), 256);
    let ring = ring(PIECES);
    let packets = packets(&ring);
    let expected = packets.concat();
    let mut target = Pages::new(expected.len()).unwrap();
    let mut sees_a_part = || {
        target.as_mut_slice().fill(0);
        let transfer = start(&ferry, &packets, &mut target, Options::new().no_caller_assist());
        let mut has_seen = false;
        while !transfer.is_done() {
            let ready = transfer.ready_bytes() as usize;
            assert!(target.as_slice()[..ready] == expected[..ready]);
            has_seen |= 0 < ready && ready < expected.len();
        }
        transfer.wait().unwrap();
        assert!(target.as_slice() == expected);
        has_seen
    };
    // A thread that does not run for so long sees only the end.
    let before = model.all_counters().descriptors;
    assert!((0..100).any(|_| sees_a_part()));
    let descriptors = model.all_counters().descriptors - before;
    assert_eq!(descriptors % PIECES as u64, 0, "a piece is one descriptor, wherever it lies");
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_card_that_loses_frames_tells_of_no_byte_too_early() {
    let (model, engine) = card();
    let ring = ring(300);
    let ferry = over(engine.clone(), 16);
    for lose_every in [7, 30] {
        let lose_every = Some(lose_every);
        model.set_faults(nic_model::NicFaults { lose_every, ..nic_model::NicFaults::default() });
        is_complete_when_it_is_notified(&ferry, &packets(&ring), 2);
    }
    assert!(engine.counters().retransmits > 0);
}

#[test]
fn pieces_that_cannot_be_pinned_are_moved_by_the_processor_between_the_others() {
    let (model, card) = card();
    let ring = ring(200);
    for every in [1, 2, 3, 10] {
        let refusing = Arc::new(RefusingEngine::new(card.clone(), every));
        let ferry = over(refusing, 1 << 10);
        is_complete_when_it_is_notified(&ferry, &packets(&ring), 3);
    }
    let counters = card.counters();
    assert!(counters.notification_writes > 0 && counters.bytes_by_card > 0, "{counters:?}");
    assert_eq!(model.stats().protocol_violations, Vec::<String>::new());
    let (model, engine) = ioat(2);
    let ferry = over(engine.clone(), 1 << 10);
    let refuses_maps = FaultSchedule::Every(3);
    model.set_faults(ioat_model::IoatFaults { refuses_maps, ..ioat_model::IoatFaults::default() });
    is_complete_when_it_is_notified(&ferry, &packets(&ring), 3);
    assert!(engine.counters().descriptors > 0);
}

#[test]
fn all_pieces_go_to_one_channel_though_some_cannot_be_pinned() {
    let (_model, engine) = ioat(2);
    let refusing = Arc::new(RefusingEngine::new(engine, 5));
    let ferry = builder().engine(refusing, 2).policy(PolicyKind::RoundRobin).inline_bytes(0);
    let ferry = ferry.build().unwrap();
    let ring = ring(100);
    is_complete_when_it_is_notified(&ferry, &packets(&ring), 1);
    let statistics = ferry.statistics();
    let submitted: Vec<_> = statistics.engines[0].1.iter().map(|c| c.submitted).collect();
    assert!(submitted.contains(&0) && submitted.iter().sum::<u64>() > 50, "{submitted:?}");
}

#[test]
fn a_delivery_waits_for_the_one_before_it() {
    let (_model, engine) = card();
    let ring = ring(500);
    let packets = packets(&ring);
    let expected = packets.concat();
    for ferry in [crate::common::ferry(), over(engine, 4)] {
        let (mut middle, mut target) =
            (Pages::new(expected.len()).unwrap(), Pages::new(expected.len()).unwrap());
        let first = start(&ferry, &packets, &mut middle, Options::new());
        let variable = Notification::new(0);
        let options = Options::new().after(&first).notify(&variable, 1);
        // In segments of another size, which only the first gather copy writes.
        let pieces: Vec<_> = middle.as_slice().chunks(10_000).collect();
        let second = start(&ferry, &pieces, &mut target, options);
        second.wait().unwrap();
        assert!(target.as_slice() == expected);
        assert_eq!(variable.load(), 1);
        first.wait().unwrap();
    }
}

#[test]
fn a_delivery_behind_one_that_failed_is_not_begun() {
    let ferry = over(Arc::new(PolledEngine::pinned_by(Arc::default())), 64);
    let ring = ring(100);
    let packets = packets(&ring);
    let mut target = Pages::new(100 * PACKET).unwrap();
    // Nothing is ever mapped at the second page of a process.
    let missing = Segment { address: 4096 as *const u8, length: 10 };
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: memory is pinned before it is accessed, and this cannot be pinned.
    let failed = unsafe { ferry.ideliver_raw(&[missing], to, Options::new()) }.unwrap();
    assert!(matches!(failed.wait(), Err(Error::Execution(ExecutionError::BadMemory { .. }))));
    let variable = Notification::new(0);
    for pieces in [&packets[..], &[]] {
        let options = Options::new().after(&failed).notify(&variable, 1);
        // SAFETY: as above.
        let next = unsafe { ferry.ideliver_raw(&raw(pieces), to, options) }.unwrap();
        assert_eq!(next.wait(), Err(Error::Execution(ExecutionError::Predecessor)));
    }
    assert_eq!(variable.load(), 0);
    assert!(target.as_slice().iter().all(|&byte| byte == 0));
}

#[test]
fn a_cancelled_delivery_is_complete_or_tells_nobody() {
    let (ioat, copy_engine) = ioat(2);
    let (nic, network_card) = card();
    let ring = ring(1000);
    let packets = packets(&ring);
    let expected = packets.concat();
    let small = || builder().capacity(2).inline_bytes(0).build().unwrap();
    for ferry in [crate::common::ferry(), small(), over(copy_engine, 4), over(network_card, 64)] {
        for round in 1..=20 {
            let mut target = Pages::new(expected.len()).unwrap();
            let variable = Notification::new(0);
            let options = Options::new().notify(&variable, round);
            let transfer = start(&ferry, &packets, &mut target, options);
            transfer.cancel();
            match transfer.wait() {
                Ok(_) => assert!(variable.load() == round && target.as_slice() == expected),
                Err(Error::Execution(ExecutionError::Cancelled { .. })) => {
                    assert_eq!(variable.load(), 0);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!(ioat.protocol_violations(), Vec::<String>::new());
    assert_eq!(nic.stats().protocol_violations, Vec::<String>::new());
}

#[test]
fn a_delivery_that_is_cancelled_while_it_waits_is_not_begun() {
    let ferry = crate::common::ferry();
    let (source, mut middle) = (vec![1u8; 32 << 20], vec![0u8; 32 << 20]);
    let ring = ring(100);
    let mut target = Pages::new(100 * PACKET).unwrap();
    let request = Request::copy(source.as_ptr(), middle.as_mut_ptr(), source.len());
    // SAFETY: both vectors live until after the wait.
    let before = unsafe { ferry.start_raw(request) }.unwrap();
    let variable = Notification::new(0);
    let options = Options::new().after(&before).notify(&variable, 1);
    let delivery = start(&ferry, &packets(&ring), &mut target, options);
    delivery.cancel();
    let was_waiting = !before.is_done();
    let outcome = delivery.wait();
    if was_waiting {
        let cancelled = ExecutionError::Cancelled { done_bytes: 0 };
        assert_eq!(outcome, Err(Error::Execution(cancelled)));
        assert_eq!(variable.load(), 0);
    }
    before.wait().unwrap();
}

#[test]
fn a_delivery_whose_handle_is_dropped_ends_before_its_ferry() {
    let (_model, engine) = card();
    let ring = ring(1000);
    let packets = packets(&ring);
    for ferry in [crate::common::ferry(), over(engine, 1 << 10)] {
        let mut target = Pages::new(1000 * PACKET).unwrap();
        let variable = Notification::new(0);
        drop(start(&ferry, &packets, &mut target, Options::new().notify(&variable, 1)));
        drop(ferry);
        assert_eq!(variable.load(), 1);
        assert!(target.as_slice() == packets.concat());
    }
}

#[test]
fn a_scope_waits_for_its_deliveries() {
    let (_model, engine) = card();
    let ring = ring(300);
    for ferry in [crate::common::ferry(), over(engine, 8)] {
        let mut targets = [vec![0u8; 300 * PACKET], vec![0u8; 300 * PACKET]];
        let variable = Notification::new(0);
        let [first, second] = &mut targets;
        ferry.scope(|scope| {
            // The list of segments may be dropped before the gather copy is complete.
            let delivery = scope.ideliver_with(&packets(&ring), first, Options::new()).unwrap();
            let options = Options::new().after(&delivery).notify(&variable, 5);
            drop(scope.ideliver_with(&packets(&ring), second, options).unwrap());
            let target = delivery.into_target().unwrap();
            assert!(*target == packets(&ring).concat());
            let refused = scope.ideliver_with(&packets(&ring)[1..], target, Options::new());
            let mismatch = ValidationError::LengthMismatch {
                source_bytes: 299 * PACKET as u64,
                target_bytes: 300 * PACKET as u64,
            };
            assert_eq!(refused.err(), Some(Error::Validation(mismatch)));
        });
        assert_eq!(variable.load(), 5);
        assert!(targets[1] == packets(&ring).concat());
    }
}

#[test]
fn nothing_is_delivered_from_anywhere_to_anywhere_and_told() {
    let (_model, engine) = card();
    for ferry in [crate::common::ferry(), over(engine, 8)] {
        let nowhere = Segment { address: std::ptr::null(), length: 0 };
        for pieces in [&[][..], &[nowhere], &[nowhere; 1000]] {
            let variable = Notification::new(0);
            let options = Options::new().notify(&variable, 1);
            let to = std::ptr::null_mut();
            // SAFETY: no byte is accessed.
            unsafe { ferry.ideliver_raw(pieces, to, options) }.unwrap().wait().unwrap();
            assert_eq!(variable.load(), 1);
            // SAFETY: as above.
            let cookie = unsafe { ferry.ideliver_cookie_raw(pieces, to, Options::new()) }.unwrap();
            ferry.wait(cookie).unwrap();
        }
    }
}

#[test]
fn a_range_that_cannot_be_is_refused_by_its_side() {
    let ferry = crate::common::ferry();
    let mut target = [0u8; 32];
    let refused = |address: *const u8, length, to| {
        let variable = Notification::new(0);
        let pieces = [Segment { address, length }, Segment { address, length: 1 }];
        // SAFETY: nothing is started.
        let refused =
            unsafe { ferry.ideliver_raw(&pieces, to, Options::new().notify(&variable, 1)) };
        assert_eq!(variable.load(), 0);
        refused.unwrap_err().to_string()
    };
    let (good, last) = ([0u8; 32], (usize::MAX - 3) as *mut u8);
    assert_eq!(refused(std::ptr::null(), 4, &mut target[0]), "the source is a null pointer");
    assert_eq!(refused(good.as_ptr(), 4, std::ptr::null_mut()), "the target is a null pointer");
    assert!(refused(last, 9, &mut target[0]).starts_with("the source range of 9 bytes at 0xff"));
    assert!(refused(good.as_ptr(), 9, last).starts_with("the target range of 10 bytes at 0xff"));
    let more = refused(good.as_ptr(), usize::MAX, &mut target[0]);
    assert!(more.contains("runs past the end of the address space"), "{more}");
}

#[test]
fn pieces_may_be_read_only_and_in_the_pages_of_the_target() {
    let (ioat, copy_engine) = ioat(2);
    let (nic, network_card) = card();
    let ring = ring(64);
    // SAFETY: pages of this test's own, which no thread writes from now on.
    let protected = unsafe { libc::mprotect(ring.as_ptr().cast(), ring.len(), libc::PROT_READ) };
    assert_eq!(protected, 0);
    let pinned = PolledEngine::pinned_by(Arc::default());
    for ferry in [over(copy_engine, 64), over(network_card, 64), over(Arc::new(pinned), 64)] {
        is_complete_when_it_is_notified(&ferry, &packets(&ring), 2);
        let mut memory = Pages::new(1 << 16).unwrap();
        memory.as_mut_slice().copy_from_slice(&crate::common::pattern(1 << 16, 9));
        // The target lies between two segments that share its first and its last page.
        let (before, rest) = memory.as_mut_slice().split_at_mut(3000);
        let (target, behind) = rest.split_at_mut(before.len() + 10_000);
        let pieces = [&before[..], &behind[..10_000]];
        ferry.deliver_with(&pieces, target, Options::new().no_caller_assist()).unwrap();
        assert!(*target == pieces.concat());
    }
    assert_eq!(ioat.protocol_violations(), Vec::<String>::new());
    assert_eq!(nic.stats().protocol_violations, Vec::<String>::new());
}

#[test]
fn a_short_delivery_is_carried_out_by_a_caller_that_waits() {
    let ferry = crate::common::ferry();
    let ring = ring(20);
    let mut target = vec![0u8; 20 * PACKET];
    ferry.deliver(&packets(&ring), &mut target).unwrap();
    assert!(target == packets(&ring).concat());
    assert_eq!(ferry.statistics().engine("cpu").submitted, 0);
    ferry.deliver_with(&packets(&ring), &mut target, Options::new().no_caller_assist()).unwrap();
    assert_eq!(ferry.statistics().engine("cpu").submitted, 1, "one descriptor for all packets");
}

#[test]
fn the_cookie_of_a_delivery_is_one_like_any_other() {
    let ferry = crate::common::ferry();
    let ring = ring(100);
    let mut target = Pages::new(100 * PACKET).unwrap();
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: both live until after the wait.
    let cookie = unsafe { ferry.ideliver_cookie_raw(&raw(&packets(&ring)), to, Options::new()) };
    let cookie = cookie.unwrap();
    ferry.wait(cookie).unwrap();
    assert_eq!(ferry.check(cookie), Ok(true));
    assert!(target.as_slice() == packets(&ring).concat());
}

#[test]
fn a_ferry_with_a_gpu_alone_delivers_in_ordinary_memory() {
    let limits = memferry_copy::PinLimits::default();
    let gpu = CudaEngine::with_driver(CudaModel::new(), CudaProfile::default(), limits).unwrap();
    let ferry = builder().engine(Arc::new(gpu), 2).inline_bytes(0).split_bytes(0).build().unwrap();
    let ring = ring(3000);
    is_complete_when_it_is_notified(&ferry, &packets(&ring), 3);
}

#[test]
fn a_ferry_tells_what_it_learned_of_its_deliveries() {
    let ferry = crate::common::ferry();
    let before = ferry.learned();
    assert_eq!((before.inline_bytes, before.max_inline_bytes), (1 << 10, 1 << 10));
    assert!(before.first_submit_ns > 0 && before.deliveries.is_empty(), "{before:?}");
    // The size from which copies are shared was set, so sharing is not measured.
    assert_eq!(before.shares, None);
    assert_eq!(before.groups.len(), 2);
    assert!(before.groups.iter().all(|group| !group.worker.streams && !group.helper.streams));
    let (source, mut target) = (crate::common::pattern(4 << 10, 1), vec![0; 4 << 10]);
    let segments: Vec<Segment> = source.chunks(1 << 10).map(Segment::from).collect();
    for _ in 0..8 {
        // SAFETY: both buffers are used by nothing else until the delivery is complete.
        let delivery =
            unsafe { ferry.ideliver_raw(&segments, target.as_mut_ptr(), Options::new()) };
        delivery.unwrap().wait().unwrap();
    }
    assert_eq!(target, source);
    let after = ferry.learned().deliveries;
    assert_eq!(after.len(), 1, "{after:?}");
    assert_eq!(after[0].min_bytes, 4 << 10);
    assert!(after[0].caller_ns_per_byte > 0.0);
}
