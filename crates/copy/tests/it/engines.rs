//! The copy core over engines that are not processors: parts within their limits, polled by the
//! poll thread, faults finished by the processor.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{SIZES, builder, pattern};
use memferry_copy::{BuildError, Error, Ferry, Notification, Options, Request};
use memferry_engine::cpu::{CpuEngine, CpuProfile};
use memferry_engine::testing::fault::{Fault, FaultEngine, FaultScript};
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError};

fn over(engine: Arc<dyn Engine>) -> Ferry {
    builder().engine(engine, 2).split_bytes(0).inline_bytes(0).build().unwrap()
}

fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(Arc::new(CpuProfile::built_in())))
}

fn every_call_is_right(ferry: &Ferry) {
    for length in SIZES {
        let source = pattern(length + 3, 1);
        let mut target = vec![0u8; length + 5];
        ferry.copy(&source[3..], &mut target[5..]).unwrap();
        assert!(source[3..] == target[5..], "{length}");
        let (source, copy) =
            ferry.icopy(source[3..].to_vec(), vec![0u8; length]).unwrap().wait().unwrap();
        assert!(source == copy, "{length}");
        assert_eq!(ferry.compare(&source, &copy), Ok(None));
        ferry.fill(&mut target, 3).unwrap();
        assert!(target.iter().all(|&byte| byte == 3));
        let mut expected = pattern(length + 10, 2);
        let mut moved = expected.clone();
        expected.copy_within(0..length, 10);
        ferry.copy_within(&mut moved, 0..length, 10).unwrap();
        assert!(moved == expected, "{length}");
    }
}

#[test]
fn a_polled_engine_gets_every_byte_right() {
    every_call_is_right(&over(Arc::new(PolledEngine::new())));
}

#[test]
fn completions_of_a_polled_engine_arrive_without_anybody_calling() {
    let ferry = over(Arc::new(PolledEngine::new()));
    let variable = Notification::new(0);
    let source = pattern(300_000, 3);
    let mut target = vec![0u8; 300_000];
    ferry.scope(|scope| {
        let options = Options::new().notify(&variable, 5);
        drop(scope.icopy_with(&source, &mut target, options).unwrap());
        assert!(variable.wait(5, Some(Duration::from_secs(200))));
    });
    assert!(source == target);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let transfer = ferry.icopy(source, target).unwrap();
    runtime.block_on(transfer).unwrap();
}

#[test]
fn a_faulty_engine_is_finished_by_the_processor() {
    for inner in [cpu(), Arc::new(PolledEngine::new())] {
        let script = FaultScript::of([
            Fault::None,
            Fault::Partial { done_bytes: 100 },
            Fault::EngineFault { done_bytes: 0 },
            Fault::Delay(Duration::from_micros(200)),
            Fault::EngineFault { done_bytes: 4095 },
        ])
        .full([false, true, false])
        .repeating();
        every_call_is_right(&over(Arc::new(FaultEngine::new(inner, script))));
    }
}

#[test]
fn bad_memory_is_reported_with_what_was_done() {
    let script = FaultScript::of([Fault::None, Fault::BadMemory { done_bytes: 10 }]);
    let ferry = over(Arc::new(FaultEngine::new(cpu(), script)));
    let source = pattern(256 << 10, 4);
    let mut target = vec![0u8; 256 << 10];
    let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len());
    // SAFETY: both vectors live until after the wait.
    let error = unsafe { ferry.run_raw(request) }.unwrap_err();
    let Error::Execution(ExecutionError::BadMemory { address, done_bytes }) = error else {
        panic!("{error}");
    };
    // Chunks are 64 KiB: the second one failed after ten bytes, the others are done.
    assert_eq!(done_bytes, 192 << 10);
    assert_eq!(address, target.as_ptr() as u64 + (64 << 10) + 10);
    assert!(target[..64 << 10] == source[..64 << 10]);
    assert!(target[128 << 10..] == source[128 << 10..]);
}

#[test]
fn closing_a_ferry_drains_engines_that_must_be_polled() {
    for _ in 0..20 {
        let ferry = over(Arc::new(PolledEngine::new()));
        let source = pattern(500_000, 5);
        let mut target = vec![0u8; 500_000];
        let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len());
        // SAFETY: both vectors live until after the wait.
        let transfer = unsafe { ferry.start_raw(request) }.unwrap();
        drop(ferry);
        assert!(transfer.is_done() && transfer.wait().is_ok());
        assert!(source == target);
    }
}

#[test]
fn the_planner_gives_each_size_to_the_cheaper_engine() {
    let polled: Arc<dyn Engine> = Arc::new(PolledEngine::new());
    let ferry = builder().engine(cpu(), 1).engine(polled, 1).build().unwrap();
    let source = pattern(1 << 20, 6);
    let mut target = vec![0u8; 1 << 20];
    ferry.copy(&source, &mut target).unwrap();
    assert!(source == target);
    let statistics = ferry.statistics();
    assert!(statistics.engine("cpu").submitted > 0);
    assert_eq!(statistics.engine("polled").submitted, 0, "it is slower at any large size");
}

#[test]
fn an_engine_without_channels_is_refused_with_what_to_do() {
    let error = builder().engine(cpu(), 0).engine(cpu(), 1).build().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, BuildError::Setting { name: "channels", .. }), "{text}");
    assert!(text.contains("engine cpu") && text.contains("at least one channel"), "{text}");
}
