//! Reference counts of pages, stored as runs of pages with equal count. Pure.
//!
//! The kernel's locks do not nest: one unlock undoes any number of locks. The counts determine
//! which pages can be unlocked.

use std::collections::BTreeMap;

use super::PageRange;

/// Reference counts by page. Runs are disjoint, have a count of at least 1, and are keyed by start.
#[derive(Debug, Default)]
pub(super) struct PageRefcounts {
    runs: BTreeMap<usize, CountedRun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CountedRun {
    end: usize,
    count: usize,
}

impl PageRefcounts {
    /// Increments the count of every page of a range.
    pub(super) fn add(&mut self, range: PageRange) {
        self.split_at(range.start());
        self.split_at(range.end());
        let mut at = range.start();
        let mut gaps = Vec::new();
        for (&start, run) in self.runs.range_mut(range.start()..range.end()) {
            gaps.extend(PageRange::between(at, start));
            run.count += 1;
            at = run.end;
        }
        gaps.extend(PageRange::between(at, range.end()));
        for gap in gaps {
            self.runs.insert(gap.start(), CountedRun { end: gap.end(), count: 1 });
        }
    }

    /// Decrements the count of every page of a range that was added; returns the pages whose count
    /// is now 0.
    pub(super) fn remove(&mut self, range: PageRange) -> Vec<PageRange> {
        self.split_at(range.start());
        self.split_at(range.end());
        let mut free = Vec::new();
        for (&start, run) in self.runs.range_mut(range.start()..range.end()) {
            run.count -= 1;
            if run.count == 0 {
                free.extend(PageRange::between(start, run.end));
            }
        }
        for range in &free {
            self.runs.remove(&range.start());
        }
        free
    }

    /// Splits the run that contains `address`, so that one begins there.
    fn split_at(&mut self, address: usize) {
        if let Some((_, run)) = self.runs.range_mut(..address).next_back()
            && run.end > address
        {
            let rest = *run;
            run.end = address;
            self.runs.insert(address, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::pages::page_bytes;
    use proptest::prelude::*;

    fn pages_of(range: PageRange) -> std::ops::Range<usize> {
        range.start() / page_bytes()..range.end() / page_bytes()
    }

    proptest! {
        #[test]
        fn pages_become_free_when_the_last_range_over_them_is_removed(
            steps in proptest::collection::vec((1usize..40, 1usize..20, any::<bool>()), 1..80),
        ) {
            let (mut refcounts, mut counts, mut added) = (PageRefcounts::default(), [0usize; 64], Vec::new());
            for (start, pages, remove) in steps {
                if remove && !added.is_empty() {
                    let range: PageRange = added.swap_remove(start % added.len());
                    let mut expected = Vec::new();
                    for (page, count) in counts[pages_of(range)].iter_mut().enumerate() {
                        *count -= 1;
                        expected.extend((*count == 0).then_some(pages_of(range).start + page));
                    }
                    let free: Vec<usize> = refcounts
                        .remove(range)
                        .iter()
                        .flat_map(|range| pages_of(*range))
                        .collect();
                    prop_assert_eq!(free, expected);
                } else {
                    let length = pages * page_bytes();
                    let range = PageRange::covering(start * page_bytes(), length).unwrap();
                    refcounts.add(range);
                    counts[start..start + pages].iter_mut().for_each(|count| *count += 1);
                    added.push(range);
                }
            }
            for range in added {
                refcounts.remove(range);
            }
            prop_assert!(refcounts.runs.is_empty());
        }
    }
}
