//! Ends: closed channels, dropped handles, and work that was in flight at the time.

use std::sync::Arc;
use std::sync::mpsc;

use super::bench::{Bench, Job, Reporting, until};
use super::field::{ALIGNED, Field};
use super::{LIMIT, Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{Channel, Descriptor, Sequence, SubmitError};

/// Copies that may or may not be taken before the end.
struct Flight {
    field: Field,
    length: usize,
    completions: Vec<Arc<Completion>>,
}

impl Flight {
    fn new(subject: &Subject, bench: &Bench, count: usize) -> Self {
        let length = bench.one_piece(4096);
        let mut field = Field::new(subject, count * length);
        field.prepare(ALIGNED, count * length);
        let completions = (0..count).map(|_| Arc::new(Completion::whole())).collect();
        Self { field, length, completions }
    }

    fn descriptor(&self, index: usize) -> Descriptor {
        let Self { field, length, completions } = self;
        let source = field.source(index * length, *length);
        Job::copy(source, field.target(ALIGNED + index * length, *length), *length)
            .descriptor()
            .reports_to(completions[index].clone())
    }

    fn batch(&self) -> Vec<Option<Descriptor>> {
        (0..self.completions.len()).map(|index| Some(self.descriptor(index))).collect()
    }

    /// Every transfer must be over; those that ended well must have their bytes, and the others
    /// must have been taken by a channel or dropped by the case.
    fn check(&mut self) {
        for (index, completion) in self.completions.iter().enumerate() {
            let (from, to) = (index * self.length, ALIGNED + index * self.length);
            match completion.outcome().expect("every transfer is over") {
                Ok(_) => {
                    self.field.expect_copy(from, to, self.length);
                    self.field.check_inside(to, self.length);
                }
                Err(error) => assert!(error.done_bytes() <= self.length as u64, "{error}"),
            }
        }
    }

    fn succeeded(&self) -> usize {
        let well = |completion: &&Arc<Completion>| matches!(completion.outcome(), Some(Ok(_)));
        self.completions.iter().filter(well).count()
    }
}

pub(super) fn closing_finishes_or_fails_what_was_taken(subject: &Subject) -> Verdict {
    for round in 0..20 {
        let bench = Bench::new(subject);
        let mut flight = Flight::new(subject, &bench, 60);
        let (mut batch, channel) = (flight.batch(), bench.channel());
        let taken = channel.submit(&mut batch).expect("an open channel").count;
        if round % 2 == 0 {
            bench.poll();
        }
        channel.close();
        assert!(channel.park(taken as Sequence, LIMIT), "a closed channel still ends its work");
        flight.completions[..taken].iter().for_each(|completion| _ = bench.outcome(completion));
        assert!(flight.completions[taken..].iter().all(|rest| !rest.is_done()));
        let statistics = channel.statistics();
        assert_eq!(statistics.submitted, taken as u64);
        assert_eq!(statistics.completed, taken as u64);
        drop(batch);
        flight.check();
        assert!(flight.succeeded() <= taken);
    }
    Verdict::Passed
}

pub(super) fn a_closed_channel_takes_nothing(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let flight = Flight::new(subject, &bench, 5);
    let (mut batch, channel) = (flight.batch(), bench.channel());
    channel.close();
    assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
    assert!(batch.iter().all(Option::is_some), "nothing was taken");
    channel.close();
    channel.wake();
    channel.poll();
    assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
    assert_eq!(channel.completed(), 0);
    assert!(flight.completions.iter().all(|completion| !completion.is_done()));
    drop(batch);
    assert!(flight.completions.iter().all(|completion| completion.is_done()));
    flight.field.check_all();
    Verdict::Passed
}

pub(super) fn submitters_that_race_with_a_close_lose_nothing(subject: &Subject) -> Verdict {
    const EACH: usize = 150;
    for round in 0..10 {
        let bench = Bench::with_capacity(subject, 8);
        let mut flight = Flight::new(subject, &bench, 2 * EACH);
        let submit = |thread: usize| -> usize {
            let mut taken = 0;
            for index in thread * EACH..(thread + 1) * EACH {
                let mut batch = [Some(flight.descriptor(index))];
                let mut open = true;
                until("room or the close", || {
                    bench.poll();
                    match bench.channel().submit(&mut batch) {
                        Ok(now) => taken += now.count,
                        Err(SubmitError::Closed) => open = false,
                    }
                    batch[0].is_none() || !open
                });
                assert!(open || batch[0].is_some(), "a closed channel takes nothing");
                if !open {
                    break;
                }
            }
            taken
        };
        let taken: usize = std::thread::scope(|scope| {
            let threads = [0, 1].map(|thread| scope.spawn(move || submit(thread)));
            let enough = (round * 20) as Sequence;
            bench.until("some copies", || bench.channel().completed() >= enough);
            bench.channel().close();
            threads.into_iter().map(|thread| thread.join().expect("a submitter")).sum()
        });
        assert!(bench.channel().park(taken as Sequence, LIMIT), "everything taken ends");
        bench.until("nothing to be outstanding", || bench.channel().outstanding_bytes() == 0);
        assert_eq!(bench.channel().completed(), taken as Sequence, "nothing is counted twice");
        // Those that nobody began never had a descriptor: begin and abandon them.
        let unbegun = |index: &usize| !flight.completions[*index].is_done();
        (0..2 * EACH).filter(unbegun).for_each(|index| drop(flight.descriptor(index)));
        flight.check();
        assert!(flight.succeeded() <= taken);
    }
    Verdict::Passed
}

pub(super) fn dropping_the_last_handle_ends_the_work_first(subject: &Subject) -> Verdict {
    for round in 0..20 {
        let mut bench = Bench::new(subject);
        let mut flight = Flight::new(subject, &bench, 60);
        let mut batch = flight.batch();
        bench.channel().submit(&mut batch).expect("an open channel");
        drop(batch);
        if round % 2 == 0 {
            bench.poll();
        }
        drop_in_time(std::mem::take(&mut bench.channels));
        // No waiting here: a drop that has returned leaves nothing in flight.
        flight.check();
    }
    Verdict::Passed
}

/// Drops handles, and fails if the drop does not return.
fn drop_in_time(channels: Vec<Arc<dyn Channel>>) {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        drop(channels);
        let _ = tell.send(());
    });
    told.recv_timeout(LIMIT).expect("the drop of a channel returns");
    thread.join().expect("the drop of a channel does not panic");
}

pub(super) fn channels_come_and_go(subject: &Subject) -> Verdict {
    let mut bench = Bench::new(subject);
    let mut flight = Flight::new(subject, &bench, 50);
    for index in 0..50 {
        let taken = bench.submit([flight.descriptor(index)]);
        assert_eq!(taken[0].first, 1, "every channel counts for itself");
        let next = bench.open_channel(&subject.options);
        if index % 3 == 0 {
            bench.succeeds(&flight.completions[index]);
        }
        drop_in_time(std::mem::take(&mut bench.channels));
        // An engine with a single channel has it back by now.
        let next = next.or_else(|_| bench.open_channel(&subject.options));
        bench.channels.push(next.expect("a channel that was given back can be had again"));
    }
    flight.check();
    Verdict::Passed
}
