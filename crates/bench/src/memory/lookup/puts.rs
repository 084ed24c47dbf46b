//! Puts of one size with a given share of misses: the time that a miss adds to a put, and the
//! bandwidth that remains with many misses.

use super::command::{LookupMode, PutPattern};
use super::compare::{CACHE, EndpointTask, FULL, compare};
use super::session::TranslationSession;
use super::workload::{Problem, ProgramKind};
use crate::Effort;
use crate::harness::{Budget, set};
use crate::replay::CacheShape;
use crate::results::outcome::{Outcome, Row};

/// Lines that are always in the cache.
const HOT_LINES: u64 = 8;
/// Distance between puts to the same line.
const PART_BYTES: u64 = 64 << 10;
/// Size of the window in MiB: several times what the cache covers.
const WINDOW_MEGABYTES: usize = 256;

/// Offsets of puts. Lines that are to miss are used in a circle that is larger than the cache, so
/// that each is evicted before its next use.
pub(super) struct PutOffsets {
    pattern: PutPattern,
    lines: u64,
    number: u64,
    misses: u64,
    due_percent: usize,
}

impl PutOffsets {
    pub(super) fn new(pattern: PutPattern, window_bytes: u64) -> Self {
        let lines = window_bytes / CacheShape::REFERENCE.line_bytes();
        Self { pattern, lines, number: 0, misses: 0, due_percent: 0 }
    }

    /// Returns the offset of the next put.
    pub(super) fn next(&mut self) -> u64 {
        self.number += 1;
        self.due_percent += self.pattern.miss_percent;
        let line_bytes = CacheShape::REFERENCE.line_bytes();
        let line = if self.due_percent >= 100 {
            self.due_percent -= 100;
            self.misses += 1;
            HOT_LINES + self.misses % (self.lines - HOT_LINES)
        } else {
            self.number % HOT_LINES
        };
        // Another part of the line each time. The first part of the first line begins with the
        // variables of the barriers, by which the other members wait.
        let parts = line_bytes / PART_BYTES;
        let part = (self.number % parts).max(u64::from(line == 0));
        line * line_bytes + part * PART_BYTES
    }
}

/// What is measured: sizes, shares of misses in percent, and rounds.
pub(super) struct PutPlan {
    sizes: &'static [usize],
    miss_percents: &'static [usize],
    rounds: usize,
}

impl PutPlan {
    /// Puts that hit, at the two sizes of the summary keys.
    pub(super) const HITS: Self = Self { sizes: &[8, 64 << 10], miss_percents: &[0], rounds: 9 };

    pub(super) fn of(effort: Effort) -> Self {
        let (sizes, miss_percents, rounds): (&[usize], &[usize], usize) = match effort {
            Effort::Brief => (&[8, 64 << 10], &[0, 100], 3),
            Effort::Quick => (&[8, 4 << 10, 64 << 10], &[0, 10, 50, 100], 5),
            Effort::Full => {
                (&[8, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10], &[0, 10, 25, 50, 75, 100], 9)
            }
        };
        Self { sizes, miss_percents, rounds }
    }
}

/// Measures puts by size, with several shares of misses, over the cache and the full table.
pub(super) fn measure(
    session: &mut TranslationSession,
    plan: &PutPlan,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    session.begin(Problem { kind: ProgramKind::Random, scale: WINDOW_MEGABYTES })?;
    let endpoints = [session.open(LookupMode::Full)?, session.open(LookupMode::REFERENCE)?];
    for &bytes in plan.sizes {
        for &miss_percent in plan.miss_percents {
            let count = if bytes > 8 << 10 { 512 } else { 2048 };
            let puts = EndpointTask::Puts(PutPattern { bytes, miss_percent, count });
            let budget = Budget::fixed(plan.rounds, count as u64);
            let samples = compare(session, endpoints, puts, budget)?;
            // The full table never misses; it gets the same offsets.
            for (name, misses) in [(FULL, "other places"), (CACHE, "misses")] {
                let series = format!("{name}, {miss_percent} % {misses}");
                let times = samples.values(name, |sample| sample.total_ns);
                let speeds = samples.values(name, |sample| bytes as f64 / sample.total_ns);
                outcome.rows.extend([
                    Row::of_rounds("time of a put", &series, bytes as u64, "ns", &times),
                    Row::of_rounds("bandwidth of puts", &series, bytes as u64, "GB/s", &speeds),
                ]);
            }
            let key = match (bytes, miss_percent) {
                (8, 0) => "put_8b_vs_full",
                (0x1_0000, 0) => "put_64k_vs_full",
                _ => continue,
            };
            set(&mut outcome.summary, key, samples.ratio(CACHE, FULL));
        }
    }
    session.end()
}

#[cfg(test)]
mod tests {
    use super::super::windows::HEADER_BYTES;
    use super::*;

    #[test]
    fn so_many_of_a_hundred_puts_leave_the_hot_lines() {
        for miss_percent in [0, 10, 25, 50, 75, 100] {
            let pattern = PutPattern { bytes: 64 << 10, miss_percent, count: 1000 };
            let window = (WINDOW_MEGABYTES as u64) << 20;
            let mut places = PutOffsets::new(pattern, window);
            let hot = HOT_LINES * CacheShape::REFERENCE.line_bytes();
            let offsets: Vec<_> = (0..1000).map(|_| places.next()).collect();
            assert_eq!(offsets.iter().filter(|&&at| at >= hot).count(), 10 * miss_percent);
            assert!(offsets.iter().all(|at| at + (64 << 10) <= window));
        }
    }

    #[test]
    fn no_put_lands_on_the_variables_of_the_barriers() {
        for miss_percent in [0, 50, 100] {
            let pattern = PutPattern { bytes: 8, miss_percent, count: 1000 };
            let mut places = PutOffsets::new(pattern, (WINDOW_MEGABYTES as u64) << 20);
            assert!((0..1000).all(|_| places.next() >= HEADER_BYTES as u64), "{miss_percent} %");
        }
    }

    #[test]
    fn a_cold_line_comes_again_only_after_more_lines_than_the_cache_has() {
        let pattern = PutPattern { bytes: 8, miss_percent: 100, count: 1000 };
        let mut places = PutOffsets::new(pattern, (WINDOW_MEGABYTES as u64) << 20);
        let line = |at: u64| at / CacheShape::REFERENCE.line_bytes();
        let first = line(places.next());
        let again = (1..).find(|_| line(places.next()) == first).unwrap();
        assert!(again > CacheShape::REFERENCE.geometry().lines());
    }
}
