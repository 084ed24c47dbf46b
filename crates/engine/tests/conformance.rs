//! The conformance suite over every engine of this crate.
#![cfg(not(loom))]
#![allow(clippy::print_stderr)]

use std::sync::Arc;

use memferry_engine::ChannelOptions;
use memferry_engine::conformance::{Subject, Verdict, run_all};
use memferry_engine::conformance_tests;
use memferry_engine::contract::Limits;
use memferry_engine::cpu::{CpuEngine, Profile, ProfileSource};
use memferry_engine::cuda::model::ModelDevice;
use memferry_engine::cuda::{CudaEngine, Rates, Settings};
use memferry_engine::fault::{FaultEngine, Script};
use memferry_engine::ioat::model::{IoatModel, When};
use memferry_engine::ioat::{self, IoatEngine};
use memferry_engine::polled::{PinLedger, PolledEngine};

/// Without a measurement: the tests are not about speed.
fn cpu() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::new(Profile::load(&ProfileSource::BuiltIn).unwrap()))
}

/// As in a process that may start no thread.
fn cpu_without_threads() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::without_threads(Profile::load(&ProfileSource::BuiltIn).unwrap()))
}

fn tiny() -> ChannelOptions {
    ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() }
}

fn polled() -> Arc<PolledEngine> {
    Arc::new(PolledEngine::new())
}

/// The same, with a ledger of what is pinned for it.
fn pinned() -> Arc<PolledEngine> {
    Arc::new(PolledEngine::pinned_by(Arc::new(PinLedger::new())))
}

conformance_tests!(cpu_engine, Subject::new(cpu));
conformance_tests!(cpu_engine_with_a_tiny_ring_that_never_spins, Subject::new(cpu).options(tiny()));
conformance_tests!(cpu_engine_without_threads, Subject::new(cpu_without_threads));
conformance_tests!(polled_engine, Subject::new(polled));
conformance_tests!(
    fault_engine_around_cpu,
    Subject::new(|| Arc::new(FaultEngine::new(cpu(), Script::default())))
);
conformance_tests!(
    fault_engine_around_polled,
    Subject::new(|| Arc::new(FaultEngine::new(polled(), Script::default())))
);
conformance_tests!(polled_engine_with_pinned_memory, Subject::new(pinned));
conformance_tests!(
    fault_engine_around_polled_with_pinned_memory,
    Subject::new(|| Arc::new(FaultEngine::new(pinned(), Script::default())))
);

/// The GPU engine over a model of a GPU.
fn modelled() -> Arc<CudaEngine> {
    let limits = Limits { most_bytes: 1 << 30, most_entries: 1024 };
    let engine = CudaEngine::with_driver(ModelDevice::new(), Rates::default(), limits);
    Arc::new(engine.expect("an engine over a model"))
}

conformance_tests!(cuda_engine_over_a_model, Subject::new(modelled));
conformance_tests!(
    cuda_engine_over_a_model_with_a_tiny_ring,
    Subject::new(modelled).options(tiny())
);

/// The engine of Intel's copy engine over a model of a device with four channels.
fn ioat() -> Arc<IoatEngine> {
    ioat_over(IoatModel::builder().channels(4).build())
}

/// The same, that goes wrong once it is in use.
fn faulty_ioat(faults: ioat::model::Faults) -> Arc<IoatEngine> {
    let device = IoatModel::builder().channels(4).build();
    let engine = ioat_over(device.clone());
    device.set_faults(faults);
    engine
}

fn ioat_over(model: Arc<IoatModel>) -> Arc<IoatEngine> {
    Arc::new(IoatEngine::over_model(model).expect("a model of a copy engine"))
}

conformance_tests!(ioat_engine_over_a_model, Subject::new(ioat));
conformance_tests!(ioat_engine_over_a_model_with_a_tiny_ring, Subject::new(ioat).options(tiny()));

conformance_tests!(
    ioat_engine_with_contiguous_pages,
    Subject::new(|| ioat_over(IoatModel::builder().channels(2).contiguous(true).build()))
);
conformance_tests!(
    ioat_engine_that_halts,
    Subject::new(|| {
        let faults = ioat::model::Faults { halts: When::Every(7), ..Default::default() };
        faulty_ioat(faults)
    })
    .injects_faults()
);
conformance_tests!(
    ioat_engine_that_does_not_write_back,
    Subject::new(|| {
        let faults =
            ioat::model::Faults { loses_write_backs: When::Every(3), ..Default::default() };
        faulty_ioat(faults)
    })
    .injects_faults()
);

#[cfg(feature = "cuda")]
#[test]
fn the_cuda_engine_over_a_real_gpu_passes_every_case() {
    let engine = match CudaEngine::open(Settings::default()) {
        Ok(engine) => Arc::new(engine),
        Err(error) => {
            return memferry_testing::skip(memferry_testing::Requirement::Gpu, error);
        }
    };
    // One engine for all cases: opening a device takes long.
    let verdicts = run_all(&Subject::new(move || engine.clone()));
    let passed = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Passed).count();
    assert!(passed > verdicts.len() / 2, "{verdicts:?}");
}
