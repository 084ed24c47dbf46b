//! Quarantine of discarded memory: pins of it are not cached for 100 ms.
//!
//! The event of a discard is read before the pages are discarded, so a pin made in between refers
//! to pages that are about to be replaced. The list is bounded; on overflow all memory is in
//! quarantine.

use crate::pinning::PageRange;

/// Duration of the quarantine, in nanoseconds.
pub(super) const QUARANTINE_NS: u64 = 100_000_000;

/// Maximum number of individual ranges.
const MAX_RANGES: usize = 64;

/// Ranges with the time of their expiry, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    ranges: Vec<(PageRange, u64)>,
    all_until_ns: u64,
}

impl Quarantine {
    /// Puts a range, or all memory (`None`), into quarantine.
    pub(super) fn add(&mut self, range: Option<PageRange>, now_ns: u64) {
        let until_ns = now_ns + QUARANTINE_NS;
        self.expire(now_ns);
        match range {
            Some(range) if self.ranges.len() < MAX_RANGES => self.ranges.push((range, until_ns)),
            _ => {
                self.ranges.clear();
                self.all_until_ns = until_ns;
            }
        }
    }

    /// Whether the quarantine is empty, without reading the clock.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.all_until_ns == 0
    }

    /// Whether a part of `range` is in quarantine.
    pub(super) fn contains(&mut self, range: PageRange, now_ns: u64) -> bool {
        self.expire(now_ns);
        self.all_until_ns != 0
            || self.ranges.iter().any(|(quarantined, _)| quarantined.overlaps(range))
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
        assert!(quarantine.contains(page(5), 1000 + QUARANTINE_NS - 1));
        assert!(!quarantine.contains(page(6), 1000));
        assert!(!quarantine.contains(page(5), 1000 + QUARANTINE_NS));
        assert!(quarantine.is_empty());
    }

    #[test]
    fn more_ranges_than_fit_put_everything_under_quarantine() {
        let mut quarantine = Quarantine::default();
        for number in 1..=MAX_RANGES + 1 {
            assert!(!quarantine.contains(page(500), 7));
            quarantine.add(Some(page(number)), 7);
        }
        assert!(quarantine.contains(page(500), 7) && quarantine.contains(page(1), 7));
        assert!(!quarantine.contains(page(500), 7 + QUARANTINE_NS));
    }
}
