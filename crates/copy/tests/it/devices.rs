//! Ferries over the engines of devices, with models of the devices behind them.

use crate::common::models;

use std::sync::Arc;

use memferry_copy::policy::PolicyKind;
use memferry_copy::{Ferry, Notification, Options, PinLimits, Request, Segment};
use memferry_engine::Engine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::testing::interrupts::InterruptFaults;
use memferry_engine::testing::ioat_model::{FaultSchedule, IoatFaults, IoatModel};
use memferry_sys::Pages;
use memferry_testing::pattern::fill;
use models::{card, ioat};

const MIB: usize = 1 << 20;

fn ferry_over(engine: Arc<dyn Engine>, channels: usize) -> Ferry {
    Ferry::builder().engine(engine, channels).inline_bytes(0).build().unwrap()
}

fn patterned(bytes: usize) -> Pages {
    let mut pages = Pages::new(bytes).unwrap();
    fill(pages.as_mut_slice(), 0);
    pages
}

/// Copies by the engine and waits, without help of the caller.
fn copy(ferry: &Ferry, source: &[u8], target: &mut [u8], options: Options<'_>) {
    let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), target.len());
    // SAFETY: both are borrowed until the transfer is complete.
    unsafe { ferry.start_raw(request.with(options.no_caller_assist())) }.unwrap().wait().unwrap();
    assert!(source == target);
}

#[test]
fn an_aligned_copy_takes_a_descriptor_for_each_page_and_a_shifted_one_two() {
    let (model, engine) = ioat(1);
    // Enough that the ring is never full, and the caller never helps.
    let builder = Ferry::builder().engine(engine.clone(), 1).inline_bytes(0).capacity(4096);
    let ferry = builder.build().unwrap();
    let (source, mut target) = (patterned(4 * MIB), Pages::new(4 * MIB + 2048).unwrap());
    copy(&ferry, source.as_slice(), &mut target.as_mut_slice()[..4 * MIB], Options::new());
    assert_eq!(engine.counters().descriptors, 1024);
    copy(&ferry, source.as_slice(), &mut target.as_mut_slice()[2048..], Options::new());
    assert_eq!(engine.counters().descriptors - 1024, 2048);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn nothing_is_mapped_for_a_device_when_its_ferry_is_gone() {
    let (model, engine) = ioat(2);
    let limits = PinLimits { max_bytes: MIB, max_entries: 8 };
    let ferry = Ferry::builder().engine(engine, 2).pin_limits(limits).build().unwrap();
    let (source, mut target) = (patterned(3 * MIB), Pages::new(3 * MIB).unwrap());
    for _ in 0..3 {
        copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
    }
    // Source, target, and the memory that a channel shares with its device.
    assert!(model.mapped_pages() <= 2 * 256 + 2 * 1025, "{}", model.mapped_pages());
    drop(ferry);
    assert_eq!(model.mapped_pages(), 0);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn channels_of_a_copy_engine_share_the_work_by_the_policy() {
    let (model, engine) = ioat(4);
    let builder = Ferry::builder().engine(engine, 4).policy(PolicyKind::RoundRobin);
    let ferry = builder.build().unwrap();
    let (source, mut target) = (patterned(MIB), Pages::new(8 * MIB).unwrap());
    for part in target.as_mut_slice().chunks_mut(MIB) {
        copy(&ferry, source.as_slice(), part, Options::new());
    }
    let bytes: Vec<_> = (0..4).map(|channel| model.counters(channel).bytes).collect();
    assert!(bytes.iter().all(|bytes| *bytes >= MIB as u64), "{bytes:?}");
    assert_eq!(bytes.iter().sum::<u64>(), 8 * MIB as u64);
}

#[test]
fn what_a_copy_engine_cannot_do_the_processor_does() {
    let (model, engine) = ioat(2);
    let ferry = ferry_over(engine.clone(), 2);
    let (source, mut target) = (patterned(MIB), Pages::new(MIB).unwrap());
    let faults = [
        IoatFaults { halts: FaultSchedule::Every(10), ..IoatFaults::default() },
        IoatFaults { refuses_maps: FaultSchedule::Always, ..IoatFaults::default() },
        IoatFaults { loses_write_backs: FaultSchedule::Always, ..IoatFaults::default() },
        IoatFaults { is_removed: true, ..IoatFaults::default() },
    ];
    for faults in faults {
        target.as_mut_slice().fill(0);
        model.set_faults(faults);
        copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
    }
    // The engine is not used again, and everything works as before.
    model.set_faults(IoatFaults::default());
    target.as_mut_slice().fill(0);
    copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
}

#[test]
fn a_channel_that_stands_still_is_started_again() {
    let (model, engine) = ioat(1);
    let ferry = ferry_over(engine.clone(), 1);
    let (source, mut target) = (patterned(MIB), Pages::new(MIB).unwrap());
    model.set_faults(IoatFaults { stalls: FaultSchedule::At(100), ..IoatFaults::default() });
    copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
    assert_eq!(engine.counters().recoveries, 1);
    assert_eq!(ferry.statistics().engines[0].1[0].failed, 1);
}

#[test]
fn a_card_sets_the_notification_variable_behind_the_data() {
    let (model, engine) = card();
    let ferry = ferry_over(engine.clone(), 1);
    let (source, mut target) = (patterned(MIB), Pages::new(MIB).unwrap());
    for (count, bytes) in [(1, 4096), (2, MIB)] {
        let variable = Notification::new(0);
        let options = Options::new().notify(&variable, count);
        copy(&ferry, &source.as_slice()[..bytes], &mut target.as_mut_slice()[..bytes], options);
        assert_eq!(variable.load(), count);
        assert_eq!(engine.counters().notification_writes, count, "{bytes}");
    }
    assert_eq!(model.stats().protocol_violations, Vec::<String>::new());
}

#[test]
fn packets_are_delivered_in_few_frames_with_one_notice() {
    const PACKET: usize = 1460;
    let (model, engine) = card();
    let ferry = ferry_over(engine.clone(), 1);
    // A ring of buffers, each filled mostly by a packet.
    let buffers = patterned(64 * 2048);
    let packets: Vec<_> =
        buffers.as_slice().chunks(2048).map(|buffer| &buffer[64..64 + PACKET]).collect();
    let mut target = Pages::new(packets.len() * PACKET).unwrap();
    let variable = Notification::new(0);
    let options = Options::new().notify(&variable, 7).no_caller_assist();
    ferry.deliver_with(&packets, target.as_mut_slice(), options).unwrap();
    assert!(target.as_slice() == packets.concat());
    let counters = engine.counters();
    assert_eq!((variable.load(), counters.notification_writes), (7, 1));
    assert!(counters.frames <= packets.len() as u64 / 2, "{counters:?}");
    let by_card = counters.bytes_by_card as f64 / target.len() as f64;
    assert!(by_card > 0.95, "{counters:?}");
    assert_eq!(model.stats().protocol_violations, Vec::<String>::new());
}

#[test]
fn pieces_are_delivered_by_any_engine() {
    let (_, copy_engine) = ioat(1);
    let ferries = [Ferry::new().unwrap(), ferry_over(copy_engine, 1)];
    let source = patterned(MIB);
    for ferry in ferries {
        for lengths in [vec![], vec![0, 1, 0], vec![1; 100], vec![4096, 3, 100_000, 1, 300_000]] {
            let (mut pieces, mut at) = (Vec::new(), 11);
            for length in lengths {
                pieces.push(&source.as_slice()[at..at + length]);
                at += length + 5;
            }
            let expected = pieces.concat();
            let mut target = vec![0; expected.len()];
            ferry.deliver_with(&pieces, &mut target, Options::new()).unwrap();
            assert!(target == expected);
        }
    }
}

#[test]
fn a_delivery_that_makes_no_sense_is_refused() {
    let ferry = Ferry::new().unwrap();
    let mut memory = vec![1u8; 64];
    let error = ferry.deliver_with(&[&[1, 2, 3]], &mut memory[..2], Options::new()).unwrap_err();
    assert!(error.to_string().contains("3 bytes and the target 2"), "{error}");
    let inside = Segment { address: memory.as_ptr().wrapping_add(8), length: 8 };
    // SAFETY: nothing is started.
    let refused =
        unsafe { ferry.ideliver_raw(&[inside, inside], memory.as_mut_ptr(), Options::new()) };
    assert!(refused.unwrap_err().to_string().contains("overlaps the target"));
}

#[test]
fn waiters_of_long_copies_sleep_until_the_interrupt_of_the_device() {
    let model = IoatModel::builder().contiguous(true).build();
    let engine = Arc::new(IoatEngine::over_model(model.clone()).unwrap());
    let ferry = ferry_over(engine, 1);
    let (source, mut target) = (patterned(16 * MIB), Pages::new(16 * MIB).unwrap());
    // A copy may end before its waiter sleeps.
    while ferry.statistics().engine("ioat").wakes == 0 {
        copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
    }
    assert!(model.interrupts().raised() > 0);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn waiters_end_whatever_happens_to_interrupts() {
    let all = [
        InterruptFaults { is_refused: true, ..InterruptFaults::default() },
        InterruptFaults { lost: FaultSchedule::Always, ..InterruptFaults::default() },
        InterruptFaults { lost: FaultSchedule::Every(2), ..InterruptFaults::default() },
        InterruptFaults { is_early: true, ..InterruptFaults::default() },
    ];
    for faults in all {
        let model = IoatModel::builder().contiguous(true).build();
        model.interrupts().set_faults(faults);
        let engine = Arc::new(IoatEngine::over_model(model.clone()).unwrap());
        let ferry = ferry_over(engine, 1);
        let (source, mut target) = (patterned(4 * MIB), Pages::new(4 * MIB).unwrap());
        for _ in 0..8 {
            target.as_mut_slice().fill(0);
            copy(&ferry, source.as_slice(), target.as_mut_slice(), Options::new());
        }
        assert_eq!(
            model.interrupts().raised() > 0,
            !faults.is_refused && faults.lost != FaultSchedule::Always
        );
    }
}
