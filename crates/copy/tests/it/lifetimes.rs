//! Every transfer completes exactly once and not too early: clones that are awaited by several
//! tasks, dependents on other engines, ferries that are dropped in between, cookies under pressure,
//! forked children.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::builder;
use memferry_copy::policy::PolicyKind;
use memferry_copy::{Cookie, Ferry, Options, OwnedTransfer, Request};
use memferry_engine::cpu::{CpuEngine, CpuProfile};
use memferry_engine::testing::fault::{Fault, FaultEngine, FaultScript};
use memferry_engine::testing::polled::PolledEngine;
use memferry_testing::in_own_process;

/// A ferry whose first descriptor is delayed.
fn slow(delay: Duration) -> Ferry {
    let cpu = Arc::new(CpuEngine::new(Arc::new(CpuProfile::built_in())));
    let engine = Arc::new(FaultEngine::new(cpu, FaultScript::of([Fault::Delay(delay)])));
    builder().inline_bytes(0).engine(engine, 1).build().unwrap()
}

fn copy(
    ferry: &Ferry,
    length: usize,
    options: Options<'static>,
) -> OwnedTransfer<Vec<u8>, Vec<u8>> {
    ferry.icopy_with(vec![7u8; length], vec![0u8; length], options).unwrap()
}

/// Fails instead of hanging.
fn in_time(what: &str, run: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(run);
    let deadline = Instant::now() + Duration::from_secs(200);
    while !thread.is_finished() {
        assert!(Instant::now() < deadline, "{what}: still not over");
        std::thread::sleep(Duration::from_millis(2));
    }
    thread.join().unwrap();
}

#[test]
fn every_task_that_awaits_a_clone_is_woken() {
    let ferry = slow(Duration::from_millis(100));
    let transfer = copy(&ferry, 100_000, Options::new());
    let clones: Vec<_> = (0..3).map(|_| transfer.transfer().clone()).collect();
    in_time("three tasks", move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        runtime.block_on(async {
            let tasks: Vec<_> = clones.into_iter().map(tokio::spawn).collect();
            for task in tasks {
                task.await.unwrap().unwrap();
            }
        });
    });
}

#[test]
fn a_chain_over_two_channels_outlives_its_ferry() {
    let first = slow(Duration::from_millis(100));
    let start = copy(&first, 100, Options::new());
    let ferry = builder().inline_bytes(0).policy(PolicyKind::RoundRobin).build().unwrap();
    let mut last = copy(&ferry, 4096, Options::new().after(&start));
    for _ in 0..5 {
        last = copy(&ferry, 4096, Options::new().after(&last));
    }
    drop(ferry);
    in_time("the chain", move || assert_eq!(last.wait().unwrap().1, vec![7; 4096]));
}

#[test]
fn a_follower_on_an_engine_that_must_be_polled_is_driven() {
    for keep in [true, false] {
        let first = slow(Duration::from_millis(100));
        let start = copy(&first, 100, Options::new());
        let polled = builder().inline_bytes(0).engine(Arc::new(PolledEngine::new()), 1);
        let ferry = Some(polled.build().unwrap());
        let follower = copy(ferry.as_ref().unwrap(), 100_000, Options::new().after(&start));
        let _kept = ferry.filter(|_| keep);
        in_time("the follower", move || assert_eq!(follower.wait().unwrap().1[99_999], 7));
    }
}

#[test]
fn a_cookie_in_flight_is_never_reported_as_over() {
    const COOKIES: u64 = 6_000;
    let first = slow(Duration::from_secs(3600));
    let never = copy(&first, 100_000, Options::new());
    let ferry = builder().channels(1).build().unwrap();
    let (newest, stop, wrong) = (AtomicI64::new(-1), AtomicBool::new(false), AtomicU64::new(0));
    let source = [1u8; 64];
    let mut target = [0u8; 64];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let newest = newest.load(Ordering::Relaxed);
                for older in (1020..1028).map(|back| newest - back).filter(|&raw| raw >= 0) {
                    let over = ferry.check(Cookie::from_raw(older)) == Ok(true);
                    wrong.fetch_add(u64::from(over), Ordering::Relaxed);
                }
            }
        });
        for _ in 0..COOKIES {
            let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), 64)
                .with(Options::new().after(&never));
            // SAFETY: it is never started: its predecessor is cancelled below.
            let cookie = unsafe { ferry.start_cookie_raw(request) }.unwrap();
            newest.store(cookie.to_raw(), Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(wrong.load(Ordering::Relaxed), 0);
    // The engine holds the first transfer for an hour: both are leaked until the process exits.
    std::mem::forget((first, never, ferry));
}

/// Runs `child` in a forked child and fails if it returns false.
fn forked(child: impl FnOnce() -> bool) {
    // SAFETY: the child copies memory and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let fine = child();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just forked.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
}

#[test]
fn a_child_does_itself_what_a_polled_engine_would_do() {
    if !in_own_process() {
        return;
    }
    let polled = builder().inline_bytes(0).split_bytes(0);
    let ferry = polled.engine(Arc::new(PolledEngine::new()), 1).build().unwrap();
    forked(|| {
        let source = vec![7u8; 100_000];
        let mut target = vec![0u8; 100_000];
        ferry.scope(|scope| {
            let transfer = scope.icopy(&source, &mut target).unwrap();
            transfer.wait().is_ok()
        }) && source == target
            && ferry.copy(&source, &mut target).is_ok()
    });
}

#[test]
fn a_child_that_cancels_leaves_the_parents_transfer_alone() {
    if !in_own_process() {
        return;
    }
    let first = slow(Duration::from_millis(300));
    let start = copy(&first, 100, Options::new());
    let ferry = builder().build().unwrap();
    let transfer = copy(&ferry, 4 << 20, Options::new().after(&start));
    let event = transfer.transfer().event().unwrap();
    forked(|| {
        transfer.transfer().cancel();
        true
    });
    assert!(event.drain() == 0 || transfer.is_done());
    assert_eq!(transfer.wait().unwrap().1[0], 7);
}
