//! Cost of a lookup alone, without windows: a hit from one thread and from two, a miss that the
//! caller handles and one that the miss thread handles, and the distribution of misses.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memferry_memory::handle::{ProcessAddress, ProcessHandle};
use memferry_memory::lookup::{
    AttachError, DataPath, LineKey, Lookup, LookupConfig, LookupCounters, TranslationBackend,
};

use super::command::Quantiles;
use crate::Effort;
use crate::harness::{Budget, FnCandidate, Harness, Role, Sample, median};
use crate::replay::CacheShape;
use crate::results::outcome::Row;

/// A backend that has an entry for every page at no cost, so that only the lookup is measured.
struct ConstantSource;

impl TranslationBackend for ConstantSource {
    fn attach(&self, _: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        entries.fill(CONSTANT_ENTRY);
        Ok(())
    }

    fn detach(&self, _: LineKey, _: &[u64]) {}
}

/// Series of the summary key.
const HIT: &str = "cache, one thread";
/// Entry of every page.
const CONSTANT_ENTRY: u64 = 8;
/// Lookups in one measured run.
const BATCH: usize = 1024;
/// Number of lines that the hits use.
const HOT_LINES: u64 = 16;

/// Results of the measurement.
pub(super) struct CostResults {
    pub(super) rows: Vec<Row>,
    pub(super) hit_ns: f64,
}

struct LookupBench {
    lookup: Lookup<ConstantSource>,
    process: ProcessHandle,
}

impl LookupBench {
    fn new(settings: LookupConfig) -> anyhow::Result<Self> {
        let lookup = Lookup::new(settings, ConstantSource)?;
        let process = lookup.add_process()?;
        lookup.preload(process, 0, HOT_LINES * CacheShape::REFERENCE.line_bytes())?;
        Ok(Self { lookup, process })
    }

    fn at(&self, line: u64, page: u64) -> ProcessAddress {
        let address = line * CacheShape::REFERENCE.line_bytes() + page * 4096;
        ProcessAddress { process: self.process, address }
    }

    /// Addresses in a range of lines, with consecutive addresses in different lines.
    fn handles(&self, first_line: u64, lines: u64) -> Vec<ProcessAddress> {
        (0..BATCH as u64).map(|n| self.at(first_line + n % lines, n * 7 % 64)).collect()
    }

    /// Finds and releases the page of every address, by the call that accesses to windows use. All
    /// lookups must hit.
    fn hit(&self, places: &[ProcessAddress]) {
        let mut entries = 0;
        for place in places {
            // A failure is ignored here, because handling it would keep the result in memory
            // instead of registers.
            if let Ok(found) = self.lookup.translate(*place, DataPath::Receive) {
                entries += found.entry();
            }
        }
        assert_eq!(entries, CONSTANT_ENTRY * places.len() as u64, "a hit was expected");
    }

    /// Finds and releases the page of every address, by the call that never waits.
    fn hit_nonblocking(&self, places: &[ProcessAddress]) {
        let mut entries = 0;
        for place in places {
            if let Ok(Some(found)) = self.lookup.find(*place, DataPath::Receive) {
                entries += found.entry();
            }
        }
        assert_eq!(entries, CONSTANT_ENTRY * places.len() as u64, "a hit was expected");
    }

    /// Loads lines into the cache.
    fn prefetch(&self, lines: u64) {
        for line in 0..lines {
            drop(self.lookup.translate(self.at(line, 0), DataPath::Receive));
        }
    }

    /// Looks up lines in a circle that starts after the hot lines. Returns the time of one lookup.
    fn miss(&self, lines: u64, next: &mut u64) -> f64 {
        let places: Vec<_> =
            (0..BATCH as u64).map(|n| self.at(HOT_LINES + (*next + n) % lines, 0)).collect();
        *next += BATCH as u64;
        let begin = Instant::now();
        for place in places {
            drop(black_box(self.lookup.translate(place, DataPath::Send)));
        }
        begin.elapsed().as_nanos() as f64 / BATCH as f64
    }
}

/// Lower bound of every lookup that counts the users of a line: one atomic increment and one
/// decrement.
#[derive(Default)]
struct RefcountBaseline {
    lines: [PaddedRefcount; HOT_LINES as usize],
}

#[derive(Default)]
#[repr(align(64))]
struct PaddedRefcount(AtomicU64);

impl RefcountBaseline {
    fn hit(&self) {
        for number in 0..BATCH {
            let line = &self.lines[number % self.lines.len()];
            black_box(line.0.fetch_add(1, Ordering::Acquire));
            black_box(line.0.fetch_sub(1, Ordering::Release));
        }
    }
}

/// Measures all costs.
pub(super) fn measure(effort: Effort) -> anyhow::Result<CostResults> {
    let cached = LookupConfig::cached(CacheShape::REFERENCE.geometry());
    let (cache, full) = (LookupBench::new(cached)?, LookupBench::new(LookupConfig::flat())?);
    cache.prefetch(HOT_LINES);
    let floor = RefcountBaseline::default();
    let mut rows = Vec::new();
    let (full_places, cache_places) = (full.handles(0, HOT_LINES), cache.handles(0, HOT_LINES));
    let mut candidates = [
        FnCandidate::new("full table, one thread", Role::Peer, || full.hit(&full_places)),
        FnCandidate::new(HIT, Role::Memferry, || cache.hit(&cache_places)),
        FnCandidate::new("cache, one thread, find", Role::Memferry, || {
            cache.hit_nonblocking(&cache_places);
        }),
        FnCandidate::new("two locked additions alone", Role::LowerBound, || floor.hit()),
    ];
    let samples = Harness::new(Budget::of_calls(effort)).interleave(&mut candidates);
    let of_one = |sample: &Sample| sample.total_ns / BATCH as f64;
    rows.extend(samples.rows("find and release, hit", 0, "ns", of_one));
    let hit_ns = median(samples.values(HIT, of_one));
    rows.extend(two_threads(&cache, effort));
    rows.extend(misses(effort)?);
    Ok(CostResults { rows, hit_ns })
}

/// Measures hits from two threads at once: on separate lines, and on the same line.
fn two_threads(cache: &LookupBench, effort: Effort) -> Vec<Row> {
    let rounds = Budget::of_calls(effort).rounds;
    let half = HOT_LINES / 2;
    let time = |first: [u64; 2], lines: u64| -> Vec<f64> {
        let one = || {
            let barrier = Barrier::new(2);
            let run = |first: u64| {
                let places = cache.handles(first, lines);
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

/// Measures misses of lines that were attached before, and of lines that never were.
fn misses(effort: Effort) -> anyhow::Result<Vec<Row>> {
    let rounds = Budget::of_calls(effort).rounds;
    let cached = LookupConfig::cached(CacheShape::REFERENCE.geometry());
    // More lines than the cache holds, so that each is evicted before its next lookup.
    let circle = 2 * CacheShape::REFERENCE.geometry().lines() as u64;
    let mut rows = Vec::new();
    for (who, helping) in [("the caller", true), ("the miss thread", false)] {
        let bench = LookupBench::new(LookupConfig { inline_misses: helping, ..cached })?;
        let mut next = 0;
        // One untimed circle attaches all lines.
        bench.miss(circle, &mut next);
        let times: Vec<f64> = (0..rounds).map(|_| bench.miss(circle, &mut next)).collect();
        let series = format!("handled by {who}");
        rows.push(Row::of_rounds("find and release, miss", &series, 0, "ns", &times));
        let counters = bench.lookup.counters();
        rows.extend(spread_rows(&series, &counters));
    }
    let mut first = Vec::new();
    for _ in 0..rounds {
        first.push(LookupBench::new(cached)?.miss(BATCH as u64, &mut 0));
    }
    let series = "handled by the caller, first use";
    rows.push(Row::of_rounds("find and release, miss", series, 0, "ns", &first));
    Ok(rows)
}

/// Rows about the distribution of the parts of misses.
fn spread_rows(series: &str, counters: &LookupCounters) -> Vec<Row> {
    let parts = [
        ("delay of a miss", Quantiles::from(counters.delay_ns)),
        ("processing of a miss", Quantiles::from(counters.processing_ns)),
    ];
    parts.iter().flat_map(|(part, spread)| quantile_rows(part, series, *spread)).collect()
}

/// Rows with the median and the 0.9 quantile of a distribution.
pub(super) fn quantile_rows(part: &str, series: &str, spread: Quantiles) -> Vec<Row> {
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
        let bench =
            LookupBench::new(LookupConfig::cached(CacheShape::REFERENCE.geometry())).unwrap();
        bench.prefetch(HOT_LINES);
        bench.hit(&bench.handles(0, HOT_LINES));
        bench.hit_nonblocking(&bench.handles(0, HOT_LINES));
        let counters = bench.lookup.counters();
        assert_eq!(counters.hits.receive, 2 * BATCH as u64);
        assert_eq!(counters.misses.receive.total(), HOT_LINES);
        let mut next = 0;
        let circle = 2 * CacheShape::REFERENCE.geometry().lines() as u64;
        (0..4).for_each(|_| _ = bench.miss(circle, &mut next));
        let counters = bench.lookup.counters();
        assert_eq!(counters.misses.send.total(), 4 * BATCH as u64);
        assert_eq!(counters.misses.send.cold, circle);
        assert_eq!(counters.hits.send, 0);
    }
}
