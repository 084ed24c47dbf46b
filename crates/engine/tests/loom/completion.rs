//! The completion: it happens once, and every kind of listener observes it.

use std::sync::Arc;
use std::task::{Wake, Waker};

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use memferry_engine::completion::WakerKey;
use memferry_engine::{Completion, ExecutionError};

use crate::{empty, model};

/// Completes a transfer with success, as a channel does.
fn finish(completion: &Arc<Completion>) {
    empty(completion).run();
}

/// Completes a transfer with a failure.
fn abandon(completion: &Arc<Completion>) {
    drop(empty(completion));
}

/// A value that an engine writes before completion and a user reads after it.
struct Transfer {
    completion: Arc<Completion>,
    data: AtomicU32,
}

impl Transfer {
    fn new() -> Arc<Self> {
        Arc::new(Self { completion: Arc::new(Completion::whole()), data: AtomicU32::new(0) })
    }

    fn carry_out(&self) {
        self.data.store(7, Ordering::Relaxed);
        finish(&self.completion);
    }

    fn wait(&self) {
        assert!(self.completion.wait(0, None));
        assert_eq!(self.data.load(Ordering::Relaxed), 7, "the end comes after the data");
    }

    fn watch(&self, key: Option<WakerKey>, count: &Arc<Count>) -> Option<WakerKey> {
        self.completion.wake_on_completion(key, &Waker::from(count.clone()))
    }
}

#[test]
fn two_sleepers_wake_at_the_end_and_see_the_data() {
    model(3, || {
        let transfer = Transfer::new();
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        let other = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.wait()
        });
        transfer.wait();
        engine.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_watcher_or_a_cancellation_that_changes_the_word_does_not_lose_the_sleeper() {
    model(3, || {
        let transfer = Transfer::new();
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        let busybody = thread::spawn({
            let transfer = transfer.clone();
            move || {
                transfer.completion.wake_on_completion(None, Waker::noop());
                transfer.completion.cancel();
            }
        });
        transfer.wait();
        engine.join().unwrap();
        busybody.join().unwrap();
        assert!(matches!(transfer.completion.outcome(), Some(Ok(_))));
    });
}

#[test]
fn a_failure_is_there_to_be_read_when_the_end_is_seen() {
    model(4, || {
        let completion = Arc::new(Completion::whole());
        let engine = thread::spawn({
            let completion = completion.clone();
            move || abandon(&completion)
        });
        while !completion.is_done() {
            thread::yield_now();
        }
        let outcome = completion.outcome();
        assert!(matches!(outcome, Some(Err(ExecutionError::Engine { done_bytes: 0, .. }))));
        engine.join().unwrap();
    });
}

/// Counts its wakeups.
struct Count(AtomicU32);

impl Count {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU32::new(0)))
    }

    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_waker_is_woken_once_or_told_that_the_transfer_is_over() {
    model(4, || {
        let transfer = Transfer::new();
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        let count = Count::new();
        let added = transfer.watch(None, &count).is_some();
        if !added {
            assert!(transfer.completion.is_done());
            assert_eq!(transfer.data.load(Ordering::Relaxed), 7);
        }
        engine.join().unwrap();
        assert_eq!(count.get(), u32::from(added));
    });
}

#[test]
fn of_two_wakers_each_is_woken_once_unless_it_came_late() {
    model(3, || {
        let transfer = Transfer::new();
        let counts = [Count::new(), Count::new()];
        assert!(transfer.watch(None, &counts[0]).is_some());
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        let added = transfer.watch(None, &counts[1]).is_some();
        engine.join().unwrap();
        let woken = counts.map(|count| count.get());
        assert_eq!(woken, [1, u32::from(added)]);
    });
}

#[test]
fn a_waker_that_is_forgotten_is_dropped_and_takes_no_other_with_it() {
    model(3, || {
        let transfer = Transfer::new();
        let [gone, kept, next] = [(); 3].map(|()| Count::new());
        let key = transfer.watch(None, &gone).expect("nothing has started");
        assert!(transfer.watch(None, &kept).is_some());
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        transfer.completion.forget_waker(key);
        // Into the slot that is free now.
        let added = transfer.watch(None, &next).is_some();
        engine.join().unwrap();
        assert_eq!([kept.get(), next.get()], [1, u32::from(added)]);
        assert!(gone.get() <= 1);
        assert_eq!([gone, kept, next].map(|count| Arc::strong_count(&count)), [1; 3]);
    });
}

/// Counts its drops.
#[derive(Debug)]
struct Kept(Arc<AtomicU32>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn what_is_kept_is_dropped_once_after_the_end_or_given_back() {
    model(4, || {
        let transfer = Transfer::new();
        let engine = thread::spawn({
            let transfer = transfer.clone();
            move || transfer.carry_out()
        });
        let dropped = Arc::new(AtomicU32::new(0));
        match transfer.completion.keep_alive(Kept(dropped.clone())) {
            Ok(()) => {}
            Err(back) => {
                assert!(transfer.completion.is_done());
                drop(back);
            }
        }
        engine.join().unwrap();
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
    });
}
