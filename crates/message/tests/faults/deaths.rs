//! A process ends at every step.

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::Listener;
use memferry_sys::fault::Plan;
use memferry_testing::HangGuard;

use crate::flows::{Flow, Outcome};
use crate::subject::Order;
use crate::support::process::{self, Child};
use crate::support::traces::{holdings, named_memory};
use crate::support::{alone, say, unique, until};

/// One flow with a process that ends at a step, or at its end. Says whether it was killed, how it was for
/// the survivor, and how long the survivor took to notice.
fn die(
    number: usize,
    flow: Flow,
    listener: &Listener,
    name: &str,
    nth: u64,
) -> (bool, Outcome, Duration) {
    let name = if flow.subject_dials { name.to_owned() } else { unique("victim") };
    let _guard = HangGuard::new(&format!("{}: death at step {nth}", flow.name()));
    let order = Order { flow: number, name: name.clone(), plan: Plan::Die { nth } };
    let mut victim =
        Child::spawn(process::command("victim").env("MEMFERRY_TEST_ORDER", order.to_line()));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| flow.run_survivor(listener, &name, &is_over));
        let status = victim.end();
        let died = Instant::now();
        is_over.store(true, Ordering::Release);
        let outcome = survivor.join().expect("the survivor finds nothing wrong");
        let killed = status.signal() == Some(libc::SIGKILL);
        assert!(killed || status.success(), "it failed by itself: {status}");
        (killed, outcome, died.elapsed())
    })
}

/// So many times in a row without a death, and there is no further step: which side does one first may differ
/// from run to run.
const ENOUGH: usize = 3;

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
        // What is made once and stays.
        for _ in 0..2 {
            die(number, flow, &listener, &name, u64::MAX).1.unwrap();
        }
        let before = holdings();
        let mut passed = 0;
        for nth in 1.. {
            let (killed, outcome, took) = die(number, flow, &listener, &name, nth);
            if !killed {
                outcome.unwrap_or_else(|error| panic!("{}: {error}", flow.name()));
                passed += 1;
                if passed == ENOUGH {
                    break;
                }
                continue;
            }
            passed = 0;
            (deaths, slowest) = (deaths + 1, slowest.max(took));
            until("nothing is left of a dead peer", || {
                // Who has died before it was accepted is noticed by a look.
                let _ = listener.poll_accept();
                let now = holdings();
                now.descriptors <= before.descriptors && now.mappings <= before.mappings
            });
            if nth.is_multiple_of(8) {
                die(number, flow, &listener, &name, u64::MAX).1.unwrap();
            }
        }
        assert_eq!(named_memory(), Vec::<String>::new());
        say(format_args!("{}: {deaths} deaths so far", flow.name()));
    }
    assert!(deaths > 0, "nobody died");
    say(format_args!("row\tsteps at which a process died\t{deaths}\tnoticed within {slowest:?}"));
}
