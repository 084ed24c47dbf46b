//! Classification of misses: would a fully associative cache of the same size hit?
//!
//! It would if fewer other lines than its size were used since the last use of the line. Uses are
//! known to the tick, which advances with each fill, so the classifier counts the lines used at the
//! same tick or later: those in the cache, and those evicted, which are stored here. Uses at the
//! same tick count as later, so an ambiguous miss is a capacity miss.
//!
//! Caches of up to 64 lines are counted completely. Larger ones are estimated from a sample of their
//! sets, so that a fill rarely has to be recorded, and a miss does not inspect thousands of lines.

use std::collections::BTreeSet;

use super::cache::LineCache;
use super::line::LineKey;

/// Maximum number of lines in the sample.
const SAMPLE_LINES: usize = 64;

/// Spreads the sample over the sets. Odd, so that the mapping is a bijection.
const SPREAD: usize = 0x9e37_79b1;

/// The evicted lines of the sample, bounded by what can affect a result.
#[derive(Debug)]
pub(crate) struct MissClassifier {
    sets: usize,
    /// The sets of the sample.
    sample: Box<[usize]>,
    /// The number of lines in these sets.
    lines: usize,
    evicted: BTreeSet<(u64, LineKey)>,
}

impl MissClassifier {
    pub(crate) fn new(cache: &LineCache) -> Self {
        let geometry = cache.geometry();
        let sets = geometry.sets();
        let part = (geometry.lines() / SAMPLE_LINES).max(1).next_power_of_two().min(sets);
        let is_chosen = |set: &usize| is_sampled(*set, sets, part);
        let sample: Box<[usize]> = (0..sets).filter(is_chosen).collect();
        let lines = sample.len() * geometry.ways();
        Self { sets, sample, lines, evicted: BTreeSet::new() }
    }

    /// Whether evictions from the set of a line are recorded.
    #[inline]
    pub(crate) fn samples(&self, cache: &LineCache, name: LineKey) -> bool {
        is_sampled(cache.set_of(name.address), self.sets, self.sets / self.sample.len())
    }

    /// Records the eviction of a line whose set is [sampled](MissClassifier::samples).
    pub(crate) fn insert(&mut self, name: LineKey, last_use: u64) {
        self.evicted.insert((last_use, name));
        if self.evicted.len() > self.lines + 1 {
            self.evicted.pop_first();
        }
    }

    /// Removes a line that was filled again or invalidated.
    pub(crate) fn remove(&mut self, name: LineKey, last_use: u64) {
        self.evicted.remove(&(last_use, name));
    }

    /// Whether a fully associative cache would still contain a line with this last use.
    /// `last_use_of` returns that of a line in the cache.
    pub(crate) fn would_hit(
        &self,
        cache: &LineCache,
        (name, last_use): (LineKey, u64),
        last_use_of: impl Fn(u64) -> u64,
    ) -> bool {
        // With a single set the cache itself is fully associative.
        if self.sets == 1 {
            return false;
        }
        // The line is older than all recorded evictions, of which there are enough: the usual case
        // if the working set is much larger than the cache.
        let oldest = self.evicted.first().filter(|_| self.evicted.len() > self.lines);
        if oldest.is_some_and(|&(used, _)| used >= last_use) {
            return false;
        }
        let in_cache = self.sample.iter().flat_map(|&set| cache.lines_of_set(set));
        let cached = in_cache.filter(|&line| last_use_of(line) >= last_use).count();
        let recent = self.evicted.iter().rev().take_while(|&&(used, _)| used >= last_use);
        let others = recent.filter(|&&(_, other)| other != name).take(self.lines).count();
        cached + others < self.lines
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.sample) + self.evicted.len() * size_of::<(u64, LineKey)>()
    }
}

/// Whether a set belongs to a sample of one in `part`.
fn is_sampled(set: usize, sets: usize, part: usize) -> bool {
    set.wrapping_mul(SPREAD) & (sets - 1) < sets / part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lookup::Geometry;

    #[test]
    fn small_caches_are_counted_whole_and_large_ones_by_a_sample() {
        for (entries, ways, sets, lines) in
            [(64, 4, 16, 64), (4, 2, 2, 4), (256, 4, 16, 64), (1 << 15, 8, 8, 64)]
        {
            let (cache, _) = LineCache::new(Geometry::new(entries, 1, ways).unwrap());
            let classifier = MissClassifier::new(&cache);
            assert_eq!((classifier.sample.len(), classifier.lines), (sets, lines));
        }
    }

    #[test]
    fn a_sample_is_not_a_stride() {
        let (cache, _) = LineCache::new(Geometry::new(1 << 14, 1, 1).unwrap());
        let classifier = MissClassifier::new(&cache);
        for stride in [2, 4, 8, 16, 32] {
            let on_it = classifier.sample.iter().filter(|&&set| set % stride == 0).count();
            assert!(on_it.abs_diff(64 / stride) <= 4, "{on_it} of 64 at stride {stride}");
        }
    }
}
