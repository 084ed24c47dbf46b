//! Threads that help the worker of a ring: no value is lost, executed twice or published early, and no
//! worker sleeps while a value of a helper waits to be published.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use memferry_engine::runtime::park::Parker;
use memferry_engine::runtime::ring::{ClaimedRun, SubmissionRing};

use crate::model;

/// A ring of numbers of counters, which whoever claims a value raises, and the parker of its worker.
struct Queue {
    ring: SubmissionRing<usize>,
    idle: Parker,
    executed: [AtomicU32; 3],
}

impl Queue {
    fn new(capacity: usize) -> Arc<Self> {
        let executed = std::array::from_fn(|_| AtomicU32::new(0));
        Arc::new(Self { ring: SubmissionRing::new(capacity), idle: Parker::new(), executed })
    }

    fn submit(&self, counter: usize, shared: bool) -> bool {
        let taken = self.ring.push_one(counter, shared, &mut 0).is_ok();
        self.idle.unpark();
        taken
    }

    fn close(&self) {
        self.ring.close();
        self.idle.unpark();
    }

    fn execute(&self, sequence: u64) {
        // SAFETY: the caller has claimed the sequence, and takes it once.
        let counter = unsafe { self.ring.take_claimed(sequence) };
        self.executed[counter].fetch_add(1, Ordering::Relaxed);
    }

    /// What a waiting thread does, once.
    fn help(&self) {
        let Some(ClaimedRun { first, count }) = self.ring.claim_shared() else { return };
        for sequence in first..first + count {
            self.execute(sequence);
            // SAFETY: claimed and finished by this thread.
            unsafe { self.ring.finish_claimed(sequence, 1) };
            assert!(self.ring.is_finished(sequence));
        }
        self.ring.publish_lent();
        self.idle.unpark();
    }

    /// A long step of the worker: it waits until all sequences up to one are published by others.
    fn wait_during_loan(&self, sequence: u64) {
        self.ring.lend_publishing();
        self.ring.publish_lent();
        while self.ring.completed() < sequence {
            thread::yield_now();
        }
        self.ring.end_loan();
    }

    /// The loop of a channel's thread, without spinning: it runs until the ring is closed and empty.
    fn work(&self) {
        let ring = &self.ring;
        loop {
            while let Some(ClaimedRun { first, count }) = ring.claim() {
                for sequence in first..first + count {
                    self.execute(sequence);
                    // SAFETY: this is the worker, which has claimed and finished it.
                    unsafe { ring.finish(sequence, 1) };
                }
            }
            let drained = || ring.is_closed() && ring.submitted() == ring.completed();
            if drained() {
                return;
            }
            let ready = || ring.has_unclaimed() || ring.has_publishable() || drained();
            self.idle.park(None, ready);
            // SAFETY: this is the worker.
            unsafe { ring.publish_finished() };
        }
    }

    /// Checks that the first values were executed once each, and everything was published.
    fn check(&self, submitted: usize) {
        for (counter, executed) in self.executed.iter().enumerate() {
            assert_eq!(executed.load(Ordering::Relaxed), u32::from(counter < submitted));
        }
        let all = submitted as u64;
        assert_eq!((self.ring.completed(), self.ring.finished_weight()), (all, all));
    }
}

/// A worker, and a thread that submits values, helps with them, and closes.
fn submitter_helps(capacity: usize, values: usize, helps: usize, shared: fn(usize) -> bool) {
    let queue = Queue::new(capacity);
    let worker = thread::spawn({
        let queue = queue.clone();
        move || queue.work()
    });
    let submitted = (0..values).take_while(|&value| queue.submit(value, shared(value))).count();
    (0..helps).for_each(|_| queue.help());
    queue.close();
    worker.join().unwrap();
    queue.check(submitted);
}

#[test]
fn a_value_is_executed_by_the_worker_or_by_the_thread_that_waits_for_it() {
    model(4, || submitter_helps(2, 1, 1, |_| true));
}

#[test]
fn values_that_finish_out_of_order_are_published_in_order() {
    model(3, || submitter_helps(2, 2, 2, |_| true));
}

#[test]
fn a_value_that_is_not_shared_is_the_workers() {
    model(3, || submitter_helps(2, 2, 2, |value| value == 1));
}

#[test]
fn a_slot_whose_value_another_thread_executes_is_not_reused_before_it_is_published() {
    model(3, || submitter_helps(1, 3, 1, |_| true));
}

#[test]
fn two_threads_that_help_execute_no_value_twice() {
    model(2, || {
        let queue = Queue::new(2);
        assert!(queue.submit(0, true) && queue.submit(1, true));
        let others = [0, 1].map(|_| {
            let queue = queue.clone();
            thread::spawn(move || queue.help())
        });
        queue.close();
        queue.work();
        others.into_iter().for_each(|thread| thread.join().unwrap());
        queue.check(2);
    });
}

#[test]
fn a_thread_that_sees_its_value_finished_sees_what_was_written() {
    model(3, || {
        let queue = Queue::new(2);
        let helper = thread::spawn({
            let queue = queue.clone();
            move || queue.help()
        });
        assert!(queue.submit(0, true));
        if queue.ring.is_finished(1) {
            assert_eq!(queue.executed[0].load(Ordering::Relaxed), 1);
        }
        queue.close();
        queue.work();
        helper.join().unwrap();
        queue.check(1);
    });
}

#[test]
fn code_of_the_user_on_the_worker_may_wait_for_what_another_thread_executes() {
    model(3, || {
        let queue = Queue::new(4);
        assert!(queue.submit(0, true) && queue.submit(1, true));
        let first = queue.ring.claim_shared().expect("it was submitted");
        assert_eq!((first.first, first.count), (1, 1));
        let helper = thread::spawn({
            let queue = queue.clone();
            move || {
                queue.execute(1);
                // SAFETY: claimed on behalf of this thread, and finished by it.
                unsafe { queue.ring.finish_claimed(1, 1) };
                queue.ring.publish_lent();
                queue.idle.unpark();
            }
        });
        // The worker has claimed the second value, whose end waits for the first.
        let second = queue.ring.claim().expect("it was submitted");
        assert_eq!((second.first, second.count), (2, 1));
        queue.execute(2);
        queue.wait_during_loan(1);
        // SAFETY: this is the worker, which has claimed and finished it.
        unsafe { queue.ring.finish(2, 1) };
        helper.join().unwrap();
        queue.check(2);
    });
}

#[test]
fn two_threads_that_finish_during_a_loan_leave_nothing_unpublished() {
    model(3, || {
        let queue = Queue::new(4);
        assert!((0..3).all(|value| queue.submit(value, true)));
        let others: Vec<_> = (1..=2)
            .map(|sequence| {
                queue.ring.claim_shared().expect("it was submitted");
                let queue = queue.clone();
                thread::spawn(move || {
                    queue.execute(sequence);
                    // SAFETY: claimed on behalf of this thread, and finished by it.
                    unsafe { queue.ring.finish_claimed(sequence, 1) };
                    queue.ring.publish_lent();
                })
            })
            .collect();
        queue.ring.claim().expect("it was submitted");
        queue.execute(3);
        queue.wait_during_loan(2);
        // SAFETY: this is the worker, which has claimed and finished it.
        unsafe { queue.ring.finish(3, 1) };
        others.into_iter().for_each(|thread| thread.join().unwrap());
        queue.check(3);
    });
}
