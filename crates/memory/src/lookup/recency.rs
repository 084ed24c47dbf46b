//! Why a line is not in the cache: would a cache of the same size with a single set still hold it?
//!
//! It would if fewer other lines than it has room for were used since. Uses are known to the tick,
//! of which there is one for each fill, so this counts the lines used at the same tick or later:
//! those in the cache, by their slots, and those that left it, which are kept here. Uses at the
//! same tick cannot be told apart and count as later, so a doubtful miss is one of capacity.
//!
//! Up to 256 lines every one is counted. Larger caches are judged by a sample of their sets, as if
//! they had no others, so that a miss does not have to look at thousands of lines.

use std::collections::BTreeSet;

use super::cache::Cache;
use super::line::LineName;

/// How many lines are looked at, if there are as many.
const SAMPLE_LINES: usize = 256;

/// Spreads the sample over the sets. Odd, so that it maps them one to one.
const SPREAD: usize = 0x9e37_79b1;

/// The lines of the sample that left the cache, as many as can matter.
#[derive(Debug)]
pub(crate) struct Recency {
    sets: usize,
    /// Which sets are looked at.
    sample: Box<[usize]>,
    /// How many lines the sample has room for.
    lines: usize,
    left: BTreeSet<(u64, LineName)>,
}

impl Recency {
    pub(crate) fn new(cache: &Cache) -> Self {
        let geometry = cache.geometry();
        let sets = geometry.sets();
        let part = (geometry.lines() / SAMPLE_LINES).max(1).next_power_of_two().min(sets);
        let is_chosen = |set: &usize| is_chosen(*set, sets, part);
        let sample: Box<[usize]> = (0..sets).filter(is_chosen).collect();
        let lines = sample.len() * geometry.ways();
        Self { sets, sample, lines, left: BTreeSet::new() }
    }

    /// A line has left the cache.
    pub(crate) fn insert(&mut self, cache: &Cache, name: LineName, last_use: u64) {
        if is_chosen(cache.set_of(name.address), self.sets, self.sets / self.sample.len()) {
            self.left.insert((last_use, name));
            if self.left.len() > self.lines + 1 {
                self.left.pop_first();
            }
        }
    }

    /// A line came back, or does not count any more.
    pub(crate) fn remove(&mut self, name: LineName, last_use: u64) {
        self.left.remove(&(last_use, name));
    }

    /// Whether a cache with a single set would still hold a line that was last used then.
    pub(crate) fn would_hold(&self, cache: &Cache, name: LineName, last_use: u64) -> bool {
        // With a single set the cache itself is the one it would be compared with.
        if self.sets == 1 {
            return false;
        }
        // Older than all that are kept, of which there are enough: the usual case where much more
        // memory is used than the cache holds.
        let oldest = self.left.first().filter(|_| self.left.len() > self.lines);
        if oldest.is_some_and(|&(used, _)| used >= last_use) {
            return false;
        }
        let cached: usize = self.sample.iter().map(|&set| cache.used_since(set, last_use)).sum();
        let young = self.left.iter().rev().take_while(|&&(used, _)| used >= last_use);
        let others = young.filter(|&&(_, other)| other != name).take(self.lines).count();
        cached + others < self.lines
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.sample) + self.left.len() * size_of::<(u64, LineName)>()
    }
}

/// Whether a set belongs to a sample of one in `part`.
fn is_chosen(set: usize, sets: usize, part: usize) -> bool {
    set.wrapping_mul(SPREAD) & (sets - 1) < sets / part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lookup::Geometry;

    #[test]
    fn small_caches_are_counted_whole_and_large_ones_by_a_sample() {
        for (entries, ways, sets, lines) in
            [(256, 4, 64, 256), (4, 2, 2, 4), (512, 4, 64, 256), (1 << 15, 8, 32, 256)]
        {
            let (cache, _) = Cache::new(Geometry::new(entries, 1, ways).unwrap());
            let recency = Recency::new(&cache);
            assert_eq!((recency.sample.len(), recency.lines), (sets, lines));
        }
    }

    #[test]
    fn a_sample_is_not_a_stride() {
        let (cache, _) = Cache::new(Geometry::new(1 << 14, 1, 1).unwrap());
        let recency = Recency::new(&cache);
        for stride in [2, 4, 8, 16, 32] {
            let on_it = recency.sample.iter().filter(|&&set| set % stride == 0).count();
            assert!(on_it.abs_diff(256 / stride) <= 4, "{on_it} of 256 at stride {stride}");
        }
    }
}
