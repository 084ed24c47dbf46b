//! The conformance suite over every engine of this crate.
#![allow(clippy::print_stderr)]

use std::sync::Arc;

use memferry_engine::ChannelOptions;
use memferry_engine::conformance_tests;
use memferry_engine::contract::PinCacheLimits;
use memferry_engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry_engine::cuda::{CudaConfig, CudaEngine, CudaProfile};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::testing::conformance::{EngineUnderTest, Verdict, run_all};
use memferry_engine::testing::cuda_model::CudaModel;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::fault::{FaultEngine, FaultScript};
use memferry_engine::testing::ioat_model::{FaultSchedule, IoatFaults, IoatModel};
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};

/// Uses the built-in profile: the tests do not measure speed.
fn cpu() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn).unwrap()))
}

/// The engine as in a process that may not start threads.
fn cpu_without_threads() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::without_threads(CpuProfile::load(&ProfileSource::BuiltIn).unwrap()))
}

fn tiny() -> ChannelOptions {
    ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() }
}

fn polled() -> Arc<PolledEngine> {
    Arc::new(PolledEngine::new())
}

/// The polled engine with an auditing pinner.
fn pinned() -> Arc<PolledEngine> {
    Arc::new(PolledEngine::pinned_by(Arc::new(AuditingPinner::new())))
}

conformance_tests!(cpu_engine, EngineUnderTest::new(cpu));
conformance_tests!(
    cpu_engine_with_a_tiny_ring_that_never_spins,
    EngineUnderTest::new(cpu).options(tiny())
);
conformance_tests!(cpu_engine_without_threads, EngineUnderTest::new(cpu_without_threads));
conformance_tests!(polled_engine, EngineUnderTest::new(polled));
conformance_tests!(
    fault_engine_around_cpu,
    EngineUnderTest::new(|| Arc::new(FaultEngine::new(cpu(), FaultScript::default())))
);
conformance_tests!(
    fault_engine_around_polled,
    EngineUnderTest::new(|| Arc::new(FaultEngine::new(polled(), FaultScript::default())))
);
conformance_tests!(polled_engine_with_pinned_memory, EngineUnderTest::new(pinned));
conformance_tests!(
    fault_engine_around_polled_with_pinned_memory,
    EngineUnderTest::new(|| Arc::new(FaultEngine::new(pinned(), FaultScript::default())))
);

/// The GPU engine over a model of a GPU.
fn modelled() -> Arc<CudaEngine> {
    let limits = PinCacheLimits { max_bytes: 1 << 30, max_entries: 1024 };
    let engine = CudaEngine::with_driver(CudaModel::new(), CudaProfile::default(), limits);
    Arc::new(engine.expect("an engine over a model"))
}

conformance_tests!(cuda_engine_over_a_model, EngineUnderTest::new(modelled));
conformance_tests!(
    cuda_engine_over_a_model_with_a_tiny_ring,
    EngineUnderTest::new(modelled).options(tiny())
);

/// The I/OAT engine over a model of a device with four channels.
fn ioat() -> Arc<IoatEngine> {
    ioat_over(IoatModel::builder().channels(4).build())
}

/// The same, with faults that are set after the engine is open.
fn faulty_ioat(faults: IoatFaults) -> Arc<IoatEngine> {
    let device = IoatModel::builder().channels(4).build();
    let engine = ioat_over(device.clone());
    device.set_faults(faults);
    engine
}

fn ioat_over(model: Arc<IoatModel>) -> Arc<IoatEngine> {
    Arc::new(IoatEngine::over_model(model).expect("a model of a copy engine"))
}

conformance_tests!(ioat_engine_over_a_model, EngineUnderTest::new(ioat));
conformance_tests!(
    ioat_engine_over_a_model_with_a_tiny_ring,
    EngineUnderTest::new(ioat).options(tiny())
);

conformance_tests!(
    ioat_engine_with_contiguous_pages,
    EngineUnderTest::new(|| ioat_over(IoatModel::builder().channels(2).contiguous(true).build()))
);
conformance_tests!(
    ioat_engine_that_halts,
    EngineUnderTest::new(|| {
        let faults = IoatFaults { halts: FaultSchedule::Every(7), ..Default::default() };
        faulty_ioat(faults)
    })
    .injects_faults()
);
conformance_tests!(
    ioat_engine_that_does_not_write_back,
    EngineUnderTest::new(|| {
        let faults =
            IoatFaults { loses_write_backs: FaultSchedule::Every(3), ..Default::default() };
        faulty_ioat(faults)
    })
    .injects_faults()
);

/// The DSA engine over a model of a device, with faults that are set after the engine is open.
fn dsa(faults: DsaFaults, is_contiguous: bool) -> Arc<DsaEngine> {
    let model = DsaModel::builder().contiguous(is_contiguous).build();
    let engine = DsaEngine::over_model(model.clone()).expect("a model of an accelerator");
    model.set_faults(faults);
    Arc::new(engine)
}

/// The DSA engine over a model behind the kernel's driver.
fn idxd(options: IdxdModelOptions, faults: DsaFaults) -> Arc<DsaEngine> {
    let model = IdxdModel::new(options).expect("a folder for the model");
    let engine = DsaEngine::over_idxd_model(model.clone()).expect("queues of the model");
    model.device().set_faults(faults);
    Arc::new(engine)
}

conformance_tests!(
    dsa_engine_over_a_model,
    EngineUnderTest::new(|| dsa(DsaFaults::default(), true))
);
conformance_tests!(
    dsa_engine_with_scattered_pages_and_a_tiny_ring,
    EngineUnderTest::new(|| dsa(DsaFaults::default(), false)).options(tiny())
);
conformance_tests!(
    dsa_engine_that_halts,
    EngineUnderTest::new(|| {
        dsa(DsaFaults { halts: FaultSchedule::Every(29), ..DsaFaults::default() }, true)
    })
    .injects_faults()
);
conformance_tests!(
    dsa_engine_that_fails_and_faults,
    EngineUnderTest::new(|| {
        let faults = DsaFaults {
            errors: FaultSchedule::Every(7),
            page_faults: FaultSchedule::Every(5),
            list_faults: FaultSchedule::Every(11),
            ..DsaFaults::default()
        };
        dsa(faults, true)
    })
    .injects_faults()
);
conformance_tests!(
    dsa_engine_over_a_shared_queue_of_the_kernel,
    EngineUnderTest::new(|| idxd(IdxdModelOptions::default(), DsaFaults::default()))
);
conformance_tests!(
    dsa_engine_over_a_dedicated_queue_of_the_kernel,
    EngineUnderTest::new(|| {
        let options = IdxdModelOptions { is_dedicated: true, ..IdxdModelOptions::default() };
        idxd(options, DsaFaults::default())
    })
);
conformance_tests!(
    dsa_engine_that_may_not_map_its_portal,
    EngineUnderTest::new(|| {
        let options = IdxdModelOptions { may_map: false, ..IdxdModelOptions::default() };
        let refuses_submissions = FaultSchedule::Every(3);
        idxd(options, DsaFaults { refuses_submissions, ..DsaFaults::default() })
    })
);
conformance_tests!(
    dsa_engine_whose_pages_are_never_there,
    EngineUnderTest::new(|| {
        let faults = DsaFaults {
            page_faults: FaultSchedule::Every(3),
            refuses_submissions: FaultSchedule::Every(4),
            ..DsaFaults::default()
        };
        idxd(IdxdModelOptions::default(), faults)
    })
);

#[cfg(feature = "cuda")]
#[test]
fn the_cuda_engine_over_a_real_gpu_passes_every_case() {
    let engine = match CudaEngine::open(CudaConfig::default()) {
        Ok(engine) => Arc::new(engine),
        Err(error) => {
            return memferry_testing::skip(memferry_testing::Requirement::Gpu, error);
        }
    };
    // One engine for all cases: opening a device takes long.
    let verdicts = run_all(&EngineUnderTest::new(move || engine.clone()));
    let passed = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Passed).count();
    assert!(passed > verdicts.len() / 2, "{verdicts:?}");
}
