//! Waiting for a number of a channel: whoever comes while the number is published is told by the
//! channel, or sees the number. One who is missed shows as a deadlock.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use memferry_engine::completion::Waiters;
use memferry_engine::cpu::park::Parker;

use crate::model;

/// A channel as far as numbers go: what it has published, who waits, where it sleeps.
struct Numbers {
    completed: AtomicU64,
    waiters: Waiters,
    data: AtomicU64,
    idle: Parker,
}

impl Numbers {
    fn new() -> Arc<Self> {
        let (completed, data) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { completed, waiters: Waiters::new(), data, idle: Parker::new() })
    }

    fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// As a channel does it, without sleeping.
    fn publish(&self, number: u64) {
        self.data.fetch_add(1, Ordering::Relaxed);
        self.completed.store(number, Ordering::Release);
        self.waiters.tell(number);
    }

    /// Waits for a number by a completion, and looks at what was written before.
    fn wait_for(&self, number: u64) {
        let completion = self.waiters.completion_of(number, || self.completed());
        assert!(completion.wait(0, None));
        assert!(matches!(completion.outcome(), Some(Ok(_))));
        assert!(self.data.load(Ordering::Relaxed) >= number, "told before the data was there");
    }
}

#[test]
fn a_waiter_that_comes_while_its_number_is_published_is_not_missed() {
    model(3, || {
        let numbers = Numbers::new();
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || numbers.wait_for(1)
        });
        numbers.publish(1);
        // Before it sleeps, for ever perhaps.
        numbers.waiters.tell_surely(1);
        waiting.join().unwrap();
    });
}

#[test]
fn two_waiters_for_two_numbers_are_both_told() {
    model(2, || {
        let numbers = Numbers::new();
        let waiting = [2, 1].map(|number| {
            let numbers = numbers.clone();
            thread::spawn(move || numbers.wait_for(number))
        });
        numbers.publish(1);
        numbers.publish(2);
        numbers.waiters.tell_surely(2);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_waiters_for_one_number_share_a_completion_and_are_both_told() {
    model(2, || {
        let numbers = Numbers::new();
        let waiting = [1, 1].map(|number| {
            let numbers = numbers.clone();
            thread::spawn(move || numbers.wait_for(number))
        });
        numbers.publish(1);
        numbers.waiters.tell_surely(1);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_channel_that_sleeps_has_told_everybody() {
    model(2, || {
        let numbers = Numbers::new();
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || {
                numbers.wait_for(1);
                // Only one who was told gives the channel more to do.
                numbers.completed.fetch_add(0, Ordering::AcqRel);
                numbers.data.store(100, Ordering::Release);
                numbers.idle.unpark();
            }
        });
        numbers.publish(1);
        numbers.waiters.tell_surely(1);
        while numbers.data.load(Ordering::Acquire) != 100 {
            numbers.idle.park(None, || numbers.data.load(Ordering::Acquire) == 100);
        }
        waiting.join().unwrap();
    });
}

#[test]
fn a_waiter_that_comes_while_the_channel_ends_is_told() {
    model(3, || {
        let numbers = Numbers::new();
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || {
                let completion = numbers.waiters.completion_of(2, || numbers.completed());
                assert!(completion.wait(0, None));
                assert!(completion.outcome().unwrap().is_err(), "its number never came");
                numbers.wait_for(1);
            }
        });
        numbers.publish(1);
        numbers.waiters.close(1);
        waiting.join().unwrap();
    });
}
