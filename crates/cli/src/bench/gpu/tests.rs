//! The bench over a model of a GPU: what it measures there means nothing, but every copy is made and
//! looked at.

use memferry::CudaEngine;
use memferry::PinLimits;
use memferry::engine::cpu::{CpuEngine, Profile};
use memferry::engine::cuda::Rates;
use memferry::engine::cuda::model::{Faults, ModelDevice};

use super::*;
use crate::sample;

fn rig_with(faults: Faults, most_bytes: usize) -> Rig {
    let driver = ModelDevice::with_faults(faults);
    let limits = PinLimits { most_bytes: 64 << 20, most_entries: 64 };
    let gpu = CudaEngine::with_driver(driver.clone(), Rates::default(), limits).unwrap();
    let gpu = Arc::new(gpu);
    let processors = Arc::new(CpuEngine::new(Arc::new(Profile::built_in())));
    let ferry = Ferry::builder().engine(processors, 1).engine(gpu.clone(), 2).build().unwrap();
    let peer = Peer::new(driver, None, most_bytes).unwrap();
    Rig::new(ferry, &gpu, peer, most_bytes).unwrap()
}

fn small(bytes: usize) -> Plan {
    let mut cases = cases::cases(Effort::Quick);
    cases.retain(|case| case.bytes == TELLING);
    for case in &mut cases {
        case.bytes = bytes;
    }
    let most_time = Duration::from_secs(60);
    Plan { effort: Effort::Quick, cases, overlap_sizes: vec![bytes], most_time }
}

#[test]
fn every_case_is_measured_and_every_byte_arrives() {
    let plan = small((1 << 20) + 5);
    let mut rig = rig_with(Faults::default(), plan.most_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &Progress::new(false)).unwrap();
    for case in &plan.cases {
        let ours = case.field(Effort::Quick)[0].0;
        let row = outcome.rows.iter().find(|r| r.figure == case.figure() && r.series == ours);
        assert!(row.is_some_and(|row| row.value > 0.0 && row.rounds >= 5), "{}", case.figure());
    }
    // A model has no copy between ordinary memory of its own.
    assert_eq!(outcome.missing.len(), 1, "{:?}", outcome.missing);
    assert!(outcome.missing[0].starts_with("cuMemcpyAsync, host to host"));
    assert!(outcome.rows.iter().any(|row| row.unit == "cores"));
    assert!(outcome.rows.iter().any(|row| row.unit == "overlap"));
}

#[test]
fn a_driver_that_pins_nothing_is_a_peer_less() {
    let plan = small(1 << 20);
    let faults = Faults { no_pinned_memory: true, ..Faults::default() };
    let mut rig = rig_with(faults, plan.most_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &Progress::new(false)).unwrap();
    assert!(outcome.missing.iter().any(|missing| missing.starts_with(PINNED)));
    assert!(outcome.rows.iter().any(|row| row.series == OURS));
}

#[test]
fn what_takes_too_long_is_left_out_and_said_to_be() {
    let plan = Plan { most_time: Duration::ZERO, ..small(1 << 20) };
    let mut rig = rig_with(Faults::default(), plan.most_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &Progress::new(false)).unwrap();
    assert!(outcome.rows.is_empty());
    assert!(outcome.notes.iter().any(|note| note.contains("13 points were left out")));
}

#[test]
fn a_wrong_byte_is_found() {
    let bytes = 4096;
    let mut rig = rig_with(Faults::default(), bytes);
    for direction in Direction::ALL {
        rig.prepare(direction, bytes).unwrap();
        let mut host = rig.fresh(direction, PageSize::Small, bytes).unwrap();
        rig.perform(cases::Way::Ferry, &mut host).unwrap();
        rig.verify(cases::Way::Ferry, &host).unwrap();
        rig.spoil(cases::Way::Ferry, &mut host).unwrap();
        assert!(rig.verify(cases::Way::Ferry, &host).is_err(), "{direction}");
    }
}
