//! Memory that was just discarded, or is about to be: pins of it are not kept for a while.
//!
//! The event of a discard is read before the pages go, so a pin made in between holds pages that are
//! about to be replaced. The list is bounded; what does not fit puts all memory under quarantine.

use crate::pinning::PageRange;

/// How long the pins of discarded memory are not kept.
pub(super) const QUARANTINE_NS: u64 = 100_000_000;

/// How many ranges are remembered one by one.
const MOST_RANGES: usize = 64;

/// Ranges, and until when.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    ranges: Vec<(PageRange, u64)>,
    all_until_ns: u64,
}

impl Quarantine {
    /// Puts a range, or all memory, under quarantine from now on.
    pub(super) fn add(&mut self, range: Option<PageRange>, now_ns: u64) {
        let until_ns = now_ns + QUARANTINE_NS;
        self.expire(now_ns);
        match range {
            Some(range) if self.ranges.len() < MOST_RANGES => self.ranges.push((range, until_ns)),
            _ => {
                self.ranges.clear();
                self.all_until_ns = until_ns;
            }
        }
    }

    /// Whether nothing is under quarantine, without a look at the clock.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.all_until_ns == 0
    }

    /// Whether a part of `range` is under quarantine.
    pub(super) fn holds(&mut self, range: PageRange, now_ns: u64) -> bool {
        self.expire(now_ns);
        self.all_until_ns != 0 || self.ranges.iter().any(|(held, _)| held.overlaps(range))
    }

    fn expire(&mut self, now_ns: u64) {
        self.ranges.retain(|&(_, until_ns)| until_ns > now_ns);
        if self.all_until_ns <= now_ns {
            self.all_until_ns = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::pages::page_bytes;

    fn page(number: usize) -> PageRange {
        PageRange::covering(number * page_bytes(), 1).unwrap()
    }

    #[test]
    fn a_range_is_held_for_its_time_and_no_longer() {
        let mut quarantine = Quarantine::default();
        quarantine.add(Some(page(5)), 1000);
        assert!(quarantine.holds(page(5), 1000 + QUARANTINE_NS - 1));
        assert!(!quarantine.holds(page(6), 1000));
        assert!(!quarantine.holds(page(5), 1000 + QUARANTINE_NS));
        assert!(quarantine.is_empty());
    }

    #[test]
    fn more_ranges_than_fit_put_everything_under_quarantine() {
        let mut quarantine = Quarantine::default();
        for number in 1..=MOST_RANGES + 1 {
            assert!(!quarantine.holds(page(500), 7));
            quarantine.add(Some(page(number)), 7);
        }
        assert!(quarantine.holds(page(500), 7) && quarantine.holds(page(1), 7));
        assert!(!quarantine.holds(page(500), 7 + QUARANTINE_NS));
    }
}
