//! Whether a caller that waits shares a copy of medium size with channels, or makes it alone.
//!
//! The measured limit, from which on copies are shared, is one for all data. Data in no cache is copied
//! faster by two cores from there on; data in the caller's caches moves to other cores and back, and
//! the caller alone may be faster up to several times that size. So it may be if other programs use the
//! channels' cores. Neither is known before the copy. So both ways are measured for each power of two of
//! the size, and the faster one is taken; now and then a few copies in a row are made the other way.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The size in bytes from which on copies are always shared.
pub(crate) const ALWAYS_SHARED_BYTES: u64 = 4 << 20;

const SIZES: usize = ALWAYS_SHARED_BYTES.ilog2() as usize;
/// The copies of a size from one row of trials to the next.
const PERIOD: u32 = 128;
/// The periods from one row of trials to the next, if the other way is much slower.
const RARE: u32 = 16;
/// The copies of such a row.
const ROW: u32 = 6;
/// The copies after a change of the way that are not measured: the data moves between cores.
const MOVING: u32 = 4;
/// The copies before the first trial.
const FIRST: u32 = 8;

/// How a copy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyWay {
    /// By the caller alone.
    Alone,
    /// By the caller and channels.
    Shared,
}

/// A decision, and whether its time is to be reported by [`ShareRates::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShareChoice {
    pub(crate) way: CopyWay,
    is_measured: bool,
}

/// The measured times, for each power of two of the size.
#[derive(Debug)]
pub(crate) struct ShareRates([SizeRates; SIZES]);

#[derive(Debug)]
struct SizeRates {
    copies: AtomicU32,
    /// The times in picoseconds per byte; 0 before one was measured.
    alone: AtomicU64,
    shared: AtomicU64,
}

impl ShareRates {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| SizeRates {
            copies: AtomicU32::new(PERIOD - ROW - FIRST),
            alone: AtomicU64::new(0),
            shared: AtomicU64::new(0),
        }))
    }

    /// Decides about a copy of less than [`ALWAYS_SHARED_BYTES`].
    pub(crate) fn decide(&self, bytes: u64) -> ShareChoice {
        let size = self.size(bytes);
        // Threads that copy at the same time may lose a count.
        let number = size.copies.load(Ordering::Relaxed);
        size.copies.store(number.wrapping_add(1), Ordering::Relaxed);
        let (usual, other, is_clear) = size.compare();
        let turn = number % PERIOD;
        match turn.checked_sub(PERIOD - ROW) {
            Some(trial) if !is_clear || (number / PERIOD).is_multiple_of(RARE) => {
                ShareChoice { way: other, is_measured: trial >= MOVING }
            }
            _ => ShareChoice { way: usual, is_measured: turn >= MOVING },
        }
    }

    /// Records the time of a copy.
    pub(crate) fn record(&self, bytes: u64, choice: ShareChoice, took: Duration) {
        if !choice.is_measured {
            return;
        }
        let measured = (took.as_nanos() as u64 * 1000 / bytes.max(1)).max(1);
        let size = self.size(bytes);
        let rate = match choice.way {
            CopyWay::Alone => &size.alone,
            CopyWay::Shared => &size.shared,
        };
        let before = rate.load(Ordering::Relaxed);
        // A copy that was interrupted changes little; one that was faster is believed.
        let after = match measured {
            _ if before == 0 => measured,
            faster if faster < before => (before + faster).div_ceil(2),
            slower => before + (slower.min(2 * before) - before) / 8,
        };
        rate.store(after, Ordering::Relaxed);
    }

    fn size(&self, bytes: u64) -> &SizeRates {
        &self.0[(bytes.max(1).ilog2() as usize).min(SIZES - 1)]
    }
}

impl SizeRates {
    /// The faster way as far as it is known, the other one, and whether that is much slower. Sharing takes
    /// the time of another core, so it must gain something.
    fn compare(&self) -> (CopyWay, CopyWay, bool) {
        const MIN_GAIN: f64 = 1.05;
        const CLEAR: f64 = 1.3;
        let [alone, shared] = [&self.alone, &self.shared].map(|rate| rate.load(Ordering::Relaxed));
        if alone == 0 || shared == 0 {
            return (CopyWay::Shared, CopyWay::Alone, false);
        }
        let gain = alone as f64 / shared as f64;
        match gain < MIN_GAIN {
            true => (CopyWay::Alone, CopyWay::Shared, gain < 1.0 / CLEAR),
            false => (CopyWay::Shared, CopyWay::Alone, gain > CLEAR),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 128 << 10;

    /// Makes copies that take these times, and returns how many were made alone.
    fn copy(rates: &ShareRates, copies: u32, alone_ns: u64, shared_ns: u64) -> u32 {
        let copy = |_| {
            let choice = rates.decide(BYTES);
            let took = if choice.way == CopyWay::Alone { alone_ns } else { shared_ns };
            rates.record(BYTES, choice, Duration::from_nanos(took));
            u32::from(choice.way == CopyWay::Alone)
        };
        (0..copies).map(copy).sum()
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_is_tried_now_and_then() {
        for (alone_ns, shared_ns, expected) in [(3000, 3600, PERIOD - ROW), (3600, 3000, ROW)] {
            let rates = ShareRates::new();
            copy(&rates, PERIOD, alone_ns, shared_ns);
            assert_eq!(copy(&rates, PERIOD, alone_ns, shared_ns), expected);
        }
    }

    #[test]
    fn what_is_much_slower_is_tried_rarely() {
        for (alone_ns, shared_ns, expected) in
            [(3000, 6000, RARE * PERIOD - ROW), (6000, 3000, ROW)]
        {
            let rates = ShareRates::new();
            copy(&rates, PERIOD, alone_ns, shared_ns);
            assert_eq!(copy(&rates, RARE * PERIOD, alone_ns, shared_ns), expected);
        }
    }

    #[test]
    fn copies_are_shared_before_anything_is_measured_and_other_sizes_do_not_matter() {
        let rates = ShareRates::new();
        assert_eq!(copy(&rates, FIRST, 1, 1000), 0);
        copy(&rates, PERIOD, 1, 1000);
        assert_eq!(rates.decide(2 << 20).way, CopyWay::Shared);
    }

    #[test]
    fn sharing_must_gain_something() {
        let rates = ShareRates::new();
        copy(&rates, PERIOD, 3000, 2900);
        assert_eq!(rates.decide(BYTES).way, CopyWay::Alone);
    }

    #[test]
    fn a_copy_that_was_interrupted_does_not_change_the_way() {
        let rates = ShareRates::new();
        copy(&rates, 2 * PERIOD, 3000, 4000);
        let choice = ShareChoice { way: CopyWay::Alone, is_measured: true };
        rates.record(BYTES, choice, Duration::from_millis(10));
        assert_eq!(rates.decide(BYTES).way, CopyWay::Alone);
    }

    #[test]
    fn the_way_follows_where_the_data_is() {
        let rates = ShareRates::new();
        copy(&rates, 2 * PERIOD, 3000, 4000);
        copy(&rates, 2 * RARE * PERIOD, 30_000, 16_000);
        assert_eq!(copy(&rates, RARE * PERIOD, 30_000, 16_000), ROW);
    }
}
