//! Injected faults: the processor finishes what an engine cannot, an error reports how far a
//! transfer came that nothing can finish, and nothing hangs or is lost.

mod bad_memory;
mod buffers;
mod checksums;
mod queue;
mod recover;

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::conformance_tests;
use memferry_engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry_engine::testing::conformance::EngineUnderTest;
use memferry_engine::testing::fault::{Fault, FaultEngine, FaultScript};
use memferry_engine::testing::polled::PolledEngine;

fn cpu() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn).unwrap()))
}

fn around_cpu(script: FaultScript) -> Arc<FaultEngine> {
    Arc::new(FaultEngine::new(cpu(), script))
}

fn around_polled(script: FaultScript) -> Arc<FaultEngine> {
    Arc::new(FaultEngine::new(Arc::new(PolledEngine::new()), script))
}

/// Both inner engines: one with a thread, one without.
fn engines(script: &FaultScript) -> [Arc<FaultEngine>; 2] {
    [around_cpu(script.clone()), around_polled(script.clone())]
}

/// Every recoverable fault, repeatedly.
fn recoverable_faults() -> FaultScript {
    let delay = |micros| Fault::Delay(Duration::from_micros(micros));
    FaultScript::of([
        Fault::None,
        Fault::Partial { done_bytes: 1 },
        delay(20),
        Fault::EngineFault { done_bytes: 0 },
        Fault::Partial { done_bytes: 100 },
        Fault::None,
        Fault::EngineFault { done_bytes: 63 },
        delay(1),
        Fault::Partial { done_bytes: u64::MAX },
        Fault::EngineFault { done_bytes: u64::MAX },
        Fault::Partial { done_bytes: 0 },
    ])
    .full([false, true, false, false, true, true, false])
    .repeating()
}

conformance_tests!(
    troubled_cpu,
    EngineUnderTest::new(|| around_cpu(recoverable_faults())).injects_faults()
);
conformance_tests!(
    troubled_polled,
    EngineUnderTest::new(|| around_polled(recoverable_faults())).injects_faults()
);
