//! Batches: what a submit takes, what it leaves, and in which order things end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::bench::{Bench, Job, Reporting, until};
use super::field::{ALIGNED, Field};
use super::{Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, Sequence, Taken};

/// A row of equal copies, each from a place of its own to a place of its own.
struct Row {
    field: Field,
    length: usize,
    completions: Vec<Arc<Completion>>,
}

impl Row {
    fn new(subject: &Subject, bench: &Bench, count: usize) -> Self {
        Self::of_length(subject, bench.one_piece(256), count)
    }

    fn of_length(subject: &Subject, length: usize, count: usize) -> Self {
        let mut field = Field::new(subject, count * length);
        field.prepare(ALIGNED, count * length);
        for index in 0..count {
            field.expect_copy(Self::from(index, length), ALIGNED + index * length, length);
        }
        let completions = (0..count).map(|_| Arc::new(Completion::whole())).collect();
        Self { field, length, completions }
    }

    /// Sources go backwards in pairs, so that a copy in a wrong place shows.
    fn from(index: usize, length: usize) -> usize {
        (index ^ 1) * length
    }

    fn descriptor(&self, index: usize) -> Descriptor {
        let (field, length) = (&self.field, self.length);
        let source = field.source(Self::from(index, length), length);
        Job::copy(source, field.target(ALIGNED + index * length, length), length)
            .descriptor()
            .reports_to(self.completions[index].clone())
    }

    fn check(&self, index: usize) {
        self.field.check_inside(ALIGNED + index * self.length, self.length);
    }

    /// Every copy has ended well, and with it all bytes are in place.
    fn check_all(&self, bench: &Bench) {
        self.completions.iter().for_each(|completion| _ = bench.succeeds(completion));
        self.field.check_all();
    }
}

pub(super) fn a_batch_larger_than_the_ring_arrives_whole(subject: &Subject) -> Verdict {
    const COUNT: usize = 1000;
    let bench = Bench::with_capacity(subject, 8);
    let (row, channel) = (Row::new(subject, &bench, COUNT), bench.channel());
    let mut batch: Vec<_> = (0..COUNT).map(|index| Some(row.descriptor(index))).collect();
    let (mut handed, mut completed): (usize, Sequence) = (0, 0);
    bench.until("room for all of the batch", || {
        let Taken { first, count } = channel.submit(&mut batch).expect("an open channel");
        assert!(count == 0 || first == handed as Sequence + 1, "numbers follow one another");
        handed += count;
        let prefix = batch[..handed].iter().all(Option::is_none);
        assert!(prefix && batch[handed..].iter().all(Option::is_some), "a prefix is taken");
        let now = channel.completed();
        assert!(now >= completed && now <= handed as Sequence, "completions rise");
        completed = now;
        handed == COUNT
    });
    assert!(channel.park(COUNT as Sequence, super::LIMIT), "everything arrives");
    assert_eq!(channel.completed(), COUNT as Sequence);
    row.check_all(&bench);
    Verdict::Passed
}

pub(super) fn empty_places_of_a_batch_are_skipped(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let (row, channel) = (Row::new(subject, &bench, 3), bench.channel());
    assert_eq!(channel.submit(&mut []).map(|taken| taken.count), Ok(0));
    assert_eq!(channel.submit(&mut [None, None]).map(|taken| taken.count), Ok(0));
    let mut batch = [None, Some(row.descriptor(0)), None, None, Some(row.descriptor(1)), None];
    let mut handed = 0;
    bench.until("room for two descriptors", || {
        handed += channel.submit(&mut batch).expect("an open channel").count;
        handed == 2
    });
    assert!(batch.iter().all(Option::is_none));
    let last = bench.submit([row.descriptor(2)])[0].last();
    assert_eq!(last, 3, "empty places have no numbers");
    assert!(channel.park(last, super::LIMIT));
    row.check_all(&bench);
    Verdict::Passed
}

pub(super) fn many_submitters_lose_and_double_nothing(subject: &Subject) -> Verdict {
    const THREADS: usize = 4;
    const EACH: usize = 1500;
    let bench = Bench::with_capacity(subject, 16);
    let row = Row::new(subject, &bench, THREADS * EACH);
    let mut numbers: Vec<Sequence> = std::thread::scope(|scope| {
        let submitter = |thread: usize| {
            let (bench, row) = (&bench, &row);
            move || {
                let mut numbers = Vec::new();
                let mut next = thread * EACH;
                while next < (thread + 1) * EACH {
                    // Batches of one to seven.
                    let end = (next + 1 + next % 7).min((thread + 1) * EACH);
                    for taken in bench.submit((next..end).map(|index| row.descriptor(index))) {
                        numbers.extend(taken.first..=taken.last());
                    }
                    next = end;
                }
                assert!(numbers.is_sorted(), "a submitter's numbers rise");
                numbers
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|index| scope.spawn(submitter(index))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a submitter")).collect()
    });
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(1..=(THREADS * EACH) as Sequence), "numbers are unique");
    assert!(bench.channel().park((THREADS * EACH) as Sequence, super::LIMIT));
    row.check_all(&bench);
    Verdict::Passed
}

/// Two threads move the channel on and look, while a third submits: neither may see a number
/// before what it stands for.
pub(super) fn what_counts_as_completed_is_over_and_visible(subject: &Subject) -> Verdict {
    const COUNT: usize = 3000;
    let bench = Bench::with_capacity(subject, 32);
    let (row, channel) = (Row::new(subject, &bench, COUNT), bench.channel());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut seen = 0;
                until("all completions", || {
                    bench.poll();
                    let completed = channel.completed() as usize;
                    assert!(completed >= seen, "completions rise");
                    for index in seen..completed {
                        assert!(row.completions[index].is_done(), "number {} is over", index + 1);
                        row.check(index);
                    }
                    seen = completed;
                    seen == COUNT
                });
            });
        }
        for index in 0..COUNT {
            let taken = bench.submit([row.descriptor(index)]);
            assert_eq!(taken[0].first, index as Sequence + 1);
        }
    });
    row.check_all(&bench);
    Verdict::Passed
}

/// One thread does nothing but look, while copies go by one at a time that take long enough to be
/// caught in the middle.
pub(super) fn a_number_does_not_come_before_its_bytes(subject: &Subject) -> Verdict {
    const COUNT: usize = 100;
    let bench = Bench::new(subject);
    let row = Row::of_length(subject, bench.one_piece(256 << 10), COUNT);
    let looked = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0..COUNT {
                let came = || bench.channel().completed() as usize > index;
                // Many looks before the clock is asked: none may be missed.
                until("the next number", || (0..1000).any(|_| came()));
                assert!(row.completions[index].is_done());
                row.check(index);
                looked.store(index + 1, Ordering::Release);
            }
        });
        for index in 0..COUNT {
            bench.submit([row.descriptor(index)]);
            bench.until("the other to look", || looked.load(Ordering::Acquire) > index);
        }
    });
    row.check_all(&bench);
    Verdict::Passed
}
