//! Devices of VFIO: the driver configures them, and memory is pinned.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::dsa::DsaEngine;
use memferry_engine::dsa::descriptor::opcode;
use memferry_engine::dsa::registers::command_error;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, DsaModelBuilder};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::{ChannelOptions, Engine, Opcode};

use super::rig::{BYTES, DsaRig};

fn rig(builder: DsaModelBuilder) -> (Arc<DsaModel>, DsaRig) {
    let model = builder.build();
    let engine = DsaEngine::over_model(model.clone()).unwrap();
    (model, DsaRig::new(Arc::new(engine)))
}

/// Asserts that everything is unmapped and disabled, and that the driver violated nothing.
fn assert_clean(model: &DsaModel, rig: DsaRig) {
    drop(rig);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
    assert_eq!((model.mapped_pages(), model.enabled_queues()), (0, 0));
}

#[test]
fn a_batch_of_64_copies_is_one_doorbell() {
    let (model, rig) = rig(DsaModel::builder());
    let before = model.counters();
    rig.copy_all((0..64).map(|number| (4096 * number, 256)));
    let after = model.counters();
    assert_eq!(after.doorbells - before.doorbells, 1);
    assert_eq!(after.descriptors - before.descriptors, 64);
    assert!((0..64).all(|number| rig.is_copied(4096 * number, 256)));
    assert_eq!(rig.engine.counters().batches, 1);
    assert_clean(&model, rig);
}

#[test]
fn a_long_copy_between_aligned_addresses_is_one_descriptor() {
    let (model, rig) = rig(DsaModel::builder());
    let before = model.counters().descriptors;
    rig.copy_all([(0, BYTES)]);
    assert_eq!(model.counters().descriptors - before, 1);
    assert!(rig.is_copied(0, BYTES));
    assert_clean(&model, rig);
}

#[test]
fn the_bytes_before_the_first_whole_line_of_a_target_are_a_descriptor_of_their_own() {
    let (model, rig) = rig(DsaModel::builder());
    for (at, length, descriptors) in [(64, 4096, 1), (65, 4096, 2), (65, 100, 1), (127, 8192, 2)] {
        let before = model.counters().descriptors;
        rig.copy_all([(at, length)]);
        assert_eq!(model.counters().descriptors - before, descriptors, "{at} {length}");
        assert!(rig.is_copied(at, length));
    }
    assert_clean(&model, rig);
}

#[test]
fn more_descriptors_than_a_portal_has_lines_are_all_taken() {
    // One queue with an entry for each line of its portal, whose engines sleep, or poll.
    let sleeping = DsaModel::builder().queues(1).without(opcode::BATCH);
    for builder in [sleeping.clone(), sleeping.service(Duration::from_micros(1))] {
        let (model, rig) = rig(builder);
        let before = model.counters().doorbells;
        for _ in 0..3 {
            rig.copy_all((0..250).map(|number| (4096 * number, 64)));
        }
        assert!((0..250).all(|number| rig.is_copied(4096 * number, 64)));
        assert_eq!(model.counters().doorbells - before, 750);
        assert_eq!(rig.channel.statistics().failed, 0);
        assert_clean(&model, rig);
    }
}

#[test]
fn a_device_without_batches_gets_every_descriptor_by_itself() {
    let (model, rig) = rig(DsaModel::builder().without(opcode::BATCH));
    rig.copy_all((0..64).map(|number| (4096 * number, 256)));
    assert!((0..64).all(|number| rig.is_copied(4096 * number, 256)));
    assert_eq!((model.counters().batches, rig.engine.counters().batches), (0, 0));
    assert_clean(&model, rig);
}

#[test]
fn what_the_device_does_not_support_is_not_a_capability() {
    let model = DsaModel::builder().without(opcode::COMPARE).build();
    let engine = DsaEngine::over_model(model).unwrap();
    let operations = engine.capabilities().operations;
    assert!(operations.contains(Opcode::Copy) && !operations.contains(Opcode::Compare));
}

#[test]
fn a_compare_returns_the_offset_of_the_difference() {
    let (model, rig) = rig(DsaModel::builder());
    rig.copy_all([(0, BYTES)]);
    let (source, target) = (rig.source.as_ptr() as u64, rig.target.as_ptr() as u64);
    let compare = || rig.operation(Opcode::Compare, source, target, BYTES);
    assert_eq!(rig.run(compare()).unwrap().difference, None);
    // SAFETY: nothing is in flight, and the memory belongs to the rig.
    unsafe { rig.target.as_ptr().add(70_000).write(0) };
    assert_eq!(rig.run(compare()).unwrap().difference, Some(70_000));
    assert_clean(&model, rig);
}

#[test]
fn a_queue_that_stands_still_for_good_is_given_up() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults { stalls: FaultSchedule::Always, ..DsaFaults::default() });
    rig.copy_all((0..8).map(|number| (4096 * number, 64)));
    assert!((0..8).all(|number| rig.is_copied(4096 * number, 64)), "the processor finishes it");
    rig.copy_all([(0, 128)]);
    // Once per stall, not once per descriptor.
    assert_eq!(rig.engine.counters().recoveries, 2);
    assert_clean(&model, rig);
}

#[test]
fn a_halted_device_is_reset_and_its_other_queues_go_on() {
    let (model, first) = rig(DsaModel::builder());
    let second = DsaRig::new(first.engine.clone());
    model.set_faults(DsaFaults { halts: FaultSchedule::At(2), ..DsaFaults::default() });
    for round in 0..20 {
        first.copy_all([(4096 * round, 4096)]);
        second.copy_all([(4096 * round, 4096)]);
    }
    assert!(first.is_copied(0, 20 * 4096) && second.is_copied(0, 20 * 4096));
    assert_eq!(model.counters().halts, 1);
    assert!(first.engine.counters().recoveries >= 2, "each queue finds out");
    drop(second);
    assert_clean(&model, first);
}

#[test]
fn a_device_whose_resets_do_not_end_loses_its_access_to_memory() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults {
        stalls: FaultSchedule::Always,
        refused_resets: u32::MAX,
        ..DsaFaults::default()
    });
    rig.copy_all((0..4).map(|number| (4096 * number, 64)));
    assert!((0..4).all(|number| rig.is_copied(4096 * number, 64)));
    assert!(rig.engine.pages().unwrap().is_revoked());
    assert!(rig.engine.open_channel(&ChannelOptions::default()).is_err());
    drop(rig);
    assert_eq!((model.mapped_pages(), model.protocol_violations()), (0, Vec::<String>::new()));
}

#[test]
fn a_device_that_is_removed_leaves_its_copies_to_the_processor() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults { delay: Duration::from_secs(3600), ..DsaFaults::default() });
    let (descriptor, completion) = rig.copy(0, 4096);
    rig.submit(vec![descriptor]);
    model.set_faults(DsaFaults { is_removed: true, ..DsaFaults::default() });
    rig.finish();
    assert!(matches!(completion.outcome(), Some(Ok(_))) && rig.is_copied(0, 4096));
    drop(rig);
    assert_eq!(model.mapped_pages(), 0);
}

#[test]
fn records_that_are_lost_cost_time_and_no_byte() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults { loses_records: FaultSchedule::At(3), ..DsaFaults::default() });
    rig.copy_all((0..8).map(|number| (4096 * number, 4096)));
    assert!(rig.is_copied(0, 8 * 4096));
    // The record of a batch, too.
    model.set_faults(DsaFaults { loses_records: FaultSchedule::At(9), ..DsaFaults::default() });
    rig.copy_all((0..8).map(|number| (4096 * number, 2048)));
    rig.copy_all([(9 * 4096, 4096)]);
    assert!(rig.is_copied(9 * 4096, 4096));
    assert_clean(&model, rig);
}

#[test]
fn a_page_fault_of_pinned_memory_is_left_to_the_processor() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults { page_faults: FaultSchedule::At(1), ..DsaFaults::default() });
    rig.copy_all([(0, 8192)]);
    assert!(rig.is_copied(0, 8192));
    assert_eq!((rig.channel.statistics().failed, rig.engine.counters().resumed_faults), (1, 0));
    assert_clean(&model, rig);
}

#[test]
fn devices_that_cannot_be_used_are_refused_with_a_reason() {
    let open =
        |builder: DsaModelBuilder| DsaEngine::over_model(builder.build()).unwrap_err().to_string();
    let fixed = open(DsaModel::builder().configurable(false));
    assert!(fixed.contains("fixed configuration") && fixed.contains("idxd"), "{fixed}");
    for table in [0xFF_FF00, 0x1_0000] {
        let lost = open(DsaModel::builder().reported_table(table));
        assert!(lost.contains("tables"), "{lost}");
    }
    let empty = open(DsaModel::builder().total_size(0));
    assert!(empty.contains("0 queues"), "{empty}");
    let enable_error = command_error::QUEUE_PRIORITY;
    let model = DsaModel::builder().faults(DsaFaults { enable_error, ..DsaFaults::default() });
    let engine = DsaEngine::over_model(model.build()).unwrap();
    let refused = engine.open_channel(&ChannelOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("priority"), "{refused}");
}

#[test]
fn all_queues_can_be_open_and_no_more() {
    let model = DsaModel::builder().queues(3).build();
    let engine = DsaEngine::over_model(model.clone()).unwrap();
    let open = || engine.open_channel(&ChannelOptions::default());
    let channels: Vec<_> = (0..3).map(|_| open().unwrap()).collect();
    assert_eq!(model.enabled_queues(), 3);
    assert!(open().unwrap_err().to_string().contains("no free channel"));
    drop(channels);
    assert_eq!(model.enabled_queues(), 0);
    assert!(open().is_ok());
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_capacity_of_any_size_works() {
    for capacity in [1, 2, 3, usize::MAX] {
        let (_model, rig) = rig(DsaModel::builder());
        let options = ChannelOptions { capacity: Some(capacity), ..ChannelOptions::default() };
        let channel = rig.engine.open_channel(&options).unwrap();
        for number in 0..10 {
            let (descriptor, completion) = rig.copy(4096 * number + 1, 3000);
            let sequence = channel.submit_one(descriptor).unwrap();
            assert!(channel.park(sequence, Duration::from_secs(200)));
            assert!(matches!(completion.outcome(), Some(Ok(_))), "{capacity}");
            assert!(rig.is_copied(4096 * number + 1, 3000), "{capacity}");
        }
    }
}

#[test]
fn an_error_that_names_no_queue_is_not_waited_out() {
    let (model, rig) = rig(DsaModel::builder());
    for queue in [None, Some(0)] {
        let delay = Duration::from_secs(3600);
        model.set_faults(DsaFaults { delay, ..DsaFaults::default() });
        let before = rig.engine.counters().recoveries;
        let (descriptor, completion) = rig.copy(0, 4096);
        rig.submit(vec![descriptor]);
        model.raise_error(queue, 0x13);
        rig.finish();
        assert!(matches!(completion.outcome(), Some(Ok(_))) && rig.is_copied(0, 4096));
        assert_eq!(rig.engine.counters().recoveries, before + 1);
        let error = rig.channel.error_of(rig.channel.completed()).unwrap().to_string();
        assert!(!error.contains("stalled"), "{error}");
    }
    model.set_faults(DsaFaults::default());
    assert_clean(&model, rig);
}

#[test]
fn queues_are_configured_with_opcodes_and_groups_with_traffic_classes() {
    for (version, op_config, classes) in
        [(0x100, false, 0b1001), (0x200, true, 0b1001), (0x300, true, 0)]
    {
        let (model, rig) = rig(DsaModel::builder().version(version).op_config(op_config));
        rig.copy_all([(0, 8192)]);
        assert_eq!(rig.channel.statistics().failed, 0, "the queue may execute copies");
        assert_eq!(model.group_flags(0) & 0x3F, classes);
        assert_clean(&model, rig);
    }
}
