//! Replays of recorded lookups (`MEMFERRY_LOOKUP_TRACE`) with translation caches of other shapes. A
//! replay measures no times and accesses no window. `memferry replay` and the bench `lookup` use it.

mod shape;

use std::sync::atomic::{AtomicUsize, Ordering};

use memferry_memory::lookup::trace;
use memferry_memory::lookup::{LookupCounters, MissCounts};
use serde::{Deserialize, Serialize};

pub use shape::CacheShape;

/// The counters of a trace that was replayed through a cache of one shape.
#[derive(Debug, Clone, Copy)]
pub struct ReplayResult {
    /// The shape of the cache.
    pub shape: CacheShape,
    /// Hits and misses.
    pub counters: LookupCounters,
}

/// Misses by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MissTotals {
    /// First uses of a line.
    pub cold: u64,
    /// Misses that a cache with a single set would have too.
    pub capacity: u64,
    /// Misses that a cache with a single set would not have.
    pub conflict: u64,
}

impl MissTotals {
    /// Number of misses.
    pub fn total(self) -> u64 {
        self.cold + self.capacity + self.conflict
    }

    /// Counts with their names.
    pub fn named(self) -> [(&'static str, u64); 3] {
        [("cold", self.cold), ("capacity", self.capacity), ("conflict", self.conflict)]
    }
}

impl From<MissCounts> for MissTotals {
    fn from(misses: MissCounts) -> Self {
        Self { cold: misses.cold, capacity: misses.capacity, conflict: misses.conflict }
    }
}

/// Replays a trace with every cache shape, on all cores.
pub fn sweep(bytes: &[u8]) -> anyhow::Result<Vec<ReplayResult>> {
    let shapes: Vec<CacheShape> = CacheShape::all().collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&shape) = shapes.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((shape, trace::replay(bytes, shape.geometry())));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(shapes.len());
    let mut done = Vec::new();
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        done.extend(work());
        for other in others {
            done.extend(other.join().expect("a replay does not panic"));
        }
    });
    let place = |shape: CacheShape| shapes.iter().position(|known| *known == shape);
    done.sort_by_key(|(shape, _)| place(*shape));
    done.into_iter()
        .map(|(shape, counters)| Ok(ReplayResult { shape, counters: counters? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_trace_is_refused() {
        let error = sweep(b"not a trace at all").unwrap_err();
        assert!(error.to_string().contains("not a trace"), "{error}");
    }
}
