//! Puts of one size with misses in between, as many as wanted: what a miss adds to the time of a
//! put, and what many of them leave of the bandwidth.

use super::order::{Pattern, Table};
use super::session::Session;
use super::shape::Shape;
use super::workload::{Kind, Problem};
use crate::bench::Effort;
use crate::outcome::Row;

/// Lines that the cache always has.
const HOT_LINES: u64 = 8;
/// The window: several times what the cache covers.
const WINDOW_MEGABYTES: usize = 256;

const FULL: &str = "full table";
const CACHE: &str = "cache";

/// Where puts go. Lines that are not in the cache are visited in a circle that is larger than the
/// cache, so that each of them has left it when its turn comes again.
pub(super) struct Places {
    pattern: Pattern,
    lines: u64,
    number: u64,
    misses: u64,
    due_percent: usize,
}

impl Places {
    pub(super) fn new(pattern: Pattern, window_bytes: u64) -> Self {
        let lines = window_bytes / Shape::TELLING.line_bytes();
        Self { pattern, lines, number: 0, misses: 0, due_percent: 0 }
    }

    /// The offset of the next put.
    pub(super) fn next(&mut self) -> u64 {
        self.number += 1;
        self.due_percent += self.pattern.miss_percent;
        let line_bytes = Shape::TELLING.line_bytes();
        let line = if self.due_percent >= 100 {
            self.due_percent -= 100;
            self.misses += 1;
            HOT_LINES + self.misses % (self.lines - HOT_LINES)
        } else {
            self.number % HOT_LINES
        };
        // Behind the header, and in another part of the line each time.
        let parts = line_bytes / (64 << 10);
        line * line_bytes + self.number % parts * (64 << 10)
    }
}

/// The rows of puts by size, with several shares of misses, over the cache and the full table.
pub(super) fn rows(session: &mut Session, effort: Effort) -> anyhow::Result<Vec<Row>> {
    let (sizes, shares, rounds): (&[usize], &[usize], usize) = match effort {
        Effort::Brief => (&[8, 64 << 10], &[0, 100], 3),
        Effort::Quick => (&[8, 4 << 10, 64 << 10], &[0, 10, 50, 100], 5),
        Effort::Full => {
            (&[8, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10], &[0, 10, 25, 50, 75, 100], 9)
        }
    };
    session.begin(Problem { kind: Kind::Random, scale: WINDOW_MEGABYTES })?;
    let tables = [(FULL, session.open(Table::Full)?), (CACHE, session.open(Table::TELLING)?)];
    let mut rows = Vec::new();
    for &bytes in sizes {
        for &miss_percent in shares {
            let count = if bytes > 8 << 10 { 512 } else { 2048 };
            let pattern = Pattern { bytes, miss_percent, count };
            let mut times = [Vec::new(), Vec::new()];
            for round in 0..rounds {
                for turn in 0..2 {
                    let which = (round + turn) % 2;
                    times[which].push(session.put(tables[which].1, pattern)?);
                }
            }
            for ((name, _), times) in tables.iter().zip(&times) {
                // The full table never misses; it is asked for the same places.
                let misses = if *name == CACHE { "misses" } else { "other places" };
                let series = format!("{name}, {miss_percent} % {misses}");
                rows.push(Row::of_rounds("time of a put", &series, bytes as u64, "ns", times));
                let speeds: Vec<_> = times.iter().map(|ns| bytes as f64 / ns).collect();
                let figure = "bandwidth of puts";
                rows.push(Row::of_rounds(figure, &series, bytes as u64, "GB/s", &speeds));
            }
        }
    }
    session.end()?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_of_a_hundred_puts_leave_the_hot_lines() {
        for miss_percent in [0, 10, 25, 50, 75, 100] {
            let pattern = Pattern { bytes: 64 << 10, miss_percent, count: 1000 };
            let window = (WINDOW_MEGABYTES as u64) << 20;
            let mut places = Places::new(pattern, window);
            let hot = HOT_LINES * Shape::TELLING.line_bytes();
            let offsets: Vec<_> = (0..1000).map(|_| places.next()).collect();
            assert_eq!(offsets.iter().filter(|&&at| at >= hot).count(), 10 * miss_percent);
            assert!(offsets.iter().all(|at| at + (64 << 10) <= window));
        }
    }

    #[test]
    fn a_cold_line_comes_again_only_after_more_lines_than_the_cache_has() {
        let pattern = Pattern { bytes: 8, miss_percent: 100, count: 1000 };
        let mut places = Places::new(pattern, (WINDOW_MEGABYTES as u64) << 20);
        let line = |at: u64| at / Shape::TELLING.line_bytes();
        let first = line(places.next());
        let again = (1..).find(|_| line(places.next()) == first).unwrap();
        assert!(again > Shape::TELLING.geometry().lines());
    }
}
