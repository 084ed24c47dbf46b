//! Claims on the values of a ring, by its worker and by threads that help it.
//!
//! Sequences are published in order, by one thread at a time: the worker, which needs no locked
//! instruction for that. Before a step that may take long, or runs code of the user, the worker lends
//! the right to publish to the threads that help: what they finish meanwhile does not wait for it.

use std::ops::Range;

use memferry_sys::sync::atomic::{Ordering, fence};
use memferry_sys::sync::spin_hint;

use super::{FinishedValue, SHARED, SubmissionRing};
use crate::contract::Sequence;

/// The worker publishes.
pub(super) const WORKER: u32 = 0;
/// Whoever finishes a value publishes.
const LENT: u32 = 1;
/// A thread that has finished a value publishes.
const IN_USE: u32 = 2;

/// The maximum number of values that a thread claims at once.
pub const MAX_RUN: u64 = 8;
/// One value is claimed for so many that are queued.
pub const QUEUED_PER_RUN: u64 = 4;

/// Consecutive values that a thread has claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimedRun {
    /// The sequence of the first value.
    pub first: Sequence,
    /// The number of values.
    pub count: u64,
}

impl ClaimedRun {
    /// The sequences.
    #[inline]
    pub fn sequences(self) -> Range<Sequence> {
        self.first..self.first + self.count
    }

    /// The run without its first `count` values.
    #[inline]
    pub fn without_first(self, count: u64) -> Self {
        Self { first: self.first + count, count: self.count - count }
    }
}

impl<T> SubmissionRing<T> {
    /// Whether a value is there that no thread has claimed.
    #[inline]
    pub fn has_unclaimed(&self) -> bool {
        self.has_next(self.claimed.load(Ordering::Relaxed))
    }

    /// Claims values for the worker: one, or a few if many are queued.
    #[inline]
    pub fn claim(&self) -> Option<ClaimedRun> {
        self.claim_if(|word, sequence| word & !SHARED == sequence)
    }

    /// Claims shared values for a thread that helps.
    pub fn claim_shared(&self) -> Option<ClaimedRun> {
        self.claim_if(|word, sequence| word == sequence | SHARED)
    }

    #[inline]
    fn claim_if(&self, is_claimable: impl Fn(u64, Sequence) -> bool) -> Option<ClaimedRun> {
        let mut claimed = self.claimed.load(Ordering::Relaxed);
        loop {
            // Acquire: the thread that sees the sequence sees the value.
            let is_there = |index: u64| {
                is_claimable(self.slot(index).sequence.load(Ordering::Acquire), index + 1)
            };
            if !is_there(claimed) {
                return None;
            }
            let count = self.run_length(claimed, is_there);
            match self.claimed.compare_exchange_weak(
                claimed,
                claimed + count,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(ClaimedRun { first: claimed + 1, count }),
                Err(now) => claimed = now,
            }
        }
    }

    /// The number of values to claim at once: a fraction of what is queued, so that all threads end
    /// at about the same time. With several of them, the next can be prefetched.
    #[inline]
    fn run_length(&self, claimed: u64, is_there: impl Fn(u64) -> bool) -> u64 {
        let reaches = |count: u64| {
            count * QUEUED_PER_RUN <= self.capacity()
                && is_there(claimed + count * QUEUED_PER_RUN - 1)
        };
        let mut count = 1;
        while count < MAX_RUN && reaches(2 * count) {
            count *= 2;
        }
        // Those in between may be of another kind, or not yet written.
        (1..count).take_while(|&next| is_there(claimed + next)).count() as u64 + 1
    }

    /// Moves a claimed value out of the ring.
    ///
    /// # Safety
    /// The calling thread must have claimed the sequence, and takes it once.
    #[inline]
    pub unsafe fn take_claimed(&self, sequence: Sequence) -> T {
        // SAFETY: the claim saw the sequence, so the value is there, and it is the caller's.
        unsafe { self.read(sequence - 1) }
    }

    /// Looks at a claimed value that stays in the ring.
    ///
    /// # Safety
    /// The calling thread must have claimed the sequence, and not have taken it.
    #[inline]
    pub unsafe fn look_at_claimed<R>(&self, sequence: Sequence, look: impl FnOnce(&T) -> R) -> R {
        self.slot(sequence - 1).value.with(|cell| {
            // SAFETY: the claim saw the sequence, so the value is there, and nobody writes to the
            // slot until the caller has taken and finished it.
            look(unsafe { (*cell).assume_init_ref() })
        })
    }

    /// Whether `count` values are queued behind a sequence.
    #[inline]
    pub fn is_followed_by(&self, sequence: Sequence, count: u64) -> bool {
        count > 0 && count < self.capacity() && self.has_next(sequence - 1 + count)
    }

    /// Marks a claimed value as finished. The worker publishes it later, or
    /// [`SubmissionRing::publish_lent`] does.
    ///
    /// # Safety
    /// The calling thread must have claimed the sequence and finished its value.
    pub unsafe fn finish_claimed(&self, sequence: Sequence, weight: u64) {
        let mark = self.finished_mark(sequence);
        mark.weight.store(weight, Ordering::Relaxed);
        // Release: a thread that sees the mark sees what the value's execution wrote.
        mark.sequence.store(sequence, Ordering::Release);
    }

    fn finished_mark(&self, sequence: Sequence) -> &FinishedValue {
        let finished = &self.fixed.finished;
        &finished[(sequence - 1) as usize & (finished.len() - 1)]
    }

    /// Whether a value is finished, published or not.
    #[inline]
    pub fn is_finished(&self, sequence: Sequence) -> bool {
        self.completed() >= sequence
            || sequence > 0
                && self.finished_mark(sequence).sequence.load(Ordering::Acquire) == sequence
    }

    /// Whether values are claimed that are not published.
    #[inline]
    pub fn has_unpublished(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) > self.consumer.completed.load(Ordering::Relaxed)
    }

    /// Whether [`SubmissionRing::publish_finished`] would publish a value.
    pub fn has_publishable(&self) -> bool {
        let next = self.consumer.completed.load(Ordering::Relaxed) + 1;
        self.finished_mark(next).sequence.load(Ordering::Acquire) == next
    }

    /// Lends the right to publish to the threads that help. The worker must call
    /// [`SubmissionRing::publish_lent`] after this: a value may have been finished just before.
    pub fn lend_publishing(&self) {
        // Release: who publishes next sees what the worker published.
        self.publisher.store(LENT, Ordering::Release);
    }

    /// Ends the loan; waits while a thread publishes, which takes nanoseconds.
    pub fn end_loan(&self) {
        let take = || {
            // Acquire: the worker sees what others have published.
            self.publisher.compare_exchange_weak(LENT, WORKER, Ordering::Acquire, Ordering::Relaxed)
        };
        while take().is_err() {
            spin_hint();
        }
    }

    /// Publishes finished values if the worker has lent that; returns whether there were any. For a thread
    /// that has just marked a value as finished, and for the worker during the loan.
    pub fn publish_lent(&self) -> bool {
        let mut has_published = false;
        loop {
            // The mark is visible before the look at the publisher, and the other way round: the worker
            // that lends sees the mark, or this thread sees the loan.
            fence(Ordering::SeqCst);
            if !self.has_publishable()
                || self
                    .publisher
                    .compare_exchange(LENT, IN_USE, Ordering::Acquire, Ordering::Relaxed)
                    .is_err()
            {
                return has_published;
            }
            // SAFETY: during the loan, this thread alone publishes.
            has_published |= unsafe { self.publish_finished() };
            // Another value may have been finished meanwhile by a thread that found this one here.
            self.publisher.store(LENT, Ordering::Release);
        }
    }

    /// Publishes all finished values up to the first that is not; returns whether there were any.
    ///
    /// # Safety
    /// Only the worker may call this, except during a loan, or the one thread that has taken it.
    pub unsafe fn publish_finished(&self) -> bool {
        let before = self.consumer.completed.load(Ordering::Relaxed);
        let (mut published, mut weight) = (before, 0);
        loop {
            let mark = self.finished_mark(published + 1);
            if mark.sequence.load(Ordering::Acquire) != published + 1 {
                break;
            }
            published += 1;
            weight += mark.weight.load(Ordering::Relaxed);
        }
        if published == before {
            return false;
        }
        // SAFETY: every value up to this one was marked as finished; the caller is the worker.
        unsafe { self.complete(published, weight) };
        true
    }

    /// Finishes a value of the worker and publishes what can be published.
    ///
    /// # Safety
    /// Only the worker may call this, after it has finished a value that it claimed.
    #[inline]
    pub unsafe fn finish(&self, sequence: Sequence, weight: u64) {
        if self.consumer.completed.load(Ordering::Relaxed) + 1 == sequence {
            // SAFETY: every value before it is published, and this one is finished.
            unsafe { self.complete(sequence, weight) };
        } else {
            // SAFETY: the caller has claimed and finished it, and is the worker.
            unsafe {
                self.finish_claimed(sequence, weight);
                self.publish_finished();
            }
        }
    }
}
