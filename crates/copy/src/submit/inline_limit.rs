//! The size up to which the caller executes asynchronous copies inline, adapted to where the data
//! is.
//!
//! The measured limit is that of data in the caches: up to it, copying takes no longer than
//! submitting. A copy from memory takes many times as long, and then the caller of many small copies
//! would do all of them while the channels idle. Whether data is in the caches is not known before
//! the copy. So each thread measures one in a few of its copies, and the limit follows: it is the
//! size that is copied in the time of a submission.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use crate::plan::ALWAYS_INLINE_BYTES;

/// One copy in so many is measured. Odd numbers: programs alternate between sizes.
pub(crate) const MEASURE_ONE_IN: u32 = 31;
/// One copy in so many of those that would be submitted is measured: it takes longer than a submission.
pub(crate) const MEASURE_ONE_SUBMITTED_IN: u32 = 127;

/// How a small copy is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SmallCopy {
    /// By the caller.
    Inline,
    /// By the caller, with [`InlineLimit::record`] of its time.
    Measured,
    /// By a channel.
    Submit,
}

/// The limit of one ferry, in a cache line of its own, which all submitters read.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct InlineLimit {
    /// The time in nanoseconds of a submission.
    submit_ns: f64,
    /// The limit for data in the caches, in bytes.
    max_bytes: u64,
    /// The limit now, in bytes.
    bytes: AtomicU64,
    /// The size in bytes up to which a copy can be submitted without a plan.
    pub(crate) small_bytes: u64,
}

thread_local! {
    /// The number of small copies of this thread, to measure one in a few.
    static COPIES: Cell<u32> = Cell::new(first_count());
}

/// Where a thread begins to count, so that short-lived threads together measure as often as one.
fn first_count() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(29, Ordering::Relaxed)
}

impl InlineLimit {
    pub(crate) fn new(submit_ns: f64, max_bytes: u64) -> Self {
        Self { submit_ns, max_bytes, bytes: AtomicU64::new(max_bytes), small_bytes: 0 }
    }

    /// The limit now, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The speed of small copies by callers, as far as it is known.
    pub(crate) fn gb_per_s(&self) -> f64 {
        self.bytes.load(Ordering::Relaxed) as f64 / self.submit_ns
    }

    /// Decides about a copy that is larger than [`ALWAYS_INLINE_BYTES`] and not larger than the
    /// limit for data in the caches.
    #[inline]
    pub(crate) fn decide(&self, bytes: u64) -> SmallCopy {
        let number = COPIES.with(|copies| {
            let number = copies.get().wrapping_add(1);
            copies.set(number);
            number
        });
        let (one_in, usual) = match bytes <= self.bytes.load(Ordering::Relaxed) {
            true => (MEASURE_ONE_IN, SmallCopy::Inline),
            false => (MEASURE_ONE_SUBMITTED_IN, SmallCopy::Submit),
        };
        if number.is_multiple_of(one_in) { SmallCopy::Measured } else { usual }
    }

    /// Adapts the limit to the time of a copy of `bytes` bytes that started at `start`.
    #[cold]
    pub(crate) fn record(&self, bytes: u64, start: Instant) {
        let took_ns = start.elapsed().as_nanos().max(1) as f64;
        let fits = bytes as f64 * self.submit_ns / took_ns;
        self.adapt((fits as u64).clamp(ALWAYS_INLINE_BYTES, self.max_bytes));
    }

    /// Moves the limit a part of the way, so that a single disturbed copy changes little. Threads
    /// that do this at the same time may lose a step.
    fn adapt(&self, measured: u64) {
        let before = self.bytes.load(Ordering::Relaxed);
        let after = (3 * before + measured).div_ceil(4);
        if after != before {
            self.bytes.store(after, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_copy_changes_little_and_many_change_the_limit() {
        let limit = InlineLimit::new(200.0, 16 << 10);
        limit.adapt(1 << 10);
        assert!(limit.bytes.load(Ordering::Relaxed) > 8 << 10);
        (0..40).for_each(|_| limit.adapt(1 << 10));
        assert!(limit.bytes.load(Ordering::Relaxed) < 2 << 10);
        (0..80).for_each(|_| limit.adapt(16 << 10));
        assert_eq!(limit.bytes.load(Ordering::Relaxed), 16 << 10);
    }

    #[test]
    fn some_copies_are_measured_whatever_the_limit_is() {
        let limit = InlineLimit::new(200.0, 16 << 10);
        for limit_bytes in [1 << 10, 16 << 10] {
            limit.bytes.store(limit_bytes, Ordering::Relaxed);
            let decisions: Vec<_> = (0..31 * 127).map(|_| limit.decide(8 << 10)).collect();
            let measured = |decision: &&SmallCopy| **decision == SmallCopy::Measured;
            let (usual, expected) = if limit_bytes < 8 << 10 {
                (SmallCopy::Submit, 31)
            } else {
                (SmallCopy::Inline, 127)
            };
            assert_eq!(decisions.iter().filter(measured).count(), expected);
            assert!(decisions.iter().all(|d| [usual, SmallCopy::Measured].contains(d)));
        }
    }

    #[test]
    fn the_limit_follows_the_measured_time() {
        let limit = InlineLimit::new(1.0, 16 << 10);
        let start = Instant::now();
        std::thread::sleep(std::time::Duration::from_millis(1));
        (0..60).for_each(|_| limit.record(8 << 10, start));
        assert!(limit.bytes.load(Ordering::Relaxed) <= (1 << 10) + 3);
    }
}
