//! What a lookup has counted.

use super::histogram::Histogram;
use super::settings::Route;

/// What a lookup has counted so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Lookups that found their line.
    pub hits: ByRoute<u64>,
    /// Lookups that did not, by the reason.
    pub misses: ByRoute<Misses>,
    /// Lookups that did not find a line which was on its way already, and went away again.
    pub retries: u64,
    /// Requests for later use, of lines that were not in the cache.
    pub requests: ByRoute<u64>,
    /// Lines brought into the cache.
    pub fills: u64,
    /// Lines that had to leave the cache for another.
    pub evictions: u64,
    /// Lines that the cache had no room for, because all lines of the set were in use.
    pub uncached: u64,
    /// Lines that the source attached.
    pub attached: u64,
    /// Lines that the source detached.
    pub detached: u64,
    /// Lines that the source refused.
    pub refused: u64,
    /// Miss events that found the queue full and were dropped.
    pub dropped: u64,
    /// Miss events that a caller handled instead of waiting.
    pub helped: u64,
    /// Nanoseconds from a miss event to the begin of its handling.
    pub delay_ns: Histogram,
    /// Nanoseconds from the begin of its handling until the line was there.
    pub processing_ns: Histogram,
}

impl Counters {
    /// Which part of all lookups missed, from 0 to 1. Those that came again are not counted twice.
    pub fn miss_ratio(&self) -> f64 {
        let hits = self.hits.send + self.hits.receive;
        let misses = self.misses.send.total() + self.misses.receive.total();
        if misses == 0 { 0.0 } else { misses as f64 / (hits + misses) as f64 }
    }
}

/// A value for each route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByRoute<T> {
    /// For [`Route::Send`].
    pub send: T,
    /// For [`Route::Receive`].
    pub receive: T,
}

impl<T> ByRoute<T> {
    pub(crate) fn of(&mut self, route: Route) -> &mut T {
        match route {
            Route::Send => &mut self.send,
            Route::Receive => &mut self.receive,
        }
    }
}

/// Misses by their reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Misses {
    /// The line was never attached before, as far as is remembered.
    pub cold: u64,
    /// So many other lines were used since that no cache of this size would still hold it.
    pub capacity: u64,
    /// A cache of the same size with a single set would still hold it.
    pub conflict: u64,
}

impl Misses {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.cold + self.capacity + self.conflict
    }

    pub(crate) fn count(&mut self, class: Class) {
        match class {
            Class::Cold => self.cold += 1,
            Class::Capacity => self.capacity += 1,
            Class::Conflict => self.conflict += 1,
        }
    }
}

/// The reason of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Cold,
    Capacity,
    Conflict,
}
