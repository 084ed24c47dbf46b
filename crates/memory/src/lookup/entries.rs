//! The translations of a line: one word for each page, or a rule for all of them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Translations that follow from one another, so that they need not be stored one by one. Pages of
/// the line outside of `pages` have no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineRun {
    /// The entry of the first page of `pages`; not 0.
    pub first: u64,
    /// The difference between the entries of two consecutive pages.
    pub step: u64,
    /// The pages that have an entry, counted from the first page of the line.
    pub pages: Range<usize>,
}

impl LineRun {
    #[inline]
    fn entry(&self, page: usize) -> u64 {
        if self.pages.contains(&page) {
            self.first.wrapping_add(((page - self.pages.start) as u64).wrapping_mul(self.step))
        } else {
            0
        }
    }
}

/// The translations of a line. They do not change while the line is attached.
#[derive(Debug)]
pub(crate) enum LineEntries {
    Pages(Box<[u64]>),
    Run(LineRun),
}

impl LineEntries {
    /// The entry of a page; 0 if it has no memory.
    #[inline(always)]
    pub(crate) fn entry(&self, page: usize) -> u64 {
        match self {
            Self::Pages(entries) => entries[page],
            Self::Run(run) => run.entry(page),
        }
    }

    /// The number of pages from `page` whose entries differ by `step`, at most `max` pages.
    #[inline]
    pub(crate) fn run_length(&self, page: usize, step: u64, max: usize) -> usize {
        match self {
            Self::Run(run) if run.step == step && run.pages.contains(&page) => {
                (run.pages.end - page).min(max)
            }
            _ => consecutive(|page| self.entry(page), page, step, max),
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        match self {
            Self::Pages(entries) => size_of_val(&**entries),
            Self::Run(_) => 0,
        }
    }
}

/// The number of pages from `page` whose entries differ by `step`, at most `max` pages.
pub(crate) fn consecutive(
    entry: impl Fn(usize) -> u64,
    page: usize,
    step: u64,
    max: usize,
) -> usize {
    let first = entry(page);
    let follows = |count: &usize| {
        entry(page + count) == first.wrapping_add((*count as u64).wrapping_mul(step))
    };
    1 + (1..max).take_while(follows).count()
}

/// An attached line, as readers see it. Its address names the line in slots and cells.
#[derive(Debug)]
pub(crate) struct SharedLine {
    pub(crate) entries: LineEntries,
    /// The tick of the last use; 0 before the first one. Independent of the synchronisation.
    last_use: AtomicU64,
}

impl SharedLine {
    pub(crate) fn new(entries: LineEntries, last_use: u64) -> Self {
        Self { entries, last_use: AtomicU64::new(last_use) }
    }

    /// Records the tick of a use.
    #[inline(always)]
    pub(crate) fn record_use(&self, tick: u64) {
        // Most uses have the same tick as the one before, and then the cache line is not written.
        if self.last_use.load(Ordering::Relaxed) != tick {
            self.last_use.store(tick, Ordering::Relaxed);
        }
    }

    /// The tick of the last use.
    pub(crate) fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> LineEntries {
        LineEntries::Run(LineRun { first: 0x1003, step: 0x1000, pages: 2..6 })
    }

    #[test]
    fn a_run_has_the_entries_that_a_list_has() {
        let list = LineEntries::Pages([0, 0, 0x1003, 0x2003, 0x3003, 0x4003, 0, 0].into());
        for page in 0..8 {
            assert_eq!(run().entry(page), list.entry(page));
            for max in 1..=8 - page {
                let lengths = [&run(), &list].map(|line| line.run_length(page, 0x1000, max));
                assert_eq!(lengths[0], lengths[1], "page {page}, at most {max}");
            }
        }
        assert_eq!(run().run_length(3, 0x1000, 8), 3);
        assert_eq!(run().run_length(3, 0x1000, 2), 2);
        assert_eq!(run().run_length(3, 0x2000, 4), 1);
    }

    #[test]
    fn a_run_needs_no_memory_for_its_entries() {
        assert_eq!(run().memory_bytes(), 0);
        assert_eq!(LineEntries::Pages([1; 64].into()).memory_bytes(), 512);
    }
}
