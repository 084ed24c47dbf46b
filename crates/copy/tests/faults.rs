//! Every system call fails once: while a ferry opens, while its channels copy, while it copies with
//! pinned memory. Each time the copy is correct or returns an error, nothing leaks, and the next
//! try works.
//!
//! `cargo test -p memferry-copy --features faults --test faults`

#[allow(dead_code, reason = "this program uses its own part")]
#[path = "it/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::frames::FrameEngine;
use common::pattern;
use memferry_copy::{Ferry, PinLimits};
use memferry_sys::fault::{self, Call, FaultCounts, FaultPlan, for_each_failure};
use memferry_sys::residency::{locked_bytes, pinned_bytes};
use memferry_testing::{HangGuard, RingPinner, until};

/// The resources of the process: descriptors, threads, locked and pinned bytes.
fn holdings() -> [u64; 4] {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count() as u64;
    [count("/proc/self/fd"), count("/proc/self/task"), locked_bytes(), pinned_bytes()]
}

/// Injected faults apply to the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a flow once for every call in it that can fail.
fn walk(what: &str, flow: impl Fn() -> Result<(), String>) {
    let round = |plan: FaultPlan| -> (Result<(), String>, FaultCounts) {
        let _guard = HangGuard::new(&format!("{what}: {plan:?}"));
        fault::arm(plan);
        let outcome = flow();
        (outcome, fault::disarm())
    };
    // Resources that are created once and stay.
    for _ in 0..3 {
        round(FaultPlan::Count).0.unwrap();
    }
    let (before, account) = (holdings(), round(FaultPlan::Count).1);
    let (mut faults, mut fine, mut places) = (0, 0, BTreeSet::new());
    let calls: Vec<Call> = account.calls.keys().copied().collect();
    for_each_failure(&calls, false, |plan| {
        let (outcome, account) = round(plan);
        let Some(place) = account.fired_at else {
            outcome.unwrap();
            return false;
        };
        (faults, fine) = (faults + 1, fine + u64::from(outcome.is_ok()));
        places.insert(place.to_string());
        let is_left = || holdings().iter().zip(before).any(|(now, before)| *now > before);
        until("nothing is left", || !is_left());
        let (next, _) = round(FaultPlan::Count);
        next.unwrap_or_else(|next| panic!("{what}: after {plan:?}: {next}"));
        true
    });
    let (kinds, places) = (account.calls.len(), places.len());
    assert!(faults > 0, "nothing failed");
    report(format_args!(
        "row\tcalls of {what} that failed\t{faults}\tof {kinds} kinds, at {places} places; {fine} without an \
         error"
    ));
}

#[allow(clippy::print_stdout, reason = "for whoever reads the output of a test")]
fn report(words: std::fmt::Arguments<'_>) {
    println!("{words}");
}

/// Copies of several sizes, which must be correct if they succeed.
fn copy_with(ferry: &Ferry, sizes: &[usize]) -> Result<(), String> {
    for (seed, &bytes) in sizes.iter().enumerate() {
        let (source, mut target) = (pattern(bytes, seed as u64 + 1), vec![0; bytes]);
        ferry.copy(&source, &mut target).map_err(|error| error.to_string())?;
        assert!(source == target, "{bytes} bytes say they were copied, and were not");
        let copied = ferry.icopy(source, vec![0u8; bytes]).map_err(|error| error.to_string())?;
        let (source, target) = copied.wait().map_err(|error| error.to_string())?;
        assert!(source == target, "{bytes} bytes say they were copied, and were not");
    }
    Ok(())
}

#[test]
fn a_ferry_opens_and_copies_or_says_why_not_whatever_call_fails() {
    let _alone = alone();
    walk("a ferry", || {
        let ferry = common::builder().channels(2).build().map_err(|error| error.to_string())?;
        copy_with(&ferry, &[100, 100_000, 3 << 20])
    });
}

#[test]
fn copies_with_pinned_memory_are_right_or_say_why_not_whatever_call_fails() {
    let _alone = alone();
    // SAFETY: a new file, whose descriptor only this value has.
    let file = unsafe {
        use std::os::fd::FromRawFd;
        let descriptor = libc::memfd_create(c"frames".as_ptr(), libc::MFD_CLOEXEC);
        assert!(descriptor >= 0);
        std::fs::File::from_raw_fd(descriptor)
    };
    let Some(ring) = RingPinner::new() else { return };
    let engine = Arc::new(FrameEngine::new(ring, file));
    walk("pinned memory", || {
        let builder = common::builder().engine(engine.clone(), 1).capacity(1 << 12);
        let builder = builder.split_bytes(0).inline_bytes(0).pin_limits(PinLimits::default());
        let ferry = builder.build().map_err(|error| error.to_string())?;
        copy_with(&ferry, &[100, 100_000, 1 << 20])
    });
}
