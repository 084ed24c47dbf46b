//! Counters of a lookup.

use super::config::DataPath;
use super::histogram::Histogram;

/// Counters of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookupCounters {
    /// Lookups that found their line in the cache.
    pub hits: ByDataPath<u64>,
    /// Lookups that missed, by reason.
    pub misses: ByDataPath<MissCounts>,
    /// Lookups of a line whose miss was pending already.
    pub retries: u64,
    /// Prefetches of lines that were not in the cache.
    pub prefetches: ByDataPath<u64>,
    /// Lines filled into the cache.
    pub fills: u64,
    /// Lines evicted from the cache by a fill.
    pub evictions: u64,
    /// Lines that were not filled because all lines of the set were in use.
    pub uncached: u64,
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
    /// Time from a miss to the start of its handling, in nanoseconds.
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

    pub(crate) fn count(&mut self, kind: MissKind) {
        match kind {
            MissKind::Cold => self.cold += 1,
            MissKind::Capacity => self.capacity += 1,
            MissKind::Conflict => self.conflict += 1,
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
