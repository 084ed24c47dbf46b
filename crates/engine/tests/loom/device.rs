//! The channel of a device: submitters, pollers and whoever closes it meet in one queue. A descriptor
//! that nobody finishes shows as a sleeper that is never woken, or as a poll that finds nothing to do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use loom::thread;
use memferry_engine::completion::{Launch, Order};
use memferry_engine::contract::Notice;
use memferry_engine::device::channel::DeviceChannel;
use memferry_engine::device::hardware::{Ended, Hardware, Posted};
use memferry_engine::{
    Channel, Completion, Descriptor, ExecutionError, Operation, SubmitError, Taken,
};

use crate::model;

/// Long enough for any model.
const LONG: Duration = Duration::from_secs(600);

/// What the transfers fill: one byte each.
static BYTES: [AtomicU8; 4] = [const { AtomicU8::new(0) }; 4];

/// What the card was given, by the index of the byte, and what it may not have been given. The model
/// does not watch it: the card is used by one thread at a time.
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

/// Does what it was rung for, in order.
#[derive(Debug)]
struct Card {
    /// How much it has at a time.
    room: usize,
    posted: VecDeque<usize>,
    rung: usize,
    /// The transfer that it cannot do, and behind which it wants no other before that is over.
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

// SAFETY: it touches no memory at all.
unsafe impl Hardware for Card {
    fn post(&mut self, descriptor: &Descriptor, _: Option<Notice>) -> Posted {
        if self.posted.len() == self.room {
            return Posted::Full;
        }
        let index = (descriptor.target() - BYTES.as_ptr() as u64) as usize;
        if index > 0 && self.failing.as_ref().is_some_and(|failing| !failing.is_done()) {
            self.story.is_too_early.store(true, Ordering::Relaxed);
        }
        self.posted.push_back(index);
        self.story.posted.lock().unwrap().push(index);
        Posted::Taken
    }

    fn ring(&mut self) {
        self.rung = self.posted.len();
    }

    fn look(&mut self, ended: &mut Vec<Ended>) {
        let done = self.posted.drain(..std::mem::take(&mut self.rung));
        ended.extend(done.map(|index| match self.failing {
            Some(_) if index == 0 => Ended::Failed("it cannot do this one"),
            _ => Ended::Well,
        }));
    }
}

/// A channel, its card's story, and the completions of the transfers that it is given.
struct World {
    channel: Arc<DeviceChannel>,
    story: Arc<Story>,
    transfers: Vec<Arc<Completion>>,
}

impl World {
    /// A channel for so many descriptors, over a card that has so many at a time.
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

    /// The descriptor of a transfer, made once for each.
    fn descriptor(&self, index: usize) -> Option<Descriptor> {
        let target = BYTES[index].as_ptr() as u64;
        // SAFETY: the byte is there for ever, and only the transfer of its index touches it; tests
        // make one descriptor for each transfer.
        let fill = unsafe {
            Descriptor::new(Operation::Fill, 0, target, 1).completes(self.transfers[index].clone())
        };
        Some(fill)
    }

    fn submit(&self, index: usize) -> Taken {
        self.channel.submit(&mut [self.descriptor(index)]).unwrap()
    }

    /// Whatever number the channel has come to, the transfers up to it are over.
    fn check_numbers(&self) {
        let completed = self.channel.completed() as usize;
        let order = self.story.posted();
        for index in &order[..completed] {
            assert!(self.transfers[*index].is_done(), "counted before its end was told");
        }
    }

    /// Finishes the rest, when nobody else is here: every poll gets on.
    fn drain(&self) {
        let submitted = self.channel.statistics().submitted;
        while self.channel.completed() < submitted {
            assert!(self.channel.poll(), "something is left, and nobody is at it");
        }
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
        assert_eq!(taken.map(|(taken, _)| taken), [1, 2].map(|first| Taken { first, count: 1 }));
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
                // Closed, or not yet.
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
        // What went back was dropped by its caller, which fails it.
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
        let order = Order::one(world.channel.clone(), true, world.descriptor(1).unwrap());
        let first = std::slice::from_ref(&world.transfers[0]);
        // SAFETY: its only descriptor.
        unsafe { Launch::after(first, follower.clone(), vec![order]) };
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
