//! Waiting for a sequence of a channel. A waiter that is added while the sequence is published is
//! notified by the channel, or observes the sequence. A missed waiter shows as a deadlock.

use std::task::{Wake, Waker};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use memferry_engine::Completion;
use memferry_engine::completion::Waiters;
use memferry_engine::runtime::park::Parker;

use crate::model;

/// The parts of a channel that concern sequences: the published sequence, the waiters, and the
/// parker.
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

    /// Publishes a sequence as a channel does, without sleeping.
    fn publish(&self, number: u64) {
        self.data.fetch_add(1, Ordering::Relaxed);
        self.completed.store(number, Ordering::Release);
        self.waiters.notify(number);
    }

    fn completion_of(&self, number: u64) -> std::sync::Arc<Completion> {
        self.waiters.completion_of(number, || self.completed())
    }

    /// Waits for a sequence by a completion, and checks the data that was written before it.
    fn wait_for(&self, number: u64) {
        let completion = self.completion_of(number);
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
        // The fenced check that precedes a sleep, which may last for ever.
        numbers.waiters.notify_fenced(1);
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
        numbers.waiters.notify_fenced(2);
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
        numbers.waiters.notify_fenced(1);
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
                // The channel gets more work only from a waiter that was notified.
                numbers.completed.fetch_add(0, Ordering::AcqRel);
                numbers.data.store(100, Ordering::Release);
                numbers.idle.unpark();
            }
        });
        numbers.publish(1);
        numbers.waiters.notify_fenced(1);
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
                let completion = numbers.completion_of(2);
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

#[test]
fn two_waiters_that_come_while_the_channel_ends_are_told_what_became_of_their_numbers() {
    model(2, || {
        let numbers = Numbers::new();
        let waiting = [1, 2].map(|number| {
            let numbers = numbers.clone();
            thread::spawn(move || {
                let completion = numbers.completion_of(number);
                assert!(completion.wait(0, None));
                assert_eq!(completion.outcome().unwrap().is_ok(), number == 1);
            })
        });
        numbers.publish(1);
        numbers.waiters.close(1);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn one_who_waits_no_more_keeps_nobody_else_from_being_told() {
    model(2, || {
        let numbers = Numbers::new();
        let given_up = thread::spawn({
            let numbers = numbers.clone();
            move || numbers.completion_of(1).cancel()
        });
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || numbers.wait_for(1)
        });
        numbers.publish(1);
        numbers.waiters.notify_fenced(1);
        given_up.join().unwrap();
        waiting.join().unwrap();
        assert!(matches!(numbers.completion_of(1).outcome(), Some(Ok(_))));
    });
}

/// Counts its wakeups.
struct Count(AtomicU64);

impl Wake for Count {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_future_that_comes_while_its_number_is_published_is_woken_once_or_sees_the_end() {
    model(3, || {
        let numbers = Numbers::new();
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || {
                let count = std::sync::Arc::new(Count(AtomicU64::new(0)));
                let completion = numbers.completion_of(1);
                let key = completion.wake_on_completion(None, &Waker::from(count.clone()));
                (count, key.is_some())
            }
        });
        numbers.publish(1);
        numbers.waiters.notify_fenced(1);
        let (count, is_watched) = waiting.join().unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), u64::from(is_watched));
    });
}

/// A value that, when it is dropped by the completion of one sequence, waits for another sequence.
struct Next(Arc<Numbers>, u64);

impl std::fmt::Debug for Next {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Next").field(&self.1).finish()
    }
}

impl Drop for Next {
    fn drop(&mut self) {
        let next = self.0.completion_of(self.1);
        let _ = next.keep_alive(Told(self.0.clone()));
    }
}

/// A value that records its drop, which is the notification.
struct Told(Arc<Numbers>);

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Told")
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.0.data.fetch_add(100, Ordering::Relaxed);
    }
}

#[test]
fn the_end_of_one_number_that_asks_for_the_next_is_told_of_it() {
    model(3, || {
        let numbers = Numbers::new();
        let waiting = thread::spawn({
            let numbers = numbers.clone();
            move || drop(numbers.completion_of(1).keep_alive(Next(numbers.clone(), 2)))
        });
        numbers.publish(1);
        numbers.publish(2);
        numbers.waiters.notify_fenced(2);
        waiting.join().unwrap();
        assert_eq!(numbers.data.load(Ordering::Relaxed), 102);
    });
}
