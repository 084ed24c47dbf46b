//! A process forks while one of its threads is at any step of its first connect, listen, copy and job.
//!
//! The other thread does not exist in the child, and what it was computing or had locked stays as it is. The child
//! does the same four things.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry::Ferry;
use memferry_message::{EndpointBuilder, Job, Link, Listener, ReduceOp, Source, TAG_ALL};
use memferry_sys::fault::{self, FaultPlan};
use memferry_testing::HangGuard;

use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{alone, say, unique, until};
use memferry_testing::pattern::{first_wrong, pattern};

const BYTES: usize = 300_000;
/// The status of a process that had no such step.
const NO_STEP: i32 = 3;
/// A child that hangs is ended after this many seconds.
const CHILD_SECONDS: u32 = 60;

/// Copies, connects a link and two endpoints of this process, and joins a job.
fn use_everything() {
    let (source, mut target) = (pattern(BYTES, 1), vec![0; BYTES]);
    let ferry = Ferry::new().unwrap();
    ferry.copy(&source, &mut target).unwrap();
    assert_eq!(first_wrong(&target, 1), None);
    let (_, target) = ferry.icopy(source, vec![0; BYTES]).unwrap().wait().unwrap();
    assert_eq!(first_wrong(&target, 1), None);

    let name = unique("forks-link");
    let listener = Listener::bind(&name).unwrap();
    let (there, here) = (Link::connect(&name).unwrap(), listener.accept().unwrap());
    there.write(&pattern(40, 2)[..]).unwrap();
    let mut short = [0; 40];
    here.read(&mut short[..]).unwrap();
    assert_eq!(first_wrong(&short, 2), None);

    let (names, builder) =
        ([unique("forks"), unique("forks")], EndpointBuilder::new().background(true));
    let [one, other] = names.each_ref().map(|name| builder.open(name).unwrap());
    let to_other = one.connect(&names[1]).unwrap();
    let receive = other.irecv(Source::Any, 1, TAG_ALL, vec![0; BYTES]).unwrap();
    one.send(to_other, 1, &pattern(BYTES, 3)[..]).unwrap();
    let (_, received) = receive.wait().unwrap();
    assert_eq!(first_wrong(&received, 3), None);

    let name = unique("forks-job");
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let name = &name;
            scope.spawn(move || {
                let (job, mut sum) = (Job::join(name, rank, 2).unwrap(), [0]);
                job.allreduce(&[rank as u64 + 1], &mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3]);
            });
        }
    });
}

/// Forks, and returns whether the child could use everything.
fn child_works() -> bool {
    // SAFETY: the C library resets its locks for the child, which exits by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the signal ends a child that hangs.
        unsafe { libc::alarm(CHILD_SECONDS) };
        fault::ignore();
        let is_right = catch_unwind(use_everything).is_ok();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child created above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

/// A process whose threads are new to everything: one of them stays at a step while another one forks.
pub(crate) fn fork_at_step() {
    fault::arm(FaultPlan::Hold { nth: setting("MEMFERRY_TEST_STEP").parse().unwrap() });
    let is_over = AtomicBool::new(false);
    let (is_held, works) = std::thread::scope(|scope| {
        scope.spawn(|| {
            use_everything();
            is_over.store(true, Ordering::Release);
        });
        until("a thread is at the step", || fault::is_holding() || is_over.load(Ordering::Acquire));
        let is_held = fault::is_holding();
        let works = !is_held || child_works();
        fault::disarm();
        (is_held, works)
    });
    assert!(works, "the child failed or did not end");
    if !is_held {
        std::process::exit(NO_STEP);
    }
}

/// After this many processes in a row without the step there is no further one: how many there are differs a little.
const PROCESSES_WITHOUT_STEP: u64 = 3;

#[test]
fn a_child_that_is_forked_at_any_step_of_another_thread_can_do_everything() {
    let _alone = alone();
    let (mut forks, mut missed) = (0u64, 0);
    for step in 1u64.. {
        let _guard = HangGuard::new(&format!("a fork at step {step}"));
        let mut command = process::command("forker");
        command.env("MEMFERRY_TEST_STEP", step.to_string()).env("MEMFERRY_PROFILE", "off");
        let status = Child::spawn(&mut command).end();
        if status.code() == Some(NO_STEP) {
            missed += 1;
            if missed == PROCESSES_WITHOUT_STEP {
                break;
            }
            continue;
        }
        assert!(status.success(), "a fork at step {step}: {status}");
        (forks, missed) = (forks + 1, 0);
    }
    assert!(forks > 0, "no thread was at a step");
    say(format_args!(
        "row\tsteps at which another thread forked\t{forks}\tevery child could do everything"
    ));
}
