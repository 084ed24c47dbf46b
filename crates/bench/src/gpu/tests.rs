//! The bench over a model of a GPU: its times mean nothing there, but every copy is made and
//! verified.

use memferry::CudaEngine;
use memferry::PinLimits;
use memferry::engine::cpu::{CpuEngine, CpuProfile};
use memferry::engine::cuda::CudaProfile;
use memferry::engine::testing::cuda_model::{CudaFaults, CudaModel};

use super::*;
use crate::registry::NoProgress;
use crate::results::sample;

fn fixture_with(faults: CudaFaults, most_bytes: usize) -> GpuFixture {
    let driver = CudaModel::with_faults(faults);
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = CudaEngine::with_driver(driver.clone(), CudaProfile::default(), limits).unwrap();
    let gpu = Arc::new(gpu);
    let processors = Arc::new(CpuEngine::new(Arc::new(CpuProfile::built_in())));
    let ferry = Ferry::builder().engine(processors, 1).engine(gpu.clone(), 2).build().unwrap();
    let peer = DriverPeer::new(driver, None, most_bytes).unwrap();
    GpuFixture::new(ferry, &gpu, peer, most_bytes).unwrap()
}

fn small_plan(bytes: usize) -> GpuBenchPlan {
    let mut cases = cases::cases(Effort::Quick);
    cases.retain(|case| case.bytes == REFERENCE_BYTES);
    for case in &mut cases {
        case.bytes = bytes;
    }
    let most_time = Duration::from_secs(60);
    GpuBenchPlan { effort: Effort::Quick, cases, overlap_sizes: vec![bytes], max_time: most_time }
}

#[test]
fn every_case_is_measured_and_every_byte_arrives() {
    let plan = small_plan((1 << 20) + 5);
    let mut rig = fixture_with(CudaFaults::default(), plan.max_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &NoProgress).unwrap();
    for case in &plan.cases {
        let ours = case.candidates(Effort::Quick)[0].0;
        let row = outcome.rows.iter().find(|r| r.figure == case.figure() && r.series == ours);
        assert!(row.is_some_and(|row| row.value > 0.0 && row.rounds >= 5), "{}", case.figure());
    }
    // The model has no host-to-host copy of the driver.
    assert_eq!(outcome.missing.len(), 1, "{:?}", outcome.missing);
    assert!(outcome.missing[0].starts_with("cuMemcpyAsync, host to host"));
    assert!(outcome.rows.iter().any(|row| row.unit == "cores"));
    assert!(outcome.rows.iter().any(|row| row.unit == "overlap"));
}

#[test]
fn a_driver_that_pins_nothing_is_a_peer_less() {
    let plan = small_plan(1 << 20);
    let faults = CudaFaults { no_pinned_memory: true, ..CudaFaults::default() };
    let mut rig = fixture_with(faults, plan.max_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &NoProgress).unwrap();
    assert!(outcome.missing.iter().any(|missing| missing.starts_with(PINNED)));
    assert!(outcome.rows.iter().any(|row| row.series == MEMFERRY));
}

#[test]
fn what_takes_too_long_is_left_out_and_said_to_be() {
    let plan = GpuBenchPlan { max_time: Duration::ZERO, ..small_plan(1 << 20) };
    let mut rig = fixture_with(CudaFaults::default(), plan.max_bytes());
    let mut outcome = sample::empty("gpu");
    measure(&mut outcome, &mut rig, &plan, &NoProgress).unwrap();
    assert!(outcome.rows.is_empty());
    assert!(outcome.notes.iter().any(|note| note.contains("13 points were left out")));
}

#[test]
fn a_wrong_byte_is_found() {
    let bytes = 4096;
    let mut rig = fixture_with(CudaFaults::default(), bytes);
    for direction in GpuCopyDirection::ALL {
        rig.prepare(direction, bytes).unwrap();
        let mut host = rig.fresh_buffers(direction, PageSize::Small, bytes).unwrap();
        rig.copy(cases::CopyMethod::Ferry, &mut host).unwrap();
        rig.verify(cases::CopyMethod::Ferry, &host).unwrap();
        rig.poison(cases::CopyMethod::Ferry, &mut host).unwrap();
        assert!(rig.verify(cases::CopyMethod::Ferry, &host).is_err(), "{direction}");
    }
}
