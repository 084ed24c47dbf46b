//! Ends: closed channels, dropped handles, and work that is in flight at that time.

use std::sync::Arc;
use std::sync::mpsc;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, wait_until};
use super::{CASE_TIMEOUT, EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{Channel, Descriptor, Sequence, SubmitError};

/// Copies that may or may not be accepted before the end.
struct InFlightCopies {
    buffers: TestBuffers,
    length: usize,
    completions: Vec<Arc<Completion>>,
}

impl InFlightCopies {
    fn new(subject: &EngineUnderTest, bench: &TestEngine, count: usize) -> Self {
        let length = bench.max_part(4096);
        let mut buffers = TestBuffers::new(subject, count * length);
        buffers.prepare(ALIGNED, count * length);
        let completions = (0..count).map(|_| Arc::new(Completion::whole())).collect();
        Self { buffers, length, completions }
    }

    fn descriptor(&self, index: usize) -> Descriptor {
        let Self { buffers, length, completions } = self;
        let source = buffers.source(index * length, *length);
        TestOperation::copy(source, buffers.target(ALIGNED + index * length, *length), *length)
            .descriptor()
            .reports_to(completions[index].clone())
    }

    fn batch(&self) -> Vec<Option<Descriptor>> {
        (0..self.completions.len()).map(|index| Some(self.descriptor(index))).collect()
    }

    /// Checks that every transfer is complete; those that succeeded must have their bytes, and the
    /// others must have been accepted by a channel or dropped by the case.
    fn check(&mut self) {
        for (index, completion) in self.completions.iter().enumerate() {
            let (from, to) = (index * self.length, ALIGNED + index * self.length);
            match completion.outcome().expect("every transfer is complete") {
                Ok(_) => {
                    self.buffers.expect_copy(from, to, self.length);
                    self.buffers.check_inside(to, self.length);
                }
                Err(error) => assert!(error.done_bytes() <= self.length as u64, "{error}"),
            }
        }
    }

    fn succeeded(&self) -> usize {
        let has_succeeded =
            |completion: &&Arc<Completion>| matches!(completion.outcome(), Some(Ok(_)));
        self.completions.iter().filter(has_succeeded).count()
    }
}

pub(super) fn closing_finishes_or_fails_what_was_taken(subject: &EngineUnderTest) -> Verdict {
    for round in 0..20 {
        let bench = TestEngine::new(subject);
        let mut copies = InFlightCopies::new(subject, &bench, 60);
        let (mut batch, channel) = (copies.batch(), bench.channel());
        let accepted = channel.submit(&mut batch).expect("an open channel").count;
        if round % 2 == 0 {
            bench.poll();
        }
        channel.close();
        assert!(
            channel.park(accepted as Sequence, CASE_TIMEOUT),
            "a closed channel still ends its work"
        );
        copies.completions[..accepted].iter().for_each(|completion| _ = bench.outcome(completion));
        assert!(copies.completions[accepted..].iter().all(|rest| !rest.is_done()));
        let statistics = channel.statistics();
        assert_eq!(statistics.submitted, accepted as u64);
        assert_eq!(statistics.completed, accepted as u64);
        drop(batch);
        copies.check();
        assert!(copies.succeeded() <= accepted);
    }
    Verdict::Passed
}

pub(super) fn a_closed_channel_takes_nothing(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let copies = InFlightCopies::new(subject, &bench, 5);
    let (mut batch, channel) = (copies.batch(), bench.channel());
    channel.close();
    assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
    assert!(batch.iter().all(Option::is_some), "nothing was accepted");
    channel.close();
    channel.wake();
    channel.poll();
    assert_eq!(channel.submit(&mut batch), Err(SubmitError::Closed));
    assert_eq!(channel.completed(), 0);
    assert!(copies.completions.iter().all(|completion| !completion.is_done()));
    drop(batch);
    assert!(copies.completions.iter().all(|completion| completion.is_done()));
    copies.buffers.check_all();
    Verdict::Passed
}

pub(super) fn submitters_that_race_with_a_close_lose_nothing(subject: &EngineUnderTest) -> Verdict {
    const EACH: usize = 150;
    for round in 0..10 {
        let bench = TestEngine::with_capacity(subject, 8);
        let mut copies = InFlightCopies::new(subject, &bench, 2 * EACH);
        let submit = |thread: usize| -> usize {
            let mut accepted = 0;
            for index in thread * EACH..(thread + 1) * EACH {
                let mut batch = [Some(copies.descriptor(index))];
                let mut open = true;
                wait_until("space or the close", || {
                    bench.poll();
                    match bench.channel().submit(&mut batch) {
                        Ok(now) => accepted += now.count,
                        Err(SubmitError::Closed) => open = false,
                    }
                    batch[0].is_none() || !open
                });
                assert!(open || batch[0].is_some(), "a closed channel accepts nothing");
                if !open {
                    break;
                }
            }
            accepted
        };
        let accepted: usize = std::thread::scope(|scope| {
            let threads = [0, 1].map(|thread| scope.spawn(move || submit(thread)));
            let enough = (round * 20) as Sequence;
            bench.wait_until("some copies", || bench.channel().completed() >= enough);
            bench.channel().close();
            threads.into_iter().map(|thread| thread.join().expect("a submitter")).sum()
        });
        assert!(
            bench.channel().park(accepted as Sequence, CASE_TIMEOUT),
            "everything accepted ends"
        );
        bench.wait_until("nothing to be outstanding", || bench.channel().outstanding_bytes() == 0);
        assert_eq!(bench.channel().completed(), accepted as Sequence, "nothing is counted twice");
        // Those that were not submitted never had a descriptor: create and drop one.
        let is_unstarted = |index: &usize| !copies.completions[*index].is_done();
        (0..2 * EACH).filter(is_unstarted).for_each(|index| drop(copies.descriptor(index)));
        copies.check();
        assert!(copies.succeeded() <= accepted);
    }
    Verdict::Passed
}

pub(super) fn dropping_the_last_handle_ends_the_work_first(subject: &EngineUnderTest) -> Verdict {
    for round in 0..20 {
        let mut bench = TestEngine::new(subject);
        let mut copies = InFlightCopies::new(subject, &bench, 60);
        let mut batch = copies.batch();
        bench.channel().submit(&mut batch).expect("an open channel");
        drop(batch);
        if round % 2 == 0 {
            bench.poll();
        }
        drop_in_time(std::mem::take(&mut bench.channels));
        // No wait here: a drop that has returned leaves nothing in flight.
        copies.check();
    }
    Verdict::Passed
}

/// Drops handles, and fails if the drop does not return in time.
fn drop_in_time(channels: Vec<Arc<dyn Channel>>) {
    let (dropped_tx, dropped_rx) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        drop(channels);
        let _ = dropped_tx.send(());
    });
    dropped_rx.recv_timeout(CASE_TIMEOUT).expect("the drop of a channel returns");
    thread.join().expect("the drop of a channel does not panic");
}

pub(super) fn channels_come_and_go(subject: &EngineUnderTest) -> Verdict {
    let mut bench = TestEngine::new(subject);
    let mut copies = InFlightCopies::new(subject, &bench, 50);
    for index in 0..50 {
        let accepted = bench.submit([copies.descriptor(index)]);
        assert_eq!(accepted[0].first, 1, "every channel counts for itself");
        let next = bench.open_channel(&subject.options);
        if index % 3 == 0 {
            bench.succeeds(&copies.completions[index]);
        }
        drop_in_time(std::mem::take(&mut bench.channels));
        // An engine with a single channel has it free by now.
        let next = next.or_else(|_| bench.open_channel(&subject.options));
        bench.channels.push(next.expect("a channel that was closed can be opened again"));
    }
    copies.check();
    Verdict::Passed
}
