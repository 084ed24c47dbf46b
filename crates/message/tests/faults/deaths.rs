//! A process is killed at every step.

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::Listener;
use memferry_sys::fault::FaultPlan;
use memferry_testing::HangGuard;

use crate::flows::{Flow, Outcome};
use crate::subject::SubjectCommand;
use memferry_testing::message::process::{self, Child};
use memferry_testing::message::traces::{named_memory, open_objects, resource_usage};
use memferry_testing::message::{TIMEOUT, alone, say, unique, until};

/// One flow with a process that is killed at a step, or runs to its end. Returns whether it was
/// killed, the survivor's result, and how long the survivor took to detect it.
fn die(
    number: usize,
    flow: Flow,
    listener: &Listener,
    name: &str,
    nth: u64,
) -> (bool, Outcome, Duration) {
    let name = if flow.subject_dials { name.to_owned() } else { unique("victim") };
    let _guard = HangGuard::new(&format!("{}: death at step {nth}", flow.name()));
    let order = SubjectCommand { flow: number, name: name.clone(), plan: FaultPlan::Kill { nth } };
    let mut victim =
        Child::spawn(process::command("victim").env("MEMFERRY_TEST_ORDER", order.to_line()));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| flow.run_survivor(listener, &name, &is_over));
        let status = victim.end();
        let died = Instant::now();
        is_over.store(true, Ordering::Release);
        let outcome = survivor.join().expect("the survivor succeeds");
        let killed = status.signal() == Some(libc::SIGKILL);
        assert!(killed || status.success(), "it failed without a kill: {status}");
        (killed, outcome, died.elapsed())
    })
}

/// After this many runs in a row without a kill there is no further step: which side does one first
/// may differ from run to run.
const ROUNDS_WITHOUT_DEATH: usize = 3;

#[test]
fn a_process_that_dies_at_any_step_leaves_an_error_and_nothing_else() {
    let _alone = alone();
    let (mut deaths, mut slowest) = (0, Duration::ZERO);
    for (number, flow) in Flow::all().into_iter().enumerate() {
        if std::env::var("MEMFERRY_FLOW").is_ok_and(|only| !flow.name().contains(&only)) {
            continue;
        }
        let name = unique("deaths-survivor");
        let listener = flow.listen(&name).unwrap();
        // Objects that are created once and stay.
        for _ in 0..2 {
            die(number, flow, &listener, &name, u64::MAX).1.unwrap();
        }
        let before = resource_usage();
        let mut passed = 0;
        for nth in 1.. {
            let (killed, outcome, took) = die(number, flow, &listener, &name, nth);
            if !killed {
                outcome.unwrap_or_else(|error| panic!("{}: {error}", flow.name()));
                passed += 1;
                if passed == ROUNDS_WITHOUT_DEATH {
                    break;
                }
                continue;
            }
            passed = 0;
            (deaths, slowest) = (deaths + 1, slowest.max(took));
            let died = Instant::now();
            until("nothing is left of a dead peer", || {
                // A poll detects a process that was killed before it was accepted.
                let _ = listener.poll_accept();
                let now = resource_usage();
                let is_clean =
                    now.descriptors <= before.descriptors && now.mappings <= before.mappings;
                if !is_clean && died.elapsed() > TIMEOUT / 2 {
                    panic!(
                        "{}, death at step {nth}: {before:?} before, {now:?} now\n{}",
                        flow.name(),
                        open_objects()
                    );
                }
                is_clean
            });
            if nth.is_multiple_of(8) {
                die(number, flow, &listener, &name, u64::MAX).1.unwrap();
            }
        }
        assert_eq!(named_memory(), Vec::<String>::new());
        say(format_args!("{}: {deaths} deaths so far", flow.name()));
    }
    assert!(deaths > 0, "no process was killed");
    say(format_args!("row\tsteps at which a process died\t{deaths}\tnoticed within {slowest:?}"));
}
