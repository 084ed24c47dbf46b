//! The faces of a transfer's end: notification variables, wakers, eventfds, things kept alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Wake, Waker};

use memferry_sys::EventFd;

use super::bench::{Bench, Job, Reporting, launch_after, nothing, until};
use super::field::{ALIGNED, Field};
use super::{Subject, Verdict};
use crate::completion::{Completion, Notification, Notify};
use crate::contract::{ExecutionError, MemoryKind};

/// One copy at a time, the same again and again.
struct Single {
    field: Field,
    length: usize,
    job: Job,
}

impl Single {
    fn new(subject: &Subject, bench: &Bench) -> Self {
        let length = bench.one_piece(2048);
        let field = Field::new(subject, length);
        let job = Job::copy(field.source(0, length), field.target(ALIGNED, length), length);
        Self { field, length, job }
    }

    fn prepare(&mut self) {
        self.field.prepare(ALIGNED, self.length);
        self.field.expect_copy(0, ALIGNED, self.length);
    }

    fn start(&self, bench: &Bench, completion: &Arc<Completion>) {
        bench.submit([self.job.descriptor().reports_to(completion.clone())]);
    }

    fn check(&self) {
        self.field.check(ALIGNED, self.length);
    }
}

/// The variable lives longer than the transfers, for which [`Notify::new`] asks.
fn notifying(completion: Completion, variable: &'static Notification, value: u64) -> Completion {
    // SAFETY: static.
    completion.notifying(Some(unsafe { Notify::new(variable, value) }))
}

pub(super) fn a_notification_comes_after_the_data(subject: &Subject) -> Verdict {
    const ROUNDS: u64 = 400;
    let bench = Bench::with_channels(subject, 2);
    let mut single = Single::new(subject, &bench);
    let variable: &'static Notification = Box::leak(Box::new(Notification::new(0)));
    for round in 1..=ROUNDS {
        single.prepare();
        // In turns with a transfer in many chunks, of which the last to end must notify.
        let whole = round % 2 == 0;
        let made = if whole {
            Completion::whole()
        } else {
            Completion::chunked(single.job.work(single.length as u64 / 5 + 1))
        };
        let completion = Arc::new(notifying(made, variable, round));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                until("the notification", || variable.load() == round);
                single.check();
            });
            if whole {
                single.start(&bench, &completion);
            } else {
                bench.launch(&single.job, &completion);
            }
            bench.succeeds(&completion);
            assert_eq!(variable.load(), round, "the end comes after the notification");
        });
    }
    assert!(variable.wait(ROUNDS, None), "a value that is there need not be waited for");
    Verdict::Passed
}

pub(super) fn a_failed_transfer_notifies_nobody(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    if bench.capabilities().memory.contains(MemoryKind::Device) {
        return bench.skip("refuse device memory");
    }
    let single = Single::new(subject, &bench);
    let variable: &'static Notification = Box::leak(Box::new(Notification::new(7)));
    let completion = Arc::new(notifying(Completion::whole(), variable, 8));
    let event = Arc::new(EventFd::new().expect("an eventfd"));
    completion.signal_at_end(&event);
    let descriptor = single.job.descriptor().memory(MemoryKind::Host, MemoryKind::Device);
    bench.submit([descriptor.reports_to(completion.clone())]);
    bench.outcome(&completion).expect_err("memory out of reach");
    assert_eq!(variable.load(), 7, "the value stands for data that is there");
    bench.until("the eventfd, which stands for the end", || event.drain() == 1);
    Verdict::Passed
}

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

pub(super) fn a_waker_is_woken_once_or_told_that_it_is_late(subject: &Subject) -> Verdict {
    let count = |count: &Count| count.0.load(Ordering::Acquire);
    let bench = Bench::new(subject);
    let mut single = Single::new(subject, &bench);
    for round in 0..200 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        let (first, last) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let wakers = [first.clone(), last.clone()].map(Waker::from);
        // Registered before, or while the copy is under way.
        let early = round % 2 == 0 && completion.wake_at_end(&wakers[0]);
        single.start(&bench, &completion);
        let late = completion.wake_at_end(&wakers[1]);
        // The same one again makes no difference.
        completion.wake_at_end(&wakers[1]);
        bench.succeeds(&completion);
        single.check();
        let expected = (u32::from(early), u32::from(late));
        bench.until("the waker", || (count(&first), count(&last)) == expected);
        assert!(!completion.wake_at_end(&wakers[0]), "it is over");
        assert_eq!((count(&first), count(&last)), expected, "every waker, once");
    }
    Verdict::Passed
}

pub(super) fn an_eventfd_is_signalled_once(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let mut single = Single::new(subject, &bench);
    let event = Arc::new(EventFd::new().expect("an eventfd"));
    for round in 0..100 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        if round % 2 == 0 {
            completion.signal_at_end(&event);
            assert_eq!(event.drain(), 0, "nothing was begun");
        }
        single.start(&bench, &completion);
        if round % 2 == 1 {
            completion.signal_at_end(&event);
        }
        bench.until("the eventfd", || event.drain() == 1);
        assert!(completion.is_done());
        single.check();
        completion.signal_at_end(&event);
        assert_eq!(event.drain(), 1, "one that comes late is signalled at once");
        assert_eq!(event.drain(), 0);
    }
    Verdict::Passed
}

/// A task whose executor is broken.
struct Broken;

impl Wake for Broken {
    fn wake(self: Arc<Self>) {
        std::panic::resume_unwind(Box::new("a waker that panics, on purpose"));
    }
}

pub(super) fn a_waker_that_panics_does_no_harm(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let mut single = Single::new(subject, &bench);
    for _ in 0..3 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        assert!(completion.wake_at_end(&Waker::from(Arc::new(Broken))));
        // What comes after it is told all the same, and the channel goes on.
        let (next, told) = (Arc::new(Completion::whole()), Arc::new(AtomicU64::new(0)));
        let witness = Witness { completion: completion.clone(), tell: told.clone() };
        completion.keep_until_end(witness).expect("it is not over yet");
        let order = bench.order(0, nothing(next.clone()));
        launch_after(std::slice::from_ref(&completion), next.clone(), vec![order]);
        single.start(&bench, &completion);
        bench.succeeds(&completion);
        bench.succeeds(&next);
        bench.until("the drop", || told.load(Ordering::Acquire) == DROPPED_AFTER);
        single.check();
    }
    Verdict::Passed
}

/// Tells, when it is dropped, whether the transfer was over by then.
#[derive(Debug)]
struct Witness {
    completion: Arc<Completion>,
    tell: Arc<AtomicU64>,
}

const DROPPED_EARLY: u64 = 1;
const DROPPED_AFTER: u64 = 2;

impl Drop for Witness {
    fn drop(&mut self) {
        let when = if self.completion.is_done() { DROPPED_AFTER } else { DROPPED_EARLY };
        self.tell.fetch_add(when, Ordering::AcqRel);
    }
}

pub(super) fn what_is_kept_is_dropped_after_the_end(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let mut single = Single::new(subject, &bench);
    for _ in 0..100 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        let told = Arc::new(AtomicU64::new(0));
        let witness = || Witness { completion: completion.clone(), tell: told.clone() };
        completion.keep_until_end(witness()).expect("it is not over yet");
        single.start(&bench, &completion);
        // Kept, or given back and dropped by this line, which happens after the end too.
        let _ = completion.keep_until_end(witness());
        bench.succeeds(&completion);
        bench.until("both drops", || told.load(Ordering::Acquire) == 2 * DROPPED_AFTER);
        single.check();
        let late = completion.keep_until_end(5).expect_err("it is over");
        assert_eq!(late, 5, "what cannot be kept is given back");
    }
    Verdict::Passed
}

pub(super) fn a_descriptor_dropped_unsubmitted_fails_its_transfer(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let mut single = Single::new(subject, &bench);
    single.field.prepare(ALIGNED, single.length);
    let abandoned = |completion: &Completion| {
        let outcome = completion.outcome().expect("it is over");
        assert!(matches!(outcome, Err(ExecutionError::Engine { done_bytes: 0, .. })));
    };
    let whole = Arc::new(Completion::whole());
    drop(single.job.descriptor().reports_to(whole.clone()));
    abandoned(&whole);

    let half = single.length as u64 / 2;
    let parts = Arc::new(Completion::chunked(single.job.work(half)));
    while parts.work().is_some_and(|work| work.claim_front().is_some()) {}
    drop(single.job.piece(0, half).reports_part_to(parts.clone(), 0));
    assert!(!parts.is_done(), "the other half may still come");
    drop(single.job.piece(half, half).reports_part_to(parts.clone(), half));
    abandoned(&parts);
    single.field.check_all();
    assert_eq!(bench.channel().statistics().submitted, 0);
    Verdict::Passed
}
