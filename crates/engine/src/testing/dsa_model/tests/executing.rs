//! What the model does with descriptors.

use super::*;
use crate::dsa::descriptor::flag;
use crate::dsa::registers::DsaState;
use crate::testing::ioat_model::FaultSchedule;

#[test]
fn a_copy_a_fill_and_a_crc_are_executed() {
    let rig = ModelRig::new();
    let copy = DsaOperation::Copy { source: rig.at(SOURCE + 3), target: rig.at(TARGET + 5) };
    assert_eq!(rig.run(rig.descriptor(copy, 1000, 0)).code(), status::SUCCESS);
    assert_eq!(rig.bytes(TARGET + 5, 1000), rig.bytes(SOURCE + 3, 1000));
    let crc = DsaOperation::Crc { source: rig.at(SOURCE), seed: 0 };
    rig.store(rig.descriptor(crc, 100, 1));
    wait_until("a record", || rig.record(1).code() != 0);
    assert_eq!(rig.record(1).words()[2] as u32, crc::crc32c(0, rig.bytes(SOURCE, 100)));
    let fill = DsaOperation::Fill { pattern: 0x0807_0605_0403_0201, target: rig.at(TARGET) };
    rig.store(rig.descriptor(fill, 11, 2));
    wait_until("a record", || rig.record(2).code() != 0);
    assert_eq!(rig.bytes(TARGET, 12)[..11], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]);
    rig.assert_clean();
}

#[test]
fn a_compare_reports_the_first_difference() {
    let rig = ModelRig::new();
    let (left, right) = (rig.at(SOURCE), rig.at(SOURCE + 256));
    let same = rig.run(rig.descriptor(DsaOperation::Compare { left, right: left }, 100, 0));
    assert_eq!((same.words()[0] >> 8) as u8, 0);
    rig.store(rig.descriptor(DsaOperation::Compare { left, right }, 100, 1));
    wait_until("a record", || rig.record(1).code() != 0);
    let differs = |at: &usize| rig.bytes(SOURCE, 356)[*at] != rig.bytes(SOURCE, 356)[256 + *at];
    let first = (0..100).find(differs).unwrap();
    assert_eq!(rig.record(1).completed() as usize, first);
    assert_eq!((rig.record(1).words()[0] >> 8) as u8, 1);
}

#[test]
fn a_batch_executes_its_list_and_reports_the_count() {
    let mut rig = ModelRig::new();
    let copy = |index: usize| DsaOperation::Copy {
        source: rig.at(SOURCE + 64 * index),
        target: rig.at(TARGET + 64 * index),
    };
    let list: Vec<_> = (0..8).map(|index| rig.descriptor(copy(index), 64, index + 1)).collect();
    rig.write_list(&list);
    let record = rig.run(rig.descriptor(DsaOperation::Batch { list: rig.at(LIST) }, 8, 0));
    assert_eq!((record.code(), record.completed()), (status::SUCCESS, 8));
    assert!((1..9).all(|number| rig.record(number).code() == status::SUCCESS));
    assert_eq!(rig.bytes(TARGET, 512), rig.bytes(SOURCE, 512));
    let counters = rig.model.counters();
    assert_eq!((counters.doorbells, counters.batches, counters.descriptors), (1, 1, 8));
    rig.assert_clean();
}

#[test]
fn a_batch_with_a_failed_descriptor_fails_and_a_fence_stops_it() {
    let mut rig = ModelRig::new();
    let bad = DsaOperation::Copy { source: rig.at(SOURCE), target: 0x10 };
    let good = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    let fenced = rig.descriptor(good, 64, 2).with_flags(flag::FENCE);
    rig.write_list(&[rig.descriptor(bad, 64, 1), fenced]);
    let record = rig.run(rig.descriptor(DsaOperation::Batch { list: rig.at(LIST) }, 2, 0));
    assert_eq!((record.code(), record.completed()), (status::BATCH_FAILED, 1));
    assert_eq!(rig.record(1).code(), status::PAGE_FAULT);
    assert_eq!(rig.record(2).code(), status::NONE, "not executed");
    assert_eq!((rig.model.counters().fences, rig.model.counters().abandoned), (1, 1));
    rig.assert_clean();
}

#[test]
fn one_with_a_fence_waits_for_those_before_it_and_holds_up_none_behind_it() {
    let mut rig = ModelRig::new();
    let fill = |byte: u64| DsaOperation::Fill {
        pattern: byte * 0x0101_0101_0101_0101,
        target: rig.at(TARGET),
    };
    let copy = DsaOperation::Copy { source: rig.at(TARGET), target: rig.at(TARGET + 1024) };
    let fenced = rig.descriptor(copy, 64, 2).with_flags(flag::FENCE);
    let list = [rig.descriptor(fill(1), 64, 1), fenced, rig.descriptor(fill(2), 64, 3)];
    rig.write_list(&list);
    // The device executes every second batch from its end.
    for (number, last) in [(0, 2), (4, 1)] {
        let batch = DsaOperation::Batch { list: rig.at(LIST) };
        rig.store(rig.descriptor(batch, 3, number));
        wait_until("a record", || rig.record(number).code() != 0);
        assert_eq!(rig.record(number).completed(), 3);
        assert_eq!(rig.bytes(TARGET + 1024, 64), [1; 64]);
        assert_eq!(rig.bytes(TARGET, 64), [last; 64]);
    }
    assert_eq!((rig.model.counters().fences, rig.model.counters().abandoned), (2, 0));
    rig.assert_clean();
}

#[test]
fn mistakes_in_descriptors_are_rejected_and_named() {
    let (batch, page) = (DsaOperation::Batch { list: 64 }, 4096);
    type Wrong = fn(&ModelRig) -> DsaDescriptor;
    let copy: fn(&ModelRig) -> DsaOperation =
        |rig| DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    let wrong: [(Wrong, u8); 9] = [
        (
            |rig| {
                let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
                rig.descriptor(copy, 64, 0).with_flags(flag::FENCE)
            },
            status::INVALID_FLAGS,
        ),
        (|rig| rig.descriptor(DsaOperation::Batch { list: 64 }, 1, 0), status::DESCRIPTOR_COUNT),
        (|rig| rig.descriptor(DsaOperation::Batch { list: 64 }, 9, 0), status::DESCRIPTOR_COUNT),
        (|rig| rig.descriptor(DsaOperation::Batch { list: 32 }, 2, 0), status::LIST_ALIGNMENT),
        (
            |rig| {
                let source = rig.at(SOURCE);
                let overlap = DsaOperation::Copy { source, target: source + 8 };
                rig.descriptor(overlap, 64, 0)
            },
            status::OVERLAP,
        ),
        (
            |rig| {
                let (source, target) = (rig.at(SOURCE), rig.at(TARGET));
                let second = rig.at(LIST) + 8;
                rig.descriptor(DsaOperation::Dualcast { source, target, second }, 64, 0)
            },
            status::DUALCAST_OFFSETS,
        ),
        (
            |rig| {
                let crc = DsaOperation::Crc { source: rig.at(SOURCE), seed: 0 };
                rig.descriptor(crc, 64, 0).with_flags(flag::CACHE_CONTROL)
            },
            status::INVALID_FLAGS,
        ),
        (
            |rig| {
                let source = rig.at(SOURCE);
                let copy = DsaOperation::Copy { source, target: rig.at(TARGET) };
                rig.descriptor(copy, 64, 0).with_flags(flag::BLOCK_ON_FAULT)
            },
            status::INVALID_FLAGS,
        ),
        (
            |rig| {
                let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
                let mut words = rig.descriptor(copy, 64, 0).words();
                words[6] = 1;
                DsaDescriptor::from_words(words)
            },
            status::RESERVED_FIELD,
        ),
    ];
    for (make, code) in wrong {
        let rig = ModelRig::new();
        assert_eq!(rig.run(make(&rig)).code(), code);
        assert!(rig.violation().contains(crate::dsa::record::status_reason(code)));
    }
    let rig = ModelRig::new();
    let too_long = rig.run(rig.descriptor(copy(&rig), page + 1, 0));
    assert_eq!(too_long.code(), status::TRANSFER_SIZE);
    let mut rig = ModelRig::new();
    rig.write_list(&[rig.descriptor(batch, 2, 1), rig.descriptor(copy(&rig), 64, 2)]);
    let nested = rig.run(rig.descriptor(DsaOperation::Batch { list: rig.at(LIST) }, 2, 0));
    assert_eq!((nested.code(), rig.record(1).code()), (status::BATCH_FAILED, status::BAD_OPCODE));
}

#[test]
fn a_full_queue_and_a_disabled_one_drop_what_is_stored() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { stalls: FaultSchedule::Always, ..DsaFaults::default() });
    let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    rig.store(rig.descriptor(copy, 64, 0));
    wait_until("the stall", || rig.model.counters().stalls == 1);
    (0..5).for_each(|_| rig.store(rig.descriptor(copy, 64, 0)));
    assert!(rig.violation().contains("is full"));
    assert_ne!(rig.model.read64(r::SWERR) & r::SWERR_VALID, 0);
    let rig = ModelRig::cold(DsaModel::builder());
    rig.store(rig.descriptor(DsaOperation::Noop, 0, 0));
    assert!(rig.violation().contains("is not enabled"));
}

#[test]
fn a_page_fault_reports_what_was_done_before_it() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { page_faults: FaultSchedule::Always, ..DsaFaults::default() });
    let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    let record = rig.run(rig.descriptor(copy, 1000, 0));
    assert_eq!((record.code(), record.completed()), (status::PAGE_FAULT, 500));
    assert_eq!(record.words()[1], rig.at(TARGET + 500));
    assert_eq!(rig.bytes(TARGET, 500), rig.bytes(SOURCE, 500));
    assert!(rig.bytes(TARGET + 500, 500).iter().all(|byte| *byte == 0));
}

#[test]
fn a_halt_stops_every_queue_until_the_device_is_reset() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { halts: FaultSchedule::At(1), ..DsaFaults::default() });
    let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    rig.store(rig.descriptor(copy, 64, 0));
    wait_until("the halt", || rig.model.read32(r::GENSTS) == DsaState::Halted as u32);
    rig.store(rig.descriptor(copy, 64, 1));
    assert_eq!(rig.record(1).code(), status::NONE);
    assert_eq!(rig.command(DsaCommand::ResetDevice.value()), 0);
    assert_eq!(rig.model.read32(r::GENSTS), DsaState::Disabled as u32);
    rig.assert_clean();
}

#[test]
fn after_the_reset_of_a_queue_its_descriptors_touch_nothing() {
    let rig = ModelRig::new();
    let delay = Duration::from_secs(3600);
    rig.model.set_faults(DsaFaults { delay, ..DsaFaults::default() });
    let copy = DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) };
    (0..3).for_each(|number| rig.store(rig.descriptor(copy, 64, number)));
    assert_eq!(rig.command(DsaCommand::ResetQueue(0).value()), 0);
    assert!((0..3).all(|number| rig.record(number).code() == status::NONE));
    assert!(rig.bytes(TARGET, 64).iter().all(|byte| *byte == 0));
    assert_eq!(rig.model.enabled_queues(), 0);
    rig.assert_clean();
}
