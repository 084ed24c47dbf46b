//! The reports of a channel: counters, sequences, recorded failures.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, empty_descriptor};
use super::{CASE_TIMEOUT, EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{ChannelStatistics, Descriptor, ExecutionError, MemoryKind, Sequence};

/// The copies with these numbers. Each has a target of its own: an engine may still check one copy while its
/// device writes the next.
fn copies(
    buffers: &TestBuffers,
    numbers: Range<usize>,
    length: usize,
) -> impl Iterator<Item = Descriptor> {
    numbers.map(move |number| {
        let source = buffers.source(number * length, length);
        let target = buffers.target(ALIGNED + number * length, length);
        TestOperation::copy(source, target, length).descriptor()
    })
}

pub(super) fn statistics_add_up(subject: &EngineUnderTest) -> Verdict {
    const COUNT: usize = 300;
    let bench = TestEngine::new(subject);
    let length = bench.max_part(128);
    let buffers = TestBuffers::new(subject, COUNT * length);
    let channel = bench.channel();
    assert_eq!(channel.statistics(), ChannelStatistics::default(), "a channel starts at zero");
    for round in 1..=3 {
        bench.submit(copies(&buffers, 0..COUNT, length));
        let all = (round * COUNT) as Sequence;
        assert!(channel.park(all, CASE_TIMEOUT));
        // A park may return shortly before the last counters are written.
        bench.wait_until("nothing to be outstanding", || channel.outstanding_bytes() == 0);
        let statistics = channel.statistics();
        assert_eq!((statistics.submitted, statistics.completed), (all, all));
        if bench.capabilities().infallible || !subject.injects_faults {
            assert_eq!((statistics.failed, statistics.bytes), (0, all * length as u64));
            assert!((1..=all).all(|number| channel.error_of(number).is_none()));
        }
    }
    Verdict::Passed
}

pub(super) fn a_park_gives_up_on_a_number_that_does_not_come(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let length = bench.max_part(128);
    let buffers = TestBuffers::new(subject, length);
    let channel = bench.channel();
    assert!(channel.park(0, Duration::ZERO), "sequence 0 is always complete");
    assert!(!channel.park(1, Duration::from_millis(2)), "nothing was submitted");
    assert!(!channel.park(1, Duration::ZERO));
    bench.submit(copies(&buffers, 0..1, length));
    assert!(channel.park(1, CASE_TIMEOUT));
    assert!(!channel.park(2, Duration::from_millis(2)), "only one was submitted");
    assert!(!channel.park(Sequence::MAX, Duration::from_millis(2)));
    Verdict::Passed
}

pub(super) fn a_park_returns_when_its_number_comes(subject: &EngineUnderTest) -> Verdict {
    const ROUNDS: usize = 200;
    let bench = TestEngine::new(subject);
    let length = bench.max_part(128);
    let buffers = TestBuffers::new(subject, ROUNDS * length);
    let (channel, (finished_tx, finished_rx)) = (bench.channel(), std::sync::mpsc::channel());
    let sleeper = channel.clone();
    // Not a scoped thread: if it is never woken, this case must end all the same.
    std::thread::spawn(move || {
        // The maximum duration must not overflow.
        assert!((1..=ROUNDS).all(|round| sleeper.park(round as Sequence, Duration::MAX)));
        // The next case may need the channel, of which some devices have only one.
        drop(sleeper);
        let _ = finished_tx.send(());
    });
    for round in 0..ROUNDS {
        bench.submit(copies(&buffers, round..round + 1, length));
        // Sometimes the channel sleeps already, sometimes not.
        std::thread::yield_now();
        channel.wake();
    }
    finished_rx.recv_timeout(CASE_TIMEOUT).expect("the sleeper is woken");
    Verdict::Passed
}

pub(super) fn whoever_waits_for_a_number_is_told(subject: &EngineUnderTest) -> Verdict {
    const ROUNDS: u64 = 300;
    let bench = TestEngine::new(subject);
    let channel = bench.channel();
    if channel.completion_of(0).is_none() {
        return bench.skip("support completion_of");
    }
    let length = bench.max_part(128);
    let buffers = TestBuffers::new(subject, 3 * length);
    let awaited = |number| channel.completion_of(number).expect("it is supported");
    for round in 0..ROUNDS {
        bench.submit(copies(&buffers, 0..3, length));
        let [last, first] = [3, 1].map(|number| awaited(3 * round + number));
        bench.succeeds(&first);
        bench.succeeds(&last);
        assert!(channel.completed() >= 3 * round + 3, "notified too early");
        assert!(awaited(3 * round + 2).is_done(), "a late completion");
    }
    // The channel sleeps, or ends, without waiters.
    let (next, tail) = (awaited(3 * ROUNDS + 1), awaited(3 * ROUNDS + 2));
    bench.submit(copies(&buffers, 0..1, length));
    bench.succeeds(&next);
    assert!(!tail.is_done(), "nothing was submitted");
    channel.close();
    assert!(bench.outcome(&tail).is_err(), "its sequence is never reached");
    Verdict::Passed
}

pub(super) fn a_marker_ends_after_everything_before_it(subject: &EngineUnderTest) -> Verdict {
    const COPIES: usize = 3;
    let bench = TestEngine::new(subject);
    let length = bench.max_part(1024);
    let mut buffers = TestBuffers::new(subject, COPIES * length);
    for round in 1..=100 {
        buffers.prepare(ALIGNED, COPIES * length);
        buffers.expect_copy(0, ALIGNED, COPIES * length);
        let marker = Arc::new(Completion::whole());
        // A failed descriptor is retried only if it has a completion. Another thread may retry it while the
        // channel runs the next one, so each copy has a target of its own.
        let copies = copies(&buffers, 0..COPIES, length)
            .map(|copy| copy.reports_to(Arc::new(Completion::whole())));
        bench.submit(copies.chain([empty_descriptor(marker.clone())]));
        bench.succeeds(&marker);
        buffers.check(ALIGNED, COPIES * length);
        let before = 4 * round - 1;
        assert!(bench.channel().completed() >= before, "the marker completed out of order");
    }
    Verdict::Passed
}

pub(super) fn memory_out_of_reach_fails_cleanly_and_is_remembered(
    subject: &EngineUnderTest,
) -> Verdict {
    const COUNT: usize = 64;
    let bench = TestEngine::new(subject);
    if bench.capabilities().memory.contains(MemoryKind::Device) {
        return bench.skip("reject device memory");
    }
    let length = bench.max_part(128);
    let mut buffers = TestBuffers::new(subject, length);
    buffers.prepare(ALIGNED, length);
    let job =
        TestOperation::copy(buffers.source(0, length), buffers.target(ALIGNED, length), length);
    let completions: Vec<_> = (0..COUNT).map(|_| Arc::new(Completion::whole())).collect();
    let (host, device) = (MemoryKind::Host, MemoryKind::Device);
    bench.submit(completions.iter().enumerate().map(|(index, completion)| {
        let (source, target) = if index % 2 == 0 { (host, device) } else { (device, host) };
        job.descriptor().memory(source, target).reports_to(completion.clone())
    }));
    for (completion, number) in completions.iter().zip(1..) {
        let error = bench.outcome(completion).expect_err("this engine cannot access device memory");
        assert!(matches!(error, ExecutionError::Engine { done_bytes: 0, .. }), "{error}");
        assert!(bench.channel().park(number, CASE_TIMEOUT), "a failed descriptor is completed too");
        let recorded = bench.channel().error_of(number);
        assert!(recorded.is_some_and(|error| error.done_bytes() == 0), "sequence {number}");
    }
    buffers.check(ALIGNED, length);
    let failed = bench.channel().statistics().failed;
    assert!(failed == COUNT as u64 || subject.injects_faults, "{failed} of {COUNT} failed");

    // The channel still works.
    buffers.expect_copy(0, ALIGNED, length);
    bench.execute(&job);
    buffers.check_all();
    Verdict::Passed
}
