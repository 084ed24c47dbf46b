//! Batches: what a submit accepts, what it leaves, and the order of completions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, wait_until};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, Sequence, Submitted};

/// A row of equal copies, each between slots of its own.
struct CopyRow {
    buffers: TestBuffers,
    length: usize,
    completions: Vec<Arc<Completion>>,
}

impl CopyRow {
    fn new(subject: &EngineUnderTest, bench: &TestEngine, count: usize) -> Self {
        Self::of_length(subject, bench.max_part(256), count)
    }

    fn of_length(subject: &EngineUnderTest, length: usize, count: usize) -> Self {
        let mut buffers = TestBuffers::new(subject, count * length);
        buffers.prepare(ALIGNED, count * length);
        for index in 0..count {
            buffers.expect_copy(Self::from(index, length), ALIGNED + index * length, length);
        }
        let completions = (0..count).map(|_| Arc::new(Completion::whole())).collect();
        Self { buffers, length, completions }
    }

    /// Sources are swapped in pairs, so that a copy to a wrong slot is detected.
    fn from(index: usize, length: usize) -> usize {
        (index ^ 1) * length
    }

    fn descriptor(&self, index: usize) -> Descriptor {
        let (buffers, length) = (&self.buffers, self.length);
        let source = buffers.source(Self::from(index, length), length);
        TestOperation::copy(source, buffers.target(ALIGNED + index * length, length), length)
            .descriptor()
            .reports_to(self.completions[index].clone())
    }

    fn check(&self, index: usize) {
        self.buffers.check_inside(ALIGNED + index * self.length, self.length);
    }

    /// Checks that every copy has succeeded and all bytes are in place.
    fn check_all(&self, bench: &TestEngine) {
        self.completions.iter().for_each(|completion| _ = bench.succeeds(completion));
        self.buffers.check_all();
    }
}

pub(super) fn a_channel_without_bound_is_bounded(subject: &EngineUnderTest) -> Verdict {
    const COUNT: usize = 4;
    let bench = TestEngine::with_capacity(subject, usize::MAX);
    let row = CopyRow::new(subject, &bench, COUNT);
    bench.submit((0..COUNT).map(|index| row.descriptor(index)));
    row.check_all(&bench);
    Verdict::Passed
}

pub(super) fn a_batch_larger_than_the_ring_arrives_whole(subject: &EngineUnderTest) -> Verdict {
    const COUNT: usize = 1000;
    let bench = TestEngine::with_capacity(subject, 8);
    let (row, channel) = (CopyRow::new(subject, &bench, COUNT), bench.channel());
    let mut batch: Vec<_> = (0..COUNT).map(|index| Some(row.descriptor(index))).collect();
    let (mut submitted, mut completed): (usize, Sequence) = (0, 0);
    bench.wait_until("space for all of the batch", || {
        let Submitted { first, count } = channel.submit(&mut batch).expect("an open channel");
        assert!(count == 0 || first == submitted as Sequence + 1, "sequences are consecutive");
        submitted += count;
        let prefix = batch[..submitted].iter().all(Option::is_none);
        assert!(prefix && batch[submitted..].iter().all(Option::is_some), "a prefix is accepted");
        let now = channel.completed();
        assert!(now >= completed && now <= submitted as Sequence, "completions rise");
        completed = now;
        submitted == COUNT
    });
    assert!(channel.park(COUNT as Sequence, super::CASE_TIMEOUT), "everything arrives");
    assert_eq!(channel.completed(), COUNT as Sequence);
    row.check_all(&bench);
    Verdict::Passed
}

pub(super) fn empty_places_of_a_batch_are_skipped(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let (row, channel) = (CopyRow::new(subject, &bench, 3), bench.channel());
    assert_eq!(channel.submit(&mut []).map(|accepted| accepted.count), Ok(0));
    assert_eq!(channel.submit(&mut [None, None]).map(|accepted| accepted.count), Ok(0));
    let mut batch = [None, Some(row.descriptor(0)), None, None, Some(row.descriptor(1)), None];
    let mut submitted = 0;
    bench.wait_until("space for two descriptors", || {
        submitted += channel.submit(&mut batch).expect("an open channel").count;
        submitted == 2
    });
    assert!(batch.iter().all(Option::is_none));
    let last = bench.submit([row.descriptor(2)])[0].last();
    assert_eq!(last, 3, "empty entries have no sequences");
    assert!(channel.park(last, super::CASE_TIMEOUT));
    row.check_all(&bench);
    Verdict::Passed
}

pub(super) fn many_submitters_lose_and_double_nothing(subject: &EngineUnderTest) -> Verdict {
    const THREADS: usize = 4;
    const EACH: usize = 1500;
    let bench = TestEngine::with_capacity(subject, 16);
    let row = CopyRow::new(subject, &bench, THREADS * EACH);
    let mut numbers: Vec<Sequence> = std::thread::scope(|scope| {
        let submitter = |thread: usize| {
            let (bench, row) = (&bench, &row);
            move || {
                let mut numbers = Vec::new();
                let mut next = thread * EACH;
                while next < (thread + 1) * EACH {
                    // Batches of one to seven.
                    let end = (next + 1 + next % 7).min((thread + 1) * EACH);
                    for accepted in bench.submit((next..end).map(|index| row.descriptor(index))) {
                        numbers.extend(accepted.first..=accepted.last());
                    }
                    next = end;
                }
                assert!(numbers.is_sorted(), "a submitter's sequences rise");
                numbers
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|index| scope.spawn(submitter(index))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a submitter")).collect()
    });
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(1..=(THREADS * EACH) as Sequence), "sequences are unique");
    assert!(bench.channel().park((THREADS * EACH) as Sequence, super::CASE_TIMEOUT));
    row.check_all(&bench);
    Verdict::Passed
}

/// Two threads poll the channel and check completions, while a third submits: neither may see a
/// sequence before its descriptor is complete.
pub(super) fn what_counts_as_completed_is_over_and_visible(subject: &EngineUnderTest) -> Verdict {
    const COUNT: usize = 3000;
    let bench = TestEngine::with_capacity(subject, 32);
    let (row, channel) = (CopyRow::new(subject, &bench, COUNT), bench.channel());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut seen = 0;
                wait_until("all completions", || {
                    bench.poll();
                    let completed = channel.completed() as usize;
                    assert!(completed >= seen, "completions rise");
                    for index in seen..completed {
                        assert!(
                            row.completions[index].is_done(),
                            "sequence {} is complete",
                            index + 1
                        );
                        row.check(index);
                    }
                    seen = completed;
                    seen == COUNT
                });
            });
        }
        for index in 0..COUNT {
            let accepted = bench.submit([row.descriptor(index)]);
            assert_eq!(accepted[0].first, index as Sequence + 1);
        }
    });
    row.check_all(&bench);
    Verdict::Passed
}

/// One thread only reads the sequence, while single copies run that take long enough to be observed
/// in the middle.
pub(super) fn a_number_does_not_come_before_its_bytes(subject: &EngineUnderTest) -> Verdict {
    const COUNT: usize = 100;
    let bench = TestEngine::new(subject);
    let row = CopyRow::of_length(subject, bench.max_part(256 << 10), COUNT);
    let checked = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0..COUNT {
                let is_reached = || bench.channel().completed() as usize > index;
                // Many polls for each read of the clock: no change may be missed.
                wait_until("the next sequence", || (0..1000).any(|_| is_reached()));
                assert!(row.completions[index].is_done());
                row.check(index);
                checked.store(index + 1, Ordering::Release);
            }
        });
        for index in 0..COUNT {
            bench.submit([row.descriptor(index)]);
            bench.wait_until("the other thread to check", || {
                checked.load(Ordering::Acquire) > index
            });
        }
    });
    row.check_all(&bench);
    Verdict::Passed
}
