//! What a channel says about itself: counters, sequence numbers, remembered failures.

use std::sync::Arc;
use std::time::Duration;

use super::bench::{Bench, Job, Reporting, nothing};
use super::field::{ALIGNED, Field};
use super::{LIMIT, Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{ChannelStatistics, Descriptor, ExecutionError, MemoryKind, Sequence};

/// Copies over the same few bytes, one after the other.
fn copies(field: &Field, count: usize, length: usize) -> impl Iterator<Item = Descriptor> {
    let job = Job::copy(field.source(0, length), field.target(ALIGNED, length), length);
    (0..count).map(move |_| job.descriptor())
}

pub(super) fn statistics_add_up(subject: &Subject) -> Verdict {
    const COUNT: usize = 300;
    let bench = Bench::new(subject);
    let length = bench.one_piece(128);
    let field = Field::new(subject, length);
    let channel = bench.channel();
    assert_eq!(channel.statistics(), ChannelStatistics::default(), "a channel starts at zero");
    for turn in 1..=3 {
        bench.submit(copies(&field, COUNT, length));
        let all = (turn * COUNT) as Sequence;
        assert!(channel.park(all, LIMIT));
        // A park may be over a moment before the last counters are written.
        bench.until("nothing to be outstanding", || channel.outstanding_bytes() == 0);
        let statistics = channel.statistics();
        assert_eq!((statistics.submitted, statistics.completed), (all, all));
        if bench.capabilities().never_fails || !subject.injects_faults {
            assert_eq!((statistics.failed, statistics.bytes), (0, all * length as u64));
            assert!((1..=all).all(|number| channel.error_of(number).is_none()));
        }
    }
    Verdict::Passed
}

pub(super) fn a_park_gives_up_on_a_number_that_does_not_come(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let length = bench.one_piece(128);
    let field = Field::new(subject, length);
    let channel = bench.channel();
    assert!(channel.park(0, Duration::ZERO), "number 0 stands for nothing");
    assert!(!channel.park(1, Duration::from_millis(2)), "nothing was submitted");
    assert!(!channel.park(1, Duration::ZERO));
    bench.submit(copies(&field, 1, length));
    assert!(channel.park(1, LIMIT));
    assert!(!channel.park(2, Duration::from_millis(2)), "only one was submitted");
    assert!(!channel.park(Sequence::MAX, Duration::from_millis(2)));
    Verdict::Passed
}

pub(super) fn a_park_returns_when_its_number_comes(subject: &Subject) -> Verdict {
    const ROUNDS: usize = 200;
    let bench = Bench::new(subject);
    let length = bench.one_piece(128);
    let field = Field::new(subject, length);
    let (channel, (tell, told)) = (bench.channel(), std::sync::mpsc::channel());
    let sleeper = channel.clone();
    // Not a scoped thread: if it is never woken, this case must end all the same.
    std::thread::spawn(move || {
        // The longest time there is must not be too long.
        assert!((1..=ROUNDS).all(|round| sleeper.park(round as Sequence, Duration::MAX)));
        // The next case may need the channel, of which some devices have only one.
        drop(sleeper);
        let _ = tell.send(());
    });
    for _ in 0..ROUNDS {
        bench.submit(copies(&field, 1, length));
        // Sometimes the channel sleeps already, sometimes not.
        std::thread::yield_now();
        channel.wake();
    }
    told.recv_timeout(LIMIT).expect("the sleeper is woken");
    Verdict::Passed
}

pub(super) fn whoever_waits_for_a_number_is_told(subject: &Subject) -> Verdict {
    const ROUNDS: u64 = 300;
    let bench = Bench::new(subject);
    let channel = bench.channel();
    if channel.completion_of(0).is_none() {
        return bench.skip("tell of numbers");
    }
    let length = bench.one_piece(128);
    let field = Field::new(subject, length);
    let awaited = |number| channel.completion_of(number).expect("it did before");
    for round in 0..ROUNDS {
        bench.submit(copies(&field, 3, length));
        let [last, first] = [3, 1].map(|number| awaited(3 * round + number));
        bench.succeeds(&first);
        bench.succeeds(&last);
        assert!(channel.completed() >= 3 * round + 3, "told too early");
        assert!(awaited(3 * round + 2).is_done(), "one who comes late");
    }
    // The channel sleeps, or ends, with nobody left who waits.
    let (next, tail) = (awaited(3 * ROUNDS + 1), awaited(3 * ROUNDS + 2));
    bench.submit(copies(&field, 1, length));
    bench.succeeds(&next);
    assert!(!tail.is_done(), "nothing was submitted");
    channel.close();
    assert!(bench.outcome(&tail).is_err(), "its number never came");
    Verdict::Passed
}

pub(super) fn a_marker_ends_after_everything_before_it(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let length = bench.one_piece(1024);
    let mut field = Field::new(subject, length);
    for round in 1..=100 {
        field.prepare(ALIGNED, length);
        field.expect_copy(0, ALIGNED, length);
        let marker = Arc::new(Completion::whole());
        // Whoever wants a failed descriptor rescued must give it a completion.
        let marked = copies(&field, 3, length)
            .map(|copy| copy.reports_to(Arc::new(Completion::whole())))
            .chain([nothing(marker.clone())]);
        bench.submit(marked);
        bench.succeeds(&marker);
        field.check(ALIGNED, length);
        let before = 4 * round - 1;
        assert!(bench.channel().completed() >= before, "the marker came out of turn");
    }
    Verdict::Passed
}

pub(super) fn memory_out_of_reach_fails_cleanly_and_is_remembered(subject: &Subject) -> Verdict {
    const COUNT: usize = 64;
    let bench = Bench::new(subject);
    if bench.capabilities().memory.contains(MemoryKind::Device) {
        return bench.skip("refuse device memory");
    }
    let length = bench.one_piece(128);
    let mut field = Field::new(subject, length);
    field.prepare(ALIGNED, length);
    let job = Job::copy(field.source(0, length), field.target(ALIGNED, length), length);
    let completions: Vec<_> = (0..COUNT).map(|_| Arc::new(Completion::whole())).collect();
    let (host, device) = (MemoryKind::Host, MemoryKind::Device);
    bench.submit(completions.iter().enumerate().map(|(index, completion)| {
        let (source, target) = if index % 2 == 0 { (host, device) } else { (device, host) };
        job.descriptor().memory(source, target).reports_to(completion.clone())
    }));
    for (completion, number) in completions.iter().zip(1..) {
        let error = bench.outcome(completion).expect_err("no engine reaches all memory");
        assert!(matches!(error, ExecutionError::Engine { done_bytes: 0, .. }), "{error}");
        assert!(bench.channel().park(number, LIMIT), "a failed descriptor is completed too");
        let remembered = bench.channel().error_of(number);
        assert!(remembered.is_some_and(|error| error.done_bytes() == 0), "number {number}");
    }
    field.check(ALIGNED, length);
    let failed = bench.channel().statistics().failed;
    assert!(failed == COUNT as u64 || subject.injects_faults, "{failed} of {COUNT} failed");

    // The channel is as good as new.
    field.expect_copy(0, ALIGNED, length);
    bench.carry_out(&job);
    field.check_all();
    Verdict::Passed
}
