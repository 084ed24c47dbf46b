//! The signals of a transfer's end: notification variables, wakers, eventfds, values kept alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Wake, Waker};

use memferry_sys::EventFd;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{
    ReportsTo, TestEngine, TestOperation, dispatch_after, empty_descriptor, wait_until,
};
use super::{EngineUnderTest, Verdict};
use crate::completion::{Completion, Notification, PendingNotification};
use crate::contract::{ExecutionError, MemoryKind};

/// One copy at a time, repeatedly.
struct SingleCopy {
    buffers: TestBuffers,
    length: usize,
    job: TestOperation,
}

impl SingleCopy {
    fn new(subject: &EngineUnderTest, bench: &TestEngine) -> Self {
        let length = bench.max_part(2048);
        let buffers = TestBuffers::new(subject, length);
        let job =
            TestOperation::copy(buffers.source(0, length), buffers.target(ALIGNED, length), length);
        Self { buffers, length, job }
    }

    fn prepare(&mut self) {
        self.buffers.prepare(ALIGNED, self.length);
        self.buffers.expect_copy(0, ALIGNED, self.length);
    }

    fn start(&self, bench: &TestEngine, completion: &Arc<Completion>) {
        bench.submit([self.job.descriptor().reports_to(completion.clone())]);
    }

    fn check(&self) {
        self.buffers.check(ALIGNED, self.length);
    }
}

/// Adds a notification. The variable outlives the transfers, as [`PendingNotification::new`]
/// requires.
fn notifying(completion: Completion, variable: &'static Notification, value: u64) -> Completion {
    // SAFETY: static.
    completion.notifying(Some(unsafe { PendingNotification::new(variable, value) }))
}

pub(super) fn a_notification_comes_after_the_data(subject: &EngineUnderTest) -> Verdict {
    const ROUNDS: u64 = 400;
    let bench = TestEngine::with_channels(subject, 2);
    let mut single = SingleCopy::new(subject, &bench);
    let variable: &'static Notification = Box::leak(Box::new(Notification::new(0)));
    for round in 1..=ROUNDS {
        single.prepare();
        // Alternates with a transfer in many chunks, of which the last to end must notify.
        let whole = round % 2 == 0;
        let completion = if whole {
            Completion::whole()
        } else {
            Completion::chunked(single.job.work(single.length as u64 / 5 + 1))
        };
        let completion = Arc::new(notifying(completion, variable, round));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("the notification", || variable.load() == round);
                single.check();
            });
            if whole {
                single.start(&bench, &completion);
            } else {
                bench.dispatch(&single.job, &completion);
            }
            bench.succeeds(&completion);
            assert_eq!(variable.load(), round, "the end comes after the notification");
        });
    }
    assert!(variable.wait(ROUNDS, None), "a value that is set needs no wait");
    Verdict::Passed
}

pub(super) fn a_failed_transfer_notifies_nobody(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    if bench.capabilities().memory.contains(MemoryKind::Device) {
        return bench.skip("reject device memory");
    }
    let single = SingleCopy::new(subject, &bench);
    let variable: &'static Notification = Box::leak(Box::new(Notification::new(7)));
    let completion = Arc::new(notifying(Completion::whole(), variable, 8));
    let event = Arc::new(EventFd::new().expect("an eventfd"));
    completion.signal_on_completion(&event);
    let descriptor = single.job.descriptor().memory(MemoryKind::Host, MemoryKind::Device);
    bench.submit([descriptor.reports_to(completion.clone())]);
    bench.outcome(&completion).expect_err("inaccessible memory");
    assert_eq!(variable.load(), 7, "the value is set only with the data");
    bench.wait_until("the eventfd, which is signalled on any end", || event.drain() == 1);
    Verdict::Passed
}

/// Counts its wakeups.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

pub(super) fn a_waker_is_woken_once_or_told_that_it_is_late(subject: &EngineUnderTest) -> Verdict {
    let count = |count: &Count| count.0.load(Ordering::Acquire);
    let bench = TestEngine::new(subject);
    let mut single = SingleCopy::new(subject, &bench);
    for round in 0..200 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        let (first, last) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let wakers = [first.clone(), last.clone()].map(Waker::from);
        // Registered before the copy, or while it is in flight.
        let watch = |key, at: usize| completion.wake_on_completion(key, &wakers[at]);
        let early = round % 2 == 0 && watch(None, 0).is_some();
        single.start(&bench, &completion);
        let late = watch(None, 1);
        // Registering the same waker again makes no difference.
        watch(late, 1);
        bench.succeeds(&completion);
        single.check();
        let expected = (u32::from(early), u32::from(late.is_some()));
        bench.wait_until("the waker", || (count(&first), count(&last)) == expected);
        assert!(watch(None, 0).is_none(), "it is complete");
        assert_eq!((count(&first), count(&last)), expected, "every waker, once");
    }
    Verdict::Passed
}

pub(super) fn an_eventfd_is_signalled_once(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let mut single = SingleCopy::new(subject, &bench);
    let event = Arc::new(EventFd::new().expect("an eventfd"));
    for round in 0..100 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        if round % 2 == 0 {
            completion.signal_on_completion(&event);
            assert_eq!(event.drain(), 0, "nothing was started");
        }
        single.start(&bench, &completion);
        if round % 2 == 1 {
            completion.signal_on_completion(&event);
        }
        bench.wait_until("the eventfd", || event.drain() == 1);
        assert!(completion.is_done());
        single.check();
        completion.signal_on_completion(&event);
        assert_eq!(event.drain(), 1, "a late eventfd is signalled at once");
        assert_eq!(event.drain(), 0);
    }
    Verdict::Passed
}

/// A waker that panics.
struct Broken;

impl Wake for Broken {
    fn wake(self: Arc<Self>) {
        std::panic::resume_unwind(Box::new("a waker that panics, on purpose"));
    }
}

pub(super) fn a_waker_that_panics_does_no_harm(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let mut single = SingleCopy::new(subject, &bench);
    for _ in 0..3 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        assert!(completion.wake_on_completion(None, &Waker::from(Arc::new(Broken))).is_some());
        // Later listeners are notified all the same, and the channel continues.
        let (next, dropped) = (Arc::new(Completion::whole()), Arc::new(AtomicU64::new(0)));
        let witness = Witness { completion: completion.clone(), dropped: dropped.clone() };
        completion.keep_alive(witness).expect("it is not complete yet");
        let batch = bench.channel_batch(0, empty_descriptor(next.clone()));
        dispatch_after(std::slice::from_ref(&completion), next.clone(), vec![batch]);
        single.start(&bench, &completion);
        bench.succeeds(&completion);
        bench.succeeds(&next);
        bench.wait_until("the drop", || dropped.load(Ordering::Acquire) == DROPPED_AFTER);
        single.check();
    }
    Verdict::Passed
}

/// Records on drop whether the transfer was complete by then.
#[derive(Debug)]
struct Witness {
    completion: Arc<Completion>,
    dropped: Arc<AtomicU64>,
}

const DROPPED_EARLY: u64 = 1;
const DROPPED_AFTER: u64 = 2;

impl Drop for Witness {
    fn drop(&mut self) {
        let when = if self.completion.is_done() { DROPPED_AFTER } else { DROPPED_EARLY };
        self.dropped.fetch_add(when, Ordering::AcqRel);
    }
}

pub(super) fn what_is_kept_is_dropped_after_the_end(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let mut single = SingleCopy::new(subject, &bench);
    for _ in 0..100 {
        single.prepare();
        let completion = Arc::new(Completion::whole());
        let dropped = Arc::new(AtomicU64::new(0));
        let witness = || Witness { completion: completion.clone(), dropped: dropped.clone() };
        completion.keep_alive(witness()).expect("it is not complete yet");
        single.start(&bench, &completion);
        // Kept, or returned and dropped in this line, which also happens after the end.
        let _ = completion.keep_alive(witness());
        bench.succeeds(&completion);
        bench.wait_until("both drops", || dropped.load(Ordering::Acquire) == 2 * DROPPED_AFTER);
        single.check();
        let late = completion.keep_alive(5).expect_err("it is complete");
        assert_eq!(late, 5, "a value that cannot be kept is returned");
    }
    Verdict::Passed
}

pub(super) fn a_descriptor_dropped_unsubmitted_fails_its_transfer(
    subject: &EngineUnderTest,
) -> Verdict {
    let bench = TestEngine::new(subject);
    let mut single = SingleCopy::new(subject, &bench);
    single.buffers.prepare(ALIGNED, single.length);
    let abandoned = |completion: &Completion| {
        let outcome = completion.outcome().expect("it is complete");
        assert!(matches!(outcome, Err(ExecutionError::Engine { done_bytes: 0, .. })));
    };
    let whole = Arc::new(Completion::whole());
    drop(single.job.descriptor().reports_to(whole.clone()));
    abandoned(&whole);

    let half = single.length as u64 / 2;
    let parts = Arc::new(Completion::chunked(single.job.work(half)));
    while parts.work().is_some_and(|work| work.claim_front().is_some()) {}
    drop(single.job.part(0, half).reports_part_to(parts.clone(), 0));
    assert!(!parts.is_done(), "the other half is outstanding");
    drop(single.job.part(half, half).reports_part_to(parts.clone(), half));
    abandoned(&parts);
    single.buffers.check_all();
    assert_eq!(bench.channel().statistics().submitted, 0);
    Verdict::Passed
}
