//! Wake-ups that sleepers pass on. A call that is lost leaves a thread asleep for ever, which loom
//! reports as a deadlock.

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use memferry_engine::runtime::wake_chain::{ChainedParker, WakeChain};

use crate::model;

/// A thread that sleeps until it has something to do.
struct Sleeper {
    parker: ChainedParker,
    has_work: AtomicBool,
}

impl Sleeper {
    /// Sleepers of one chain.
    fn several<const COUNT: usize>() -> [Arc<Self>; COUNT] {
        let chain = Arc::new(WakeChain::with_stall(u64::MAX));
        let sleeper = |_| Self { parker: chain.join(), has_work: AtomicBool::new(false) };
        std::array::from_fn(sleeper).map(Arc::new)
    }

    fn take(&self) -> bool {
        self.has_work.load(Ordering::Acquire)
    }

    fn run(&self) {
        while !self.take() {
            self.parker.park(None, || self.take());
        }
    }

    fn submit(&self) {
        self.has_work.store(true, Ordering::Release);
        self.parker.call();
    }
}

fn start(sleepers: &[Arc<Sleeper>]) -> Vec<thread::JoinHandle<()>> {
    let start = |sleeper: Arc<Sleeper>| thread::spawn(move || sleeper.run());
    sleepers.iter().cloned().map(start).collect()
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn everybody_who_is_called_by_one_thread_wakes_up() {
    model(3, || {
        let sleepers = Sleeper::several::<2>();
        let threads = start(&sleepers);
        sleepers.iter().for_each(|sleeper| sleeper.submit());
        join(threads);
    });
}

#[test]
fn a_sleeper_that_is_woken_by_another_wakes_the_next() {
    model(1, || {
        let sleepers = Sleeper::several::<3>();
        let threads = start(&sleepers);
        sleepers.iter().for_each(|sleeper| sleeper.submit());
        join(threads);
    });
}

#[test]
fn everybody_who_is_called_by_different_threads_wakes_up() {
    model(2, || {
        let sleepers = Sleeper::several::<2>();
        let mut threads = start(&sleepers);
        let last = sleepers[1].clone();
        threads.push(thread::spawn(move || last.submit()));
        sleepers[0].submit();
        join(threads);
    });
}

#[test]
fn a_sleeper_that_sleeps_again_is_called_again() {
    model(2, || {
        let [first, second] = Sleeper::several::<2>();
        let second_thread = thread::spawn({
            let second = second.clone();
            move || second.run()
        });
        let first_thread = thread::spawn({
            let first = first.clone();
            move || {
                first.run();
                first.has_work.store(false, Ordering::Relaxed);
                first.run();
            }
        });
        first.submit();
        second.submit();
        // The first one has taken its work before it gets more.
        while first.take() {
            thread::yield_now();
        }
        first.submit();
        first_thread.join().unwrap();
        second_thread.join().unwrap();
    });
}

#[test]
fn one_who_waits_for_a_sleeper_wakes_it_whoever_has_called_it() {
    model(3, || {
        let [first, second] = Sleeper::several::<2>();
        let is_over = Arc::new(AtomicBool::new(false));
        // The first one is about to sleep until the other is over: it does not pass on what it has to.
        let held = thread::spawn({
            let (first, is_over) = (first.clone(), is_over.clone());
            let wait = move || {
                while !is_over.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                true
            };
            move || first.parker.park(None, wait)
        });
        let threads = start(std::slice::from_ref(&second));
        while !first.parker.is_asleep() {
            thread::yield_now();
        }
        assert!(first.parker.call());
        second.submit();
        second.parker.wake_called();
        join(threads);
        is_over.store(true, Ordering::Release);
        held.join().unwrap();
    });
}
