//! A ferry with a processor and a model of a GPU.

use std::sync::Arc;

use memferry_copy::Ferry;
use memferry_engine::contract::PinCacheLimits;
use memferry_engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry_engine::cuda::{CudaEngine, CudaProfile};
use memferry_engine::testing::cuda_model::{CudaFaults, CudaModel};

pub(crate) struct GpuFixture {
    pub(crate) device: Arc<CudaModel>,
    pub(crate) engine: Arc<CudaEngine>,
    pub(crate) ferry: Ferry,
}

/// A machine whose GPU other libraries use too.
pub(crate) fn machine(faults: CudaFaults) -> GpuFixture {
    machine_with(faults, |engine| engine)
}

/// A machine whose GPU no other library uses.
pub(crate) fn sole_machine(faults: CudaFaults) -> GpuFixture {
    machine_with(faults, CudaEngine::sole_user)
}

fn machine_with(faults: CudaFaults, finish: fn(CudaEngine) -> CudaEngine) -> GpuFixture {
    let device = CudaModel::with_faults(faults);
    let limits = PinCacheLimits { max_bytes: 1 << 30, max_entries: 1024 };
    let engine = CudaEngine::with_driver(device.clone(), CudaProfile::default(), limits).unwrap();
    let engine = Arc::new(finish(engine));
    let profile = CpuProfile::load(&ProfileSource::BuiltIn).unwrap();
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .engine(Arc::new(CpuEngine::new(profile)), 2)
        .engine(engine.clone(), 3)
        .build()
        .unwrap();
    GpuFixture { device, engine, ferry }
}
