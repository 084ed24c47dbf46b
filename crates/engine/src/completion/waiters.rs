//! Those who wait for a number of a channel.
//!
//! What is kept of a small transfer is its number. Whoever wants more than to compare it, such as to be
//! woken, signalled or ordered behind it, gets a completion for it from here. Nothing is submitted for
//! that, and nobody waits: the list holds at most one completion for each descriptor of the ring.
//!
//! A channel publishes a number, then asks whether the lowest number that is awaited is reached: one
//! load, while nobody waits. Whoever waits puts its number into the list, then asks whether the channel
//! is there already. With a fence between the two steps on both sides, at least one of them sees the
//! other. On the channel's side the fence is not paid for each number: a channel asks once more, with a
//! fence, before it does anything that takes long, above all before it sleeps
//! ([`Waiters::tell_surely`]).
//!
//! Ending a completion runs the user's code: never with the lock held.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};
use memferry_sys::sync::{Mutex, lock};

use super::Completion;
use crate::contract::{ExecutionError, Sequence};

/// Nobody waits.
const NONE: Sequence = Sequence::MAX;

/// The completions of numbers that a channel has not come to.
#[derive(Debug)]
pub struct Waiters {
    /// The lowest number in the list, or [`NONE`]. Written with the lock held.
    lowest: AtomicU64,
    list: Mutex<List>,
}

#[derive(Debug)]
struct List {
    /// Rising numbers.
    awaited: VecDeque<(Sequence, Arc<Completion>)>,
    /// The channel has ended: it asks no more.
    closed: bool,
}

impl Waiters {
    /// Nobody waits.
    pub fn new() -> Self {
        let list = List { awaited: VecDeque::new(), closed: false };
        Self { lowest: AtomicU64::new(NONE), list: Mutex::new(list) }
    }

    /// A completion that ends when the channel has come to a number. `completed` is how far it is.
    /// Does not wait, for the channel or for anybody who runs the user's code.
    pub fn completion_of(
        &self,
        sequence: Sequence,
        completed: impl Fn() -> Sequence,
    ) -> Arc<Completion> {
        if completed() >= sequence {
            return Arc::new(Completion::over());
        }
        let mut list = lock(&self.list);
        let at = match list.awaited.binary_search_by_key(&sequence, |(number, _)| *number) {
            Ok(at) => return list.awaited[at].1.clone(),
            Err(at) => at,
        };
        if !list.closed {
            let completion = Arc::new(Completion::whole());
            list.awaited.insert(at, (sequence, completion.clone()));
            self.publish_lowest(&list);
            // Pairs with the fence of `tell_surely`: either the channel sees the number in the list,
            // or the number that it published is seen here.
            fence(Ordering::SeqCst);
            if completed() < sequence {
                return completion;
            }
            // Still in the list: the lock was held since it was put there.
            list.awaited.remove(at);
            self.publish_lowest(&list);
        }
        drop(list);
        Arc::new(if completed() >= sequence {
            Completion::over()
        } else {
            Completion::refused(never_reached())
        })
    }

    /// Ends the completions of all numbers up to `completed`, which the channel has published. Misses
    /// those who come at this very moment: see [`Waiters::tell_surely`].
    #[inline]
    pub fn tell(&self, completed: Sequence) {
        if self.lowest.load(Ordering::Relaxed) <= completed {
            self.tell_reached(completed);
        }
    }

    /// The same, and misses nobody. For a channel that will not publish another number soon.
    pub fn tell_surely(&self, completed: Sequence) {
        fence(Ordering::SeqCst);
        self.tell(completed);
    }

    #[cold]
    fn tell_reached(&self, completed: Sequence) {
        while let Some(completion) = self.take_first(completed) {
            completion.finish_quietly();
        }
    }

    /// Takes the completion of the lowest number out of the list, if it is at most `limit`.
    fn take_first(&self, limit: Sequence) -> Option<Arc<Completion>> {
        let mut list = lock(&self.list);
        if list.awaited.front()?.0 > limit {
            return None;
        }
        let (_, completion) = list.awaited.pop_front()?;
        self.publish_lowest(&list);
        Some(completion)
    }

    /// The channel has ended, and will come to no further number: ends all completions, well if their
    /// number is reached.
    pub fn close(&self, completed: Sequence) {
        lock(&self.list).closed = true;
        self.tell_surely(completed);
        while let Some(completion) = self.take_first(NONE) {
            completion.refuse(never_reached());
        }
    }

    fn publish_lowest(&self, list: &List) {
        let lowest = list.awaited.front().map_or(NONE, |(number, _)| *number);
        self.lowest.store(lowest, Ordering::Relaxed);
    }
}

fn never_reached() -> ExecutionError {
    let reason = "the channel ended before it came to this number";
    ExecutionError::Engine { done_bytes: 0, reason }
}

impl Default for Waiters {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn completions_end_when_their_number_is_reached_and_in_its_order() {
        let (waiters, reached) = (Waiters::new(), Cell::new(0));
        let completion_of = |number| waiters.completion_of(number, || reached.get());
        let [third, first, second] = [3, 1, 2].map(completion_of);
        assert!(Arc::ptr_eq(&second, &completion_of(2)), "one for each number");
        waiters.tell(0);
        assert!(!first.is_done());
        reached.set(2);
        waiters.tell(2);
        assert_eq!([&first, &second, &third].map(|c| c.is_done()), [true, true, false]);
        assert!(completion_of(1).is_done(), "one that comes late");
        waiters.tell_surely(3);
        assert!(third.is_done());
        assert_eq!(waiters.lowest.load(Ordering::Relaxed), NONE);
    }

    #[test]
    fn the_end_of_the_channel_ends_everybody() {
        let waiters = Waiters::new();
        let [well, badly] = [1, 2].map(|number| waiters.completion_of(number, || 0));
        waiters.close(1);
        assert!(matches!(well.outcome(), Some(Ok(_))));
        assert!(matches!(badly.outcome(), Some(Err(ExecutionError::Engine { .. }))));
        let late = waiters.completion_of(2, || 1);
        assert!(matches!(late.outcome(), Some(Err(ExecutionError::Engine { .. }))));
        assert!(matches!(waiters.completion_of(1, || 1).outcome(), Some(Ok(_))));
    }

    #[test]
    fn a_completion_whose_end_asks_for_others_meets_no_lock() {
        #[derive(Debug)]
        struct Asks(Arc<Waiters>);
        impl Drop for Asks {
            fn drop(&mut self) {
                assert!(self.0.completion_of(1, || 1).is_done());
                assert!(!self.0.completion_of(5, || 1).is_done());
                self.0.tell_surely(1);
            }
        }
        let waiters = Arc::new(Waiters::new());
        let completion = waiters.completion_of(1, || 0);
        completion.keep_until_end(Asks(waiters.clone())).unwrap();
        waiters.tell(1);
        assert!(completion.is_done());
        assert_eq!(waiters.lowest.load(Ordering::Relaxed), 5);
    }
}
