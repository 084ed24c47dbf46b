//! The lock of a port: one thread takes it by its bias, others end the bias.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use memferry_sys::biased_mutex::BiasedLock;

use crate::model;

/// A lock and what it guards. Two threads inside are an error of the model.
struct Guarded {
    lock: BiasedLock,
    value: UnsafeCell<u32>,
}

// SAFETY: the value is accessed with the lock held, which is what the models check.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn new(streak: u32) -> Arc<Self> {
        Arc::new(Self { lock: BiasedLock::with_streak(streak), value: UnsafeCell::new(0) })
    }

    fn add(&self, thread: usize, times: u32) {
        for _ in 0..times {
            let _hold = self.lock.lock(thread);
            // SAFETY: the lock is held.
            self.value.with_mut(|value| unsafe { *value += 1 });
        }
    }

    fn try_add(&self, thread: usize) -> u32 {
        let Some(_hold) = self.lock.try_lock(thread) else { return 0 };
        // SAFETY: the lock is held.
        self.value.with_mut(|value| unsafe { *value += 1 });
        1
    }

    fn value(&self, thread: usize) -> u32 {
        let _hold = self.lock.lock(thread);
        // SAFETY: the lock is held.
        self.value.with(|value| unsafe { *value })
    }
}

#[test]
fn the_owner_of_a_bias_and_a_thread_that_ends_it_exclude_each_other() {
    model(4, || {
        let guarded = Guarded::new(1);
        guarded.add(1, 1);
        let owner = {
            let guarded = guarded.clone();
            thread::spawn(move || guarded.add(1, 2))
        };
        guarded.add(2, 2);
        owner.join().unwrap();
        assert_eq!(guarded.value(2), 5);
    });
}

#[test]
fn a_former_owner_does_not_free_the_lock_of_the_next_one() {
    model(3, || {
        let guarded = Guarded::new(1);
        guarded.add(1, 1);
        let spawn = |number: usize, times: u32| {
            let guarded = guarded.clone();
            thread::spawn(move || guarded.add(number, times))
        };
        // The second thread ends the bias of the first, has it after two more times, and takes the lock by it.
        let threads = [spawn(1, 1), spawn(2, 3)];
        guarded.add(3, 1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(guarded.value(3), 6);
    });
}

#[test]
fn a_thread_that_does_not_wait_never_enters_with_the_owner() {
    model(4, || {
        let guarded = Guarded::new(1);
        guarded.add(1, 1);
        let owner = {
            let guarded = guarded.clone();
            thread::spawn(move || guarded.add(1, 2))
        };
        let entered = guarded.try_add(2) + guarded.try_add(2);
        owner.join().unwrap();
        assert_eq!(guarded.value(2), 3 + entered);
    });
}
