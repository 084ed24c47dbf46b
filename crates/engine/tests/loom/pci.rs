//! The channel of a device, with concurrent submitters, pollers and a closing thread. A descriptor that no
//! thread finishes shows as a sleeper that is never woken, or as a poll that makes no progress.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use loom::thread;
use memferry_engine::completion::{ChannelBatch, Dispatch};
use memferry_engine::contract::NotificationWrite;
use memferry_engine::pci::channel::DeviceChannel;
use memferry_engine::pci::hardware::{HardwareQueue, HwStatus, PostResult};
use memferry_engine::{
    Channel, Completion, Descriptor, ExecutionError, Opcode, SubmitError, Submitted,
};

use crate::model;

/// A timeout that no model reaches.
const LONG: Duration = Duration::from_secs(600);

/// The targets of the transfers: one byte for each.
static BYTES: [AtomicU8; 4] = [const { AtomicU8::new(0) }; 4];

/// The transcript of a card: the byte indices of the posted descriptors, and whether one was posted too
/// early. Loom does not track it, because one thread at a time uses the card.
#[derive(Debug, Default)]
struct Story {
    posted: std::sync::Mutex<Vec<usize>>,
    is_too_early: AtomicBool,
}

impl Story {
    fn posted(&self) -> Vec<usize> {
        self.posted.lock().unwrap().clone()
    }
}

/// A card that completes, in order, the descriptors that it was rung for.
#[derive(Debug)]
struct Card {
    /// The maximum number of posted descriptors.
    room: usize,
    posted: VecDeque<usize>,
    rung: usize,
    /// The transfer that fails. No other may be posted after it before it is complete.
    failing: Option<Arc<Completion>>,
    story: Arc<Story>,
}

impl Card {
    fn new(room: usize) -> (Self, Arc<Story>) {
        let story = Arc::new(Story::default());
        let card = Self { room, posted: VecDeque::new(), rung: 0, failing: None, story };
        let story = card.story.clone();
        (card, story)
    }
}

// SAFETY: the card accesses no memory.
unsafe impl HardwareQueue for Card {
    fn post(&mut self, descriptor: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        if self.posted.len() == self.room {
            return PostResult::Full;
        }
        let index = (descriptor.target() - BYTES.as_ptr() as u64) as usize;
        if index > 0 && self.failing.as_ref().is_some_and(|failing| !failing.is_done()) {
            self.story.is_too_early.store(true, Ordering::Relaxed);
        }
        self.posted.push_back(index);
        self.story.posted.lock().unwrap().push(index);
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {
        self.rung = self.posted.len();
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        let done = self.posted.drain(..std::mem::take(&mut self.rung));
        ended.extend(done.map(|index| match self.failing {
            Some(_) if index == 0 => HwStatus::Failed("it cannot do this one"),
            _ => HwStatus::Ok,
        }));
    }
}

/// A channel, the transcript of its card, and the completions of the transfers.
struct World {
    channel: Arc<DeviceChannel>,
    story: Arc<Story>,
    transfers: Vec<Arc<Completion>>,
}

impl World {
    /// Creates a channel of `capacity` descriptors over a card of `room` descriptors.
    fn new(capacity: usize, room: usize) -> Arc<Self> {
        let (card, story) = Card::new(room);
        Self::over(card, story, capacity, transfers())
    }

    fn over(
        card: Card,
        story: Arc<Story>,
        capacity: usize,
        transfers: Vec<Arc<Completion>>,
    ) -> Arc<Self> {
        let channel = Arc::new(DeviceChannel::new(Box::new(card), capacity));
        Arc::new(Self { channel, story, transfers })
    }

    /// The descriptor of a transfer, created once for each.
    fn descriptor(&self, index: usize) -> Option<Descriptor> {
        let target = BYTES[index].as_ptr() as u64;
        // SAFETY: the byte is static, and only the transfer of its index accesses it; tests create one
        // descriptor for each transfer.
        let fill = unsafe {
            Descriptor::new(Opcode::Fill, 0, target, 1).completes(self.transfers[index].clone())
        };
        Some(fill)
    }

    fn submit(&self, index: usize) -> Submitted {
        self.channel.submit(&mut [self.descriptor(index)]).unwrap()
    }

    /// Checks that all transfers up to the channel's sequence are complete.
    fn check_numbers(&self) {
        let completed = self.channel.completed() as usize;
        let order = self.story.posted();
        for index in &order[..completed] {
            assert!(self.transfers[*index].is_done(), "counted before its end was told");
        }
    }

    /// Completes the remaining transfers, without other threads: every poll must make progress.
    fn drain(&self) {
        // Read again each time: the end of a transfer may submit a follower.
        let submitted = || self.channel.statistics().submitted;
        while self.channel.completed() < submitted() {
            assert!(self.channel.poll(), "something is left, and nobody is at it");
        }
        let submitted = submitted();
        assert_eq!((self.channel.completed(), self.channel.outstanding_bytes()), (submitted, 0));
    }
}

fn transfers() -> Vec<Arc<Completion>> {
    BYTES.iter().map(|_| Arc::new(Completion::whole())).collect()
}

fn is_well(completion: &Completion) -> bool {
    matches!(completion.outcome(), Some(Ok(_)))
}

#[test]
fn every_descriptor_of_two_submitters_has_a_number_of_its_own_and_ends_once() {
    model(3, || {
        let world = World::new(2, 1);
        let submitters = [0, 1].map(|index| {
            let world = world.clone();
            thread::spawn(move || {
                let taken = world.submit(index);
                world.channel.poll();
                (taken, index)
            })
        });
        world.channel.poll();
        world.check_numbers();
        let mut taken = submitters.map(|thread| thread.join().unwrap());
        world.drain();
        taken.sort_by_key(|(taken, _)| taken.first);
        assert_eq!(
            taken.map(|(taken, _)| taken),
            [1, 2].map(|first| Submitted { first, count: 1 })
        );
        assert_eq!(world.story.posted(), taken.map(|(_, index)| index), "numbers are the order");
        assert!(world.transfers[..2].iter().all(|transfer| is_well(transfer)));
        assert_eq!(world.channel.statistics().bytes, 2);
    });
}

#[test]
fn a_close_beside_submits_leaves_with_the_callers_what_it_does_not_take() {
    model(3, || {
        let world = World::new(2, 2);
        let submitters = [0, 2].map(|first| {
            let world = world.clone();
            thread::spawn(move || {
                let mut batch = [first, first + 1].map(|index| world.descriptor(index));
                // The channel may be closed already.
                let taken = world.channel.submit(&mut batch).map_or(0, |taken| taken.count);
                let left = batch.iter().map(Option::is_some);
                assert!(left.eq((0..2).map(|index| index >= taken)), "taken from the front");
                taken
            })
        });
        world.channel.close();
        world.channel.poll();
        let taken = submitters.map(|thread| thread.join().unwrap());
        world.drain();
        assert_eq!(world.channel.submit(&mut []), Err(SubmitError::Closed));
        assert_eq!(world.channel.statistics().submitted, taken.iter().sum::<usize>() as u64);
        // The caller drops the descriptors that were not accepted, which fails their transfers.
        for (index, transfer) in world.transfers.iter().enumerate() {
            assert!(transfer.is_done());
            assert_eq!(is_well(transfer), index % 2 < taken[index / 2]);
        }
    });
}

#[test]
fn a_sleeper_is_woken_whichever_of_two_pollers_finishes_its_transfer() {
    model(2, || {
        let world = World::new(2, 1);
        world.submit(0);
        world.submit(1);
        let pollers = [1, 2].map(|number| {
            let world = world.clone();
            thread::spawn(move || {
                assert!(world.channel.park(number, LONG));
                world.check_numbers();
            })
        });
        assert!(world.transfers[1].wait(0, None));
        assert!(is_well(&world.transfers[0]), "the first comes before the second");
        pollers.into_iter().for_each(|thread| thread.join().unwrap());
        world.drain();
    });
}

#[test]
fn what_comes_behind_a_failure_is_posted_after_the_processor_has_done_it() {
    model(3, || {
        let transfers = transfers();
        let (mut card, story) = Card::new(1);
        card.failing = Some(transfers[0].clone());
        let world = World::over(card, story, 2, transfers);
        world.submit(0);
        let poller = thread::spawn({
            let world = world.clone();
            move || world.channel.poll()
        });
        world.submit(1);
        world.channel.poll();
        poller.join().unwrap();
        world.drain();
        assert!(!world.story.is_too_early.load(Ordering::Relaxed));
        assert_eq!(world.story.posted(), [0, 1]);
        assert!(world.transfers[..2].iter().all(|transfer| is_well(transfer)));
        let error = world.channel.error_of(1);
        assert!(matches!(error, Some(ExecutionError::Engine { .. })), "{error:?}");
        assert_eq!(world.channel.error_of(2), None);
    });
}

#[test]
fn a_transfer_cancelled_while_it_is_submitted_ends_once_in_either_way() {
    model(4, || {
        let world = World::new(2, 1);
        let canceller = thread::spawn({
            let world = world.clone();
            move || world.transfers[1].cancel()
        });
        world.submit(0);
        world.submit(1);
        world.channel.poll();
        canceller.join().unwrap();
        world.drain();
        assert!(is_well(&world.transfers[0]));
        match world.transfers[1].outcome() {
            Some(Ok(_)) => assert_eq!(world.story.posted(), [0, 1]),
            Some(Err(error)) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: 0 });
                assert_eq!(world.story.posted(), [0]);
            }
            None => panic!("it is over"),
        }
    });
}

#[test]
fn a_follower_launched_by_the_end_of_a_transfer_into_the_same_channel_ends() {
    model(3, || {
        let world = World::new(2, 1);
        let follower = &world.transfers[1];
        let order = ChannelBatch::one(world.channel.clone(), true, world.descriptor(1).unwrap());
        let first = std::slice::from_ref(&world.transfers[0]);
        // SAFETY: the completion has no other descriptor.
        unsafe { Dispatch::after(first, follower.clone(), vec![order]) };
        let poller = thread::spawn({
            let world = world.clone();
            move || world.channel.poll()
        });
        world.submit(0);
        world.channel.poll();
        poller.join().unwrap();
        world.drain();
        assert_eq!(world.story.posted(), [0, 1]);
        assert!(is_well(follower));
    });
}

#[test]
fn the_last_handle_of_a_channel_ends_what_it_holds() {
    model(3, || {
        let world = World::new(2, 1);
        let transfers = world.transfers.clone();
        let other = thread::spawn({
            let world = world.clone();
            move || _ = world.submit(0)
        });
        world.submit(1);
        drop(world);
        other.join().unwrap();
        assert!(transfers[..2].iter().all(|transfer| is_well(transfer)));
    });
}

#[test]
fn batches_that_meet_in_front_of_the_gate_keep_their_order_and_stay_within_the_capacity() {
    model(3, || {
        // One descriptor of four has no space.
        let world = World::new(3, 3);
        let submitters = [0, 2].map(|first| {
            let world = world.clone();
            thread::spawn(move || {
                let mut batch = [first, first + 1].map(|index| world.descriptor(index));
                let submitted = world.channel.submit(&mut batch).unwrap();
                assert!(world.channel.outstanding_bytes() <= 3);
                (submitted, first)
            })
        });
        let mut submitted = submitters.map(|thread| thread.join().unwrap());
        submitted.sort_by_key(|(submitted, _)| submitted.first);
        assert_eq!(submitted.map(|(submitted, _)| submitted.count), [2, 1]);
        let order = submitted.iter().flat_map(|(submitted, first)| *first..first + submitted.count);
        assert!(order.eq(world.story.posted()), "posted in the order of their numbers");
        assert_eq!(world.channel.statistics().full, 1);
        world.drain();
    });
}

#[test]
fn what_is_accepted_beside_a_close_is_counted_when_the_close_returns() {
    model(4, || {
        let world = World::new(2, 2);
        let submitter = thread::spawn({
            let world = world.clone();
            move || world.channel.submit(&mut [world.descriptor(0)]).is_ok()
        });
        world.channel.close();
        // A thread that closes and drains the channel may rely on this.
        let counted = world.channel.statistics().submitted;
        let is_accepted = submitter.join().unwrap();
        assert_eq!(counted, u64::from(is_accepted));
        world.drain();
    });
}
