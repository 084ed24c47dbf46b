//! Waiters for a sequence of a channel.
//!
//! The whole state of a small transfer is its sequence. A user that needs more than to compare it,
//! such as a wakeup, a signal or an ordering, gets a completion for the sequence from this list.
//! That submits nothing and blocks no thread: the list contains at most one completion for each
//! descriptor of the ring.
//!
//! A channel publishes a sequence, then reads the lowest awaited sequence: one load while the list
//! is empty. A waiter adds its sequence to the list, then reads the channel's published sequence. A
//! fence separates the two steps on both sides, so at least one side observes the other. The
//! channel does not execute the fence for each sequence: it checks once more, with a fence, before
//! any long step, above all before it sleeps ([`Waiters::notify_fenced`]).
//!
//! Finishing a completion runs user code, so it never happens under the lock.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};
use memferry_sys::sync::{Mutex, lock};

use super::Completion;
use crate::contract::{ExecutionError, Sequence};

/// No sequence is awaited.
const NONE: Sequence = Sequence::MAX;

/// The completions of sequences that a channel has not reached.
#[derive(Debug)]
pub struct Waiters {
    /// The lowest sequence in the list, or [`NONE`]. Written under the lock.
    lowest: AtomicU64,
    queue: Mutex<WaiterQueue>,
}

#[derive(Debug)]
struct WaiterQueue {
    /// In rising order of sequences.
    awaited: VecDeque<(Sequence, Arc<Completion>)>,
    /// The channel has ended and checks the list no more.
    closed: bool,
}

impl Waiters {
    /// Creates an empty list.
    pub fn new() -> Self {
        let queue = WaiterQueue { awaited: VecDeque::new(), closed: false };
        Self { lowest: AtomicU64::new(NONE), queue: Mutex::new(queue) }
    }

    /// A completion that completes when the channel reaches a sequence. `completed` returns the
    /// channel's last sequence. The call blocks neither on the channel nor on a thread that runs
    /// user code.
    pub fn completion_of(
        &self,
        sequence: Sequence,
        completed: impl Fn() -> Sequence,
    ) -> Arc<Completion> {
        if completed() >= sequence {
            return Arc::new(Completion::done());
        }
        let mut queue = lock(&self.queue);
        let at = match queue.awaited.binary_search_by_key(&sequence, |(number, _)| *number) {
            Ok(at) => return queue.awaited[at].1.clone(),
            Err(at) => at,
        };
        if !queue.closed {
            let completion = Arc::new(Completion::whole());
            queue.awaited.insert(at, (sequence, completion.clone()));
            self.publish_lowest(&queue);
            // Pairs with the fence of `notify_fenced`: either the channel sees the sequence in the
            // list, or this thread sees the sequence that the channel published.
            fence(Ordering::SeqCst);
            if completed() < sequence {
                return completion;
            }
            // The entry is still at this index: this thread has held the lock since it inserted it.
            queue.awaited.remove(at);
            self.publish_lowest(&queue);
        }
        drop(queue);
        Arc::new(if completed() >= sequence {
            Completion::done()
        } else {
            Completion::failed(never_reached())
        })
    }

    /// Finishes the completions of all sequences up to `completed`, which the channel has
    /// published. May miss a waiter that adds itself concurrently: see [`Waiters::notify_fenced`].
    #[inline]
    pub fn notify(&self, completed: Sequence) {
        if self.lowest.load(Ordering::Relaxed) <= completed {
            self.complete_reached(completed);
        }
    }

    /// Like [`Waiters::notify`], and misses no waiter. For a channel that will not publish another
    /// sequence soon.
    pub fn notify_fenced(&self, completed: Sequence) {
        fence(Ordering::SeqCst);
        self.notify(completed);
    }

    #[cold]
    fn complete_reached(&self, completed: Sequence) {
        while let Some(completion) = self.take_first(completed) {
            completion.finish_unlistened();
        }
    }

    /// Removes the completion of the lowest sequence, if the sequence is at most `limit`.
    fn take_first(&self, limit: Sequence) -> Option<Arc<Completion>> {
        let mut queue = lock(&self.queue);
        if queue.awaited.front()?.0 > limit {
            return None;
        }
        let (_, completion) = queue.awaited.pop_front()?;
        self.publish_lowest(&queue);
        Some(completion)
    }

    /// Finishes all completions, because the channel has ended: those of reached sequences succeed,
    /// the others fail.
    pub fn close(&self, completed: Sequence) {
        lock(&self.queue).closed = true;
        self.notify_fenced(completed);
        while let Some(completion) = self.take_first(NONE) {
            completion.fail_unstarted(never_reached());
        }
    }

    fn publish_lowest(&self, queue: &WaiterQueue) {
        let lowest = queue.awaited.front().map_or(NONE, |(number, _)| *number);
        self.lowest.store(lowest, Ordering::Relaxed);
    }
}

fn never_reached() -> ExecutionError {
    let reason = "the channel ended before it reached this sequence";
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
        assert!(Arc::ptr_eq(&second, &completion_of(2)), "one completion for each sequence");
        waiters.notify(0);
        assert!(!first.is_done());
        reached.set(2);
        waiters.notify(2);
        assert_eq!([&first, &second, &third].map(|c| c.is_done()), [true, true, false]);
        assert!(completion_of(1).is_done(), "a completion after the end");
        waiters.notify_fenced(3);
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
        struct AsksAgain(Arc<Waiters>);
        impl Drop for AsksAgain {
            fn drop(&mut self) {
                assert!(self.0.completion_of(1, || 1).is_done());
                assert!(!self.0.completion_of(5, || 1).is_done());
                self.0.notify_fenced(1);
            }
        }
        let waiters = Arc::new(Waiters::new());
        let completion = waiters.completion_of(1, || 0);
        completion.keep_alive(AsksAgain(waiters.clone())).unwrap();
        waiters.notify(1);
        assert!(completion.is_done());
        assert_eq!(waiters.lowest.load(Ordering::Relaxed), 5);
    }
}
