//! Dispatches that are ordered after other transfers start once, whichever predecessor ends last.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use memferry_engine::completion::{ChannelBatch, Dispatch};
use memferry_engine::{
    Channel, ChannelStatistics, Completion, Descriptor, ExecutionError, Sequence, SubmitError,
    Submitted,
};

use crate::{empty, model};

/// A channel that executes descriptors in the submit call, and counts them.
#[derive(Debug)]
struct Counting(AtomicU32);

impl Counting {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU32::new(0)))
    }

    fn launched(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

// SAFETY: it accepts descriptors only to execute them at once.
unsafe impl Channel for Counting {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let mut count = 0;
        for descriptor in batch.iter_mut().filter_map(Option::take) {
            self.0.fetch_add(1, Ordering::Relaxed);
            count += 1;
            descriptor.run();
        }
        Ok(Submitted { first: 1, count })
    }

    fn completed(&self) -> Sequence {
        0
    }

    fn error_of(&self, _: Sequence) -> Option<ExecutionError> {
        None
    }

    fn close(&self) {}

    fn outstanding_bytes(&self) -> u64 {
        0
    }

    fn statistics(&self) -> ChannelStatistics {
        ChannelStatistics::default()
    }
}

fn whole() -> Arc<Completion> {
    Arc::new(Completion::whole())
}

/// Orders a transfer of one descriptor after others; the descriptor reports to `completion`.
fn follow(predecessors: &[Arc<Completion>], completion: &Arc<Completion>, channel: &Arc<Counting>) {
    let order = ChannelBatch::one(channel.clone(), true, empty(completion));
    // SAFETY: the completion has no other descriptor.
    unsafe { Dispatch::after(predecessors, completion.clone(), vec![order]) };
}

/// Completes a transfer on a thread of its own.
fn end(completion: &Arc<Completion>, well: bool) -> thread::JoinHandle<()> {
    let descriptor = empty(completion);
    thread::spawn(move || {
        if well {
            descriptor.run();
        } else {
            drop(descriptor);
        }
    })
}

#[test]
fn a_predecessor_that_ends_during_the_registration_launches_once() {
    model(4, || {
        let (first, second, channel) = (whole(), whole(), Counting::new());
        let engine = end(&first, true);
        follow(&[first], &second, &channel);
        assert!(second.wait(0, None));
        engine.join().unwrap();
        assert_eq!(channel.launched(), 1);
        assert!(matches!(second.outcome(), Some(Ok(_))));
    });
}

#[test]
fn two_predecessors_that_end_at_once_launch_once() {
    model(3, || {
        let (first, second, third, channel) = (whole(), whole(), whole(), Counting::new());
        let engines = [end(&first, true), end(&second, true)];
        follow(&[first, second], &third, &channel);
        assert!(third.wait(0, None));
        engines.into_iter().for_each(|engine| engine.join().unwrap());
        assert_eq!(channel.launched(), 1);
    });
}

#[test]
fn one_failed_predecessor_of_two_is_enough_to_refuse() {
    model(3, || {
        let (first, second, third, channel) = (whole(), whole(), whole(), Counting::new());
        let engines = [end(&first, false), end(&second, true)];
        follow(&[first, second], &third, &channel);
        assert!(third.wait(0, None));
        engines.into_iter().for_each(|engine| engine.join().unwrap());
        assert_eq!(third.outcome(), Some(Err(ExecutionError::Predecessor)));
        assert_eq!(channel.launched(), 0);
    });
}

#[test]
fn a_chain_runs_through_whatever_thread_ends_its_first_link() {
    model(3, || {
        let (first, second, third, channel) = (whole(), whole(), whole(), Counting::new());
        let engine = end(&first, true);
        follow(&[first], &second, &channel);
        follow(&[second], &third, &channel);
        assert!(third.wait(0, None));
        engine.join().unwrap();
        assert_eq!(channel.launched(), 2);
    });
}

#[test]
fn two_followers_of_one_transfer_are_both_launched() {
    model(3, || {
        let (first, channel) = (whole(), Counting::new());
        let followers = [whole(), whole()];
        let engine = end(&first, true);
        let other = thread::spawn({
            let (first, follower, channel) = (first.clone(), followers[0].clone(), channel.clone());
            move || follow(&[first], &follower, &channel)
        });
        follow(&[first], &followers[1], &channel);
        assert!(followers.iter().all(|follower| follower.wait(0, None)));
        engine.join().unwrap();
        other.join().unwrap();
        assert_eq!(channel.launched(), 2);
    });
}

#[test]
fn a_follower_cancelled_while_it_is_launched_ends_once_in_either_way() {
    model(4, || {
        let (first, second, channel) = (whole(), whole(), Counting::new());
        follow(std::slice::from_ref(&first), &second, &channel);
        let engine = end(&first, true);
        second.cancel();
        assert!(second.wait(0, None));
        engine.join().unwrap();
        match second.outcome() {
            Some(Ok(_)) => assert_eq!(channel.launched(), 1),
            Some(Err(error)) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: 0 });
                assert_eq!(channel.launched(), 0);
            }
            None => panic!("it is over"),
        }
    });
}
