//! CRCs, copies with one, and dualcasts: what the device executes, and what becomes of faults.

use std::sync::Arc;

use memferry_engine::dsa::DsaEngine;
use memferry_engine::dsa::descriptor::opcode;
use memferry_engine::testing::dsa_model::{
    DsaFaults, DsaModel, DsaModelBuilder, IdxdModel, IdxdModelOptions,
};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::{Engine, Opcode};
use memferry_sys::crc;

use crate::dsa::rig::{BYTES, DsaRig};

fn rig(builder: DsaModelBuilder) -> (Arc<DsaModel>, DsaRig) {
    let model = builder.contiguous(true).build();
    let engine = DsaEngine::over_model(model.clone()).unwrap();
    (model, DsaRig::new(Arc::new(engine)))
}

fn crc_of(rig: &DsaRig, length: usize) -> u32 {
    // SAFETY: the memory of the rig, which nothing writes.
    unsafe { crc::append(0, rig.source.as_ptr(), length) }
}

/// The CRC of the start of the source, with and without a copy, by the channel.
fn check_crcs(rig: &DsaRig, length: usize) {
    let (source, target) = (rig.source.as_ptr() as u64, rig.target.as_ptr() as u64);
    let output = rig.run(rig.operation(Opcode::Crc, source, source, length)).unwrap();
    assert_eq!(output.crc, Some(crc_of(rig, length)));
    let output = rig.run(rig.operation(Opcode::CopyCrc, source, target, length)).unwrap();
    assert_eq!(output.crc, Some(crc_of(rig, length)));
    assert!(rig.is_copied(0, length));
}

#[test]
fn the_device_computes_crcs_and_copies_with_them() {
    let (model, rig) = rig(DsaModel::builder());
    check_crcs(&rig, BYTES);
    check_crcs(&rig, 1);
    assert_eq!(rig.channel.statistics().failed, 0, "the processor did nothing");
    assert_eq!(model.counters().bytes, 2 * (BYTES as u64 + 1));
    drop(rig);
    assert_eq!(model.protocol_violations(), [""; 0]);
}

#[test]
fn a_dualcast_is_one_descriptor_if_the_targets_have_one_offset_in_their_pages_and_two_if_not() {
    const LENGTH: usize = 100_000;
    let (model, rig) = rig(DsaModel::builder());
    for (first, second, descriptors) in [(0, 0x40_000, 1), (0, 0x40_040, 2), (64, 0x40_001, 2)] {
        let before = rig.engine.counters().descriptors;
        rig.run(rig.dualcast(first, second, LENGTH)).unwrap();
        assert_eq!(rig.engine.counters().descriptors - before, descriptors, "{first} {second}");
        let (source, target) = (rig.source.as_slice(), rig.target.as_slice());
        for at in [first, second] {
            assert!(target[at..at + LENGTH] == source[..LENGTH], "the target at {at}");
        }
    }
    assert_eq!(rig.channel.statistics().failed, 0, "the processor did nothing");
    drop(rig);
    assert_eq!(model.protocol_violations(), [""; 0]);
}

#[test]
fn a_page_fault_in_the_middle_changes_no_crc() {
    let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
    let rig = DsaRig::new(Arc::new(DsaEngine::over_idxd_model(model.clone()).unwrap()));
    model
        .device()
        .set_faults(DsaFaults { page_faults: FaultSchedule::Every(2), ..DsaFaults::default() });
    for length in [2, 5000, 200_000, BYTES] {
        check_crcs(&rig, length);
        rig.run(rig.dualcast(1, 0x80_000, length.min(0x70_000))).unwrap();
    }
    assert!(rig.engine.counters().resumed_faults > 0);
    assert_eq!(rig.channel.statistics().failed, 0, "the processor did nothing");
}

#[test]
fn the_processor_computes_the_crc_that_a_failed_device_leaves_undone() {
    let (model, rig) = rig(DsaModel::builder());
    model.set_faults(DsaFaults { errors: FaultSchedule::Always, ..DsaFaults::default() });
    check_crcs(&rig, 70_000);
    rig.run(rig.dualcast(0, 0x40_000, 70_000)).unwrap();
    assert!(rig.is_copied(0, 70_000));
    assert_eq!(rig.channel.statistics().failed, 3);
}

#[test]
fn a_device_without_the_operations_leaves_them_to_the_processor() {
    let builder = DsaModel::builder().without(opcode::CRC).without(opcode::COPY_CRC);
    let (_, rig) = rig(builder.without(opcode::DUALCAST));
    let operations = rig.engine.capabilities().operations;
    for operation in [Opcode::Crc, Opcode::CopyCrc, Opcode::Dualcast] {
        assert!(!operations.contains(operation), "{operation:?}");
    }
    check_crcs(&rig, 70_000);
}
