//! Counters of a lookup.

use super::config::DataPath;
use super::histogram::Histogram;

/// Counters of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookupCounters {
    /// Lookups that found their line in the cache.
    pub hits: ByDataPath<u64>,
    /// Lookups that missed, by reason. Their number is exact. Whether a miss is one of capacity or a
    /// conflict is determined for the first thousand, and later for a sample.
    pub misses: ByDataPath<MissCounts>,
    /// Lookups of a line whose miss was counted and is pending, and lookups that found no space in the
    /// queue. With the hits and the misses these are all lookups.
    pub retries: u64,
    /// Prefetches of lines that were not in the cache.
    pub prefetches: ByDataPath<u64>,
    /// Lines filled into the cache.
    pub fills: u64,
    /// Lines evicted from the cache by a fill.
    pub evictions: u64,
    /// Lines that the backend attached.
    pub attached: u64,
    /// Lines that the backend detached.
    pub detached: u64,
    /// Lines that the backend failed to attach.
    pub attach_errors: u64,
    /// Misses dropped because the queue was full.
    pub dropped: u64,
    /// Misses that a caller handled inline.
    pub inline_misses: u64,
    /// Time from a miss to the start of its handling, in nanoseconds. Of misses that a caller handles
    /// from the tables, every sixteenth is timed.
    pub delay_ns: Histogram,
    /// Time from the start of the handling until the line is attached, in nanoseconds.
    pub processing_ns: Histogram,
}

impl LookupCounters {
    /// The share of lookups that missed, from 0 to 1. Retries are not counted.
    pub fn miss_ratio(&self) -> f64 {
        let hits = self.hits.send + self.hits.receive;
        let misses = self.misses.send.total() + self.misses.receive.total();
        if misses == 0 { 0.0 } else { misses as f64 / (hits + misses) as f64 }
    }
}

/// One value for each data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByDataPath<T> {
    /// For [`DataPath::Send`].
    pub send: T,
    /// For [`DataPath::Receive`].
    pub receive: T,
}

impl<T> ByDataPath<T> {
    pub(crate) fn of(&mut self, route: DataPath) -> &mut T {
        match route {
            DataPath::Send => &mut self.send,
            DataPath::Receive => &mut self.receive,
        }
    }
}

/// Misses by reason, as in the 3C model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MissCounts {
    /// The line was never attached, as far as the bounded history knows.
    pub cold: u64,
    /// So many other lines were used since that a fully associative cache of this size would miss
    /// too.
    pub capacity: u64,
    /// A fully associative cache of the same size would hit.
    pub conflict: u64,
}

impl MissCounts {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.cold + self.capacity + self.conflict
    }

    fn count(&mut self, kind: MissKind) {
        match kind {
            MissKind::Cold => self.cold += 1,
            MissKind::Capacity => self.capacity += 1,
            MissKind::Conflict => self.conflict += 1,
        }
    }
}

/// Misses as they are counted: cold ones and the first [`CLASSIFIED_MISSES`] others by reason, of
/// the rest every [`SAMPLE_INTERVAL`]th.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MissTally {
    exact: MissCounts,
    /// Misses that are not cold after the first ones.
    later: u64,
    /// The classified ones of these.
    sample: MissCounts,
}

/// So many misses are classified before the sampling begins.
const CLASSIFIED_MISSES: u64 = 1024;
const SAMPLE_INTERVAL: u64 = 16;

impl MissTally {
    /// Counts a miss that is not cold. `classify` is called if its reason is needed.
    #[inline]
    pub(crate) fn count_warm(&mut self, classify: impl FnOnce() -> MissKind) {
        if self.exact.capacity + self.exact.conflict < CLASSIFIED_MISSES {
            self.exact.count(classify());
            return;
        }
        if self.later.is_multiple_of(SAMPLE_INTERVAL) {
            self.sample.count(classify());
        }
        self.later += 1;
    }

    #[inline]
    pub(crate) fn count_cold(&mut self) {
        self.exact.count(MissKind::Cold);
    }

    /// The counts, in which the misses that were not classified are like the sample.
    pub(crate) fn counts(&self) -> MissCounts {
        let MissCounts { cold, capacity, conflict } = self.exact;
        let of_sample = u128::from(self.later) * u128::from(self.sample.conflict);
        let conflicts = (of_sample / u128::from(self.sample.total().max(1))) as u64;
        MissCounts {
            cold,
            capacity: capacity + self.later - conflicts,
            conflict: conflict + conflicts,
        }
    }
}

/// The reason of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissKind {
    Cold,
    Capacity,
    Conflict,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_misses_are_like_their_sample_and_none_is_lost() {
        let mut tally = MissTally::default();
        tally.count_cold();
        for number in 0..CLASSIFIED_MISSES + 10 * SAMPLE_INTERVAL {
            // Of the sample, every second one is a conflict.
            let is_conflict = number / SAMPLE_INTERVAL % 2 == 1;
            let kind = if is_conflict { MissKind::Conflict } else { MissKind::Capacity };
            tally.count_warm(|| kind);
        }
        let counts = tally.counts();
        assert_eq!(counts.total(), 1 + CLASSIFIED_MISSES + 10 * SAMPLE_INTERVAL);
        assert_eq!(counts.conflict, CLASSIFIED_MISSES / 2 + 5 * SAMPLE_INTERVAL);
        assert_eq!(counts.cold, 1);
    }

    #[test]
    fn few_misses_are_all_classified() {
        let mut tally = MissTally::default();
        (0..3).for_each(|_| tally.count_warm(|| MissKind::Conflict));
        tally.count_warm(|| MissKind::Capacity);
        assert_eq!(tally.counts(), MissCounts { cold: 0, capacity: 1, conflict: 3 });
    }
}
