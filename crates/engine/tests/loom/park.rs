//! Sleeping and waking. A thread that sleeps although there is work sleeps for ever, which loom reports as a
//! deadlock.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use memferry_engine::runtime::park::{Parker, WaitQueue};
use memferry_engine::runtime::ring::SubmissionRing;

use crate::model;

/// A ring, and the parker of its consumer.
struct Queue {
    ring: SubmissionRing<u32>,
    idle: Parker,
}

impl Queue {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { ring: SubmissionRing::new(capacity), idle: Parker::new() })
    }

    fn submit(&self, value: u32) {
        assert_eq!(self.ring.push(&mut [Some(value)]).unwrap().count, 1);
        self.idle.unpark();
    }

    fn close(&self) {
        self.ring.close();
        self.idle.unpark();
    }

    /// The loop of a channel's thread, without spinning: it runs until the ring is closed and empty.
    fn consume(&self) -> Vec<u32> {
        let (mut finished, mut values) = (0, Vec::new());
        loop {
            // SAFETY: this is the only consumer, and it takes each number once.
            while let Some(value) = unsafe { self.ring.take(finished) } {
                finished += 1;
                values.push(value);
                // SAFETY: this thread is the only consumer and has taken everything up to the number.
                unsafe { self.ring.complete(finished, 1) };
            }
            let over = || self.ring.is_closed() && self.ring.submitted() == finished;
            if over() {
                return values;
            }
            self.idle.park(None, || self.ring.has_next(finished) || over());
        }
    }
}

#[test]
fn a_submitter_wakes_the_channel_it_finds_asleep() {
    model(4, || {
        let queue = Queue::new(2);
        let submitter = thread::spawn({
            let queue = queue.clone();
            move || {
                queue.submit(1);
                queue.submit(2);
                queue.close();
            }
        });
        assert_eq!(queue.consume(), [1, 2]);
        submitter.join().unwrap();
    });
}

#[test]
fn two_submitters_cannot_both_leave_the_waking_to_the_other() {
    model(3, || {
        let queue = Queue::new(2);
        let submitters = [1, 2].map(|value| {
            let queue = queue.clone();
            thread::spawn(move || queue.submit(value))
        });
        let (mut finished, mut sum) = (0, 0);
        while finished < 2 {
            // SAFETY: this is the only consumer, and it takes each number once.
            match unsafe { queue.ring.take(finished) } {
                Some(value) => {
                    finished += 1;
                    sum += value;
                    // SAFETY: this thread is the only consumer and has taken everything up to the number.
                    unsafe { queue.ring.complete(finished, 1) };
                }
                None => _ = queue.idle.park(None, || queue.ring.has_next(finished)),
            }
        }
        assert_eq!(sum, 3);
        submitters.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_close_from_elsewhere_wakes_the_channel_for_the_last_time() {
    model(3, || {
        let queue = Queue::new(1);
        let submitter = thread::spawn({
            let queue = queue.clone();
            move || {
                let taken = queue.ring.push(&mut [Some(1)]).map_or(0, |taken| taken.count);
                queue.idle.unpark();
                taken
            }
        });
        let closer = thread::spawn({
            let queue = queue.clone();
            move || queue.close()
        });
        let values = queue.consume();
        closer.join().unwrap();
        assert_eq!(submitter.join().unwrap(), values.len());
    });
}

/// A rising number, and the threads that wait for it.
struct Rising {
    number: AtomicU64,
    waiters: WaitQueue,
}

impl Rising {
    fn wait_for(&self, wanted: u64) {
        let reached = || self.number.load(Ordering::Acquire) >= wanted;
        while !reached() {
            self.waiters.park(None, reached);
        }
    }

    fn rise_to(&self, number: u64) {
        self.number.store(number, Ordering::Release);
        self.waiters.unpark();
    }
}

#[test]
fn everybody_in_a_crowd_is_woken_when_their_number_comes() {
    model(3, || {
        let rising = Arc::new(Rising { number: AtomicU64::new(0), waiters: WaitQueue::new() });
        let sleepers = [1, 2].map(|wanted| {
            let rising = rising.clone();
            thread::spawn(move || rising.wait_for(wanted))
        });
        rising.rise_to(1);
        rising.rise_to(2);
        sleepers.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
