//! What a lookup costs by itself, without windows: a hit from one thread and from two, a miss that
//! the caller handles and one that the miss thread handles, and how misses are distributed.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memferry_memory::handle::{ProcessHandle, VirtualMemoryHandle};
use memferry_memory::lookup::{Counters, LineName, Lookup, Refused, Route, Settings, Source};

use super::order::Spread;
use super::shape::Shape;
use crate::bench::Effort;
use crate::bench::measure::{Contestant, Patience, contest};
use crate::outcome::Row;

/// A source for which every page has memory, at no cost: what is measured is the lookup.
struct Given;

impl Source for Given {
    fn attach(&self, _: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        entries.fill(GIVEN);
        Ok(())
    }

    fn detach(&self, _: LineName, _: &[u64]) {}
}

/// The series of the key.
const HIT: &str = "cache, one thread";
/// The entry of every page.
const GIVEN: u64 = 8;
/// Lookups in one measured run.
const BATCH: usize = 1024;
/// Lines that hits go to in turn.
const HOT_LINES: u64 = 16;

/// What was found.
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    pub(super) hit_ns: f64,
}

struct Bench {
    lookup: Lookup<Given>,
    process: ProcessHandle,
}

impl Bench {
    fn new(settings: Settings) -> anyhow::Result<Self> {
        let lookup = Lookup::new(settings, Given)?;
        let process = lookup.add_process()?;
        lookup.prepare(process, 0, HOT_LINES * Shape::TELLING.line_bytes())?;
        Ok(Self { lookup, process })
    }

    fn at(&self, line: u64, page: u64) -> VirtualMemoryHandle {
        let address = line * Shape::TELLING.line_bytes() + page * 4096;
        VirtualMemoryHandle { process: self.process, address }
    }

    /// Places in some lines, one after the other.
    fn places(&self, first_line: u64, lines: u64) -> Vec<VirtualMemoryHandle> {
        (0..BATCH as u64).map(|n| self.at(first_line + n % lines, n * 7 % 64)).collect()
    }

    /// Finds a page and lets it go again, at every place, by the call that accesses to windows make.
    /// All must be there.
    fn hit(&self, places: &[VirtualMemoryHandle]) {
        let mut entries = 0;
        for place in places {
            // Nothing is done with a failure here that would keep the result in memory.
            if let Ok(found) = self.lookup.translate(*place, Route::Receive) {
                entries += found.entry();
            }
        }
        assert_eq!(entries, GIVEN * places.len() as u64, "a hit was expected");
    }

    /// The same by the call that never waits.
    fn hit_now(&self, places: &[VirtualMemoryHandle]) {
        let mut entries = 0;
        for place in places {
            if let Ok(Some(found)) = self.lookup.find(*place, Route::Receive) {
                entries += found.entry();
            }
        }
        assert_eq!(entries, GIVEN * places.len() as u64, "a hit was expected");
    }

    /// Brings lines into the cache.
    fn warm(&self, lines: u64) {
        for line in 0..lines {
            drop(self.lookup.translate(self.at(line, 0), Route::Receive));
        }
    }

    /// Looks up lines in a circle that begins behind the hot ones; the time of one lookup.
    fn miss(&self, lines: u64, next: &mut u64) -> f64 {
        let places: Vec<_> =
            (0..BATCH as u64).map(|n| self.at(HOT_LINES + (*next + n) % lines, 0)).collect();
        *next += BATCH as u64;
        let begin = Instant::now();
        for place in places {
            drop(black_box(self.lookup.translate(place, Route::Send)));
        }
        begin.elapsed().as_nanos() as f64 / BATCH as f64
    }
}

/// What nobody can do without who counts the users of a line: one more, and one less.
#[derive(Default)]
struct Floor {
    lines: [Line; HOT_LINES as usize],
}

#[derive(Default)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Floor {
    fn hit(&self) {
        for number in 0..BATCH {
            let line = &self.lines[number % self.lines.len()];
            black_box(line.0.fetch_add(1, Ordering::Acquire));
            black_box(line.0.fetch_sub(1, Ordering::Release));
        }
    }
}

/// Measures everything.
pub(super) fn measure(effort: Effort) -> anyhow::Result<Found> {
    let cached = Settings::dynamic(Shape::TELLING.geometry());
    let (cache, full) = (Bench::new(cached)?, Bench::new(Settings::full())?);
    cache.warm(HOT_LINES);
    let floor = Floor::default();
    let mut rows = Vec::new();
    let (full_places, cache_places) = (full.places(0, HOT_LINES), cache.places(0, HOT_LINES));
    let times = contest(
        vec![
            Contestant::new("full table, one thread", || full.hit(&full_places)),
            Contestant::new(HIT, || cache.hit(&cache_places)),
            Contestant::new("cache, one thread, find", || cache.hit_now(&cache_places)),
            Contestant::new("two locked additions alone", || floor.hit()),
        ],
        Patience::of(effort),
    );
    let mut hit_ns = f64::NAN;
    for mut row in times.time_rows("find and release, hit", 0) {
        for value in [&mut row.value, &mut row.low, &mut row.high] {
            *value /= BATCH as f64;
        }
        if row.series == HIT {
            hit_ns = row.value;
        }
        rows.push(row);
    }
    rows.extend(two_threads(&cache, effort));
    rows.extend(misses(effort)?);
    Ok(Found { rows, hit_ns })
}

/// Hits from two threads at once: on lines of their own, and on the same line.
fn two_threads(cache: &Bench, effort: Effort) -> Vec<Row> {
    let rounds = Patience::of(effort).rounds;
    let half = HOT_LINES / 2;
    let time = |first: [u64; 2], lines: u64| -> Vec<f64> {
        let one = || {
            let barrier = Barrier::new(2);
            let run = |first: u64| {
                let places = cache.places(first, lines);
                cache.hit(&places);
                barrier.wait();
                let begin = Instant::now();
                for _ in 0..100 {
                    cache.hit(&places);
                }
                begin.elapsed().as_nanos() as f64 / (100 * BATCH) as f64
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(|| run(first[1]));
                let own = run(first[0]);
                let other = other.join().expect("the thread does not panic");
                (own + other) / 2.0
            })
        };
        (0..rounds).map(|_| one()).collect()
    };
    let row = |series: &str, times: &[f64]| {
        Row::of_rounds("find and release, hit", series, 0, "ns", times)
    };
    vec![
        row("cache, two threads, lines of their own", &time([0, half], half)),
        row("cache, two threads, the same line", &time([0, 0], 1)),
    ]
}

/// Misses of lines that have been there before, and of lines that never were.
fn misses(effort: Effort) -> anyhow::Result<Vec<Row>> {
    let rounds = Patience::of(effort).rounds;
    let cached = Settings::dynamic(Shape::TELLING.geometry());
    // More than the cache holds, so that each has left when it comes again.
    let circle = 2 * Shape::TELLING.geometry().lines() as u64;
    let mut rows = Vec::new();
    for (who, helping) in [("the caller", true), ("the miss thread", false)] {
        let bench = Bench::new(Settings { helping, ..cached })?;
        let mut next = 0;
        // Around once, so that all lines are attached.
        bench.miss(circle, &mut next);
        let times: Vec<f64> = (0..rounds).map(|_| bench.miss(circle, &mut next)).collect();
        let series = format!("handled by {who}");
        rows.push(Row::of_rounds("find and release, miss", &series, 0, "ns", &times));
        let counters = bench.lookup.counters();
        rows.extend(spread_rows(&series, &counters));
    }
    let mut first = Vec::new();
    for _ in 0..rounds {
        first.push(Bench::new(cached)?.miss(BATCH as u64, &mut 0));
    }
    let series = "handled by the caller, first use";
    rows.push(Row::of_rounds("find and release, miss", series, 0, "ns", &first));
    Ok(rows)
}

/// How the parts of misses are distributed.
fn spread_rows(series: &str, counters: &Counters) -> Vec<Row> {
    let parts = [
        ("delay of a miss", Spread::from(counters.delay_ns)),
        ("processing of a miss", Spread::from(counters.processing_ns)),
    ];
    parts.iter().flat_map(|(part, spread)| rows_of_spread(part, series, *spread)).collect()
}

/// Median and ninth tenth of a distribution.
pub(super) fn rows_of_spread(part: &str, series: &str, spread: Spread) -> Vec<Row> {
    let row = |what: &str, value: u64| {
        Row::of_rounds(part, &format!("{series}, {what}"), 0, "ns", &[value as f64])
    };
    if spread.count == 0 {
        return Vec::new();
    }
    vec![row("median", spread.median), row("90 % at most", spread.percentile_90)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_hits_and_misses_are_misses() {
        let bench = Bench::new(Settings::dynamic(Shape::TELLING.geometry())).unwrap();
        bench.warm(HOT_LINES);
        bench.hit(&bench.places(0, HOT_LINES));
        bench.hit_now(&bench.places(0, HOT_LINES));
        let counters = bench.lookup.counters();
        assert_eq!(counters.hits.receive, 2 * BATCH as u64);
        assert_eq!(counters.misses.receive.total(), HOT_LINES);
        let mut next = 0;
        let circle = 2 * Shape::TELLING.geometry().lines() as u64;
        (0..4).for_each(|_| _ = bench.miss(circle, &mut next));
        let counters = bench.lookup.counters();
        assert_eq!(counters.misses.send.total(), 4 * BATCH as u64);
        assert_eq!(counters.misses.send.cold, circle);
        assert_eq!(counters.hits.send, 0);
    }
}
