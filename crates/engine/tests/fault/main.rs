//! Injected faults: what an engine cannot finish is finished by the processor, what nobody can
//! finish is told with how far it came, and nothing hangs or is lost.
#![cfg(not(loom))]

mod bad_memory;
mod place;
mod queue;
mod recover;

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::conformance::Subject;
use memferry_engine::conformance_tests;
use memferry_engine::cpu::{CpuEngine, Profile, ProfileSource};
use memferry_engine::fault::{Fault, FaultEngine, Script};
use memferry_engine::polled::PolledEngine;

fn cpu() -> Arc<CpuEngine> {
    Arc::new(CpuEngine::new(Profile::load(&ProfileSource::BuiltIn).unwrap()))
}

fn around_cpu(script: Script) -> Arc<FaultEngine> {
    Arc::new(FaultEngine::new(cpu(), script))
}

fn around_polled(script: Script) -> Arc<FaultEngine> {
    Arc::new(FaultEngine::new(Arc::new(PolledEngine::new()), script))
}

/// Both inner engines: one with a thread, one without.
fn engines(script: &Script) -> [Arc<FaultEngine>; 2] {
    [around_cpu(script.clone()), around_polled(script.clone())]
}

/// Every recoverable misfortune, again and again.
fn trouble() -> Script {
    let delay = |micros| Fault::Delay(Duration::from_micros(micros));
    Script::of([
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

conformance_tests!(troubled_cpu, Subject::new(|| around_cpu(trouble())).injects_faults());
conformance_tests!(troubled_polled, Subject::new(|| around_polled(trouble())).injects_faults());
