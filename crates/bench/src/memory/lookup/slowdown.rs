//! Slowdown of programs with a translation cache, compared with a full table: the same processes,
//! the same memory, two endpoints, interleaved.

use super::command::{LookupMode, LookupReport};
use super::compare::{CACHE, EndpointTask, FULL, compare, compare_in};
use super::session::TranslationSession;
use super::workload::{Problem, ProgramKind};
use crate::Effort;
use crate::harness::{Budget, Sample, Samples, both_directions, median};
use crate::replay::CacheShape;
use crate::results::outcome::Row;

/// Number of rounds of each measurement: pairs of both orders.
#[derive(Debug, Clone, Copy)]
struct RoundCounts {
    /// With an endpoint that has translated nothing before.
    first: usize,
    /// With an endpoint that has run the program before.
    steady: usize,
    /// With the other shapes.
    others: usize,
}

impl RoundCounts {
    fn of(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self { first: 2, steady: 4, others: 0 },
            Effort::Quick => Self { first: 2, steady: 6, others: 2 },
            Effort::Full => Self { first: 4, steady: 8, others: 2 },
        }
    }
}

/// Results of one program.
pub(super) struct SlowdownResults {
    pub(super) rows: Vec<Row>,
    /// Medians of the ratios, in steady state and in the first run.
    pub(super) steady: f64,
    pub(super) first: f64,
    /// Reports of the leader's lookups at the end: the reference cache, and the full table.
    pub(super) cache: LookupReport,
    pub(super) full: LookupReport,
}

/// Measures one program.
pub(super) fn measure(
    session: &mut TranslationSession,
    problem: Problem,
    effort: Effort,
) -> anyhow::Result<SlowdownResults> {
    let rounds = RoundCounts::of(effort);
    let name = problem.kind.name();
    session.begin(problem)?;
    let full = session.open(LookupMode::Full)?;
    // An untimed first run populates the memory, whose cost is independent of translations.
    session.run(full)?;
    let (first, mut fresh) = first_runs(session, full, rounds.first)?;
    let before = session.report(fresh)?;
    let samples = run_both(session, [full, fresh], rounds.steady)?;
    let steady = slowdowns(&samples, |ran| ran.total_ns);
    let (cache_report, full_report) = (session.report(fresh)?, session.report(full)?);
    let mut rows = vec![
        Row::of_rounds(FIRST_FIGURE, name, 0, "ratio", &first),
        Row::of_rounds(STEADY, name, 0, "ratio", &steady),
        Row::of_rounds(PROCESSOR, name, 0, "ratio", &slowdowns(&samples, |ran| ran.cpu_ns)),
    ];
    let later_misses = miss_percent(&before, &cache_report);
    rows.push(Row::of_rounds(MISSES, name, 0, "%", &[later_misses]));
    for series in [FULL, CACHE] {
        let times = samples.values(series, |ran| ran.total_ns);
        rows.push(Row::of_rounds(TIME, &format!("{name}, {series}"), 0, "ns", &times));
    }
    for shape in other_shapes(problem.kind, effort) {
        session.close(fresh)?;
        fresh = session.open(LookupMode::of(shape))?;
        session.run(fresh)?;
        let samples = run_both(session, [full, fresh], rounds.others)?;
        let ratios = slowdowns(&samples, |ran| ran.total_ns);
        rows.extend(figures_of(shape).into_iter().map(|(figure, bytes, suffix)| {
            let series = format!("{name}{suffix}");
            Row::of_rounds(figure, &series, bytes, "ratio", &ratios)
        }));
    }
    // The reference shape is added to the figures that contain other shapes.
    let beside = figures_of(CacheShape::REFERENCE).into_iter();
    let beside = beside.filter(|(figure, ..)| rows.iter().any(|row| row.figure == *figure));
    let beside: Vec<Row> = beside
        .map(|(figure, bytes, suffix)| {
            Row::of_rounds(figure, &format!("{name}{suffix}"), bytes, "ratio", &steady)
        })
        .collect();
    rows.extend(beside);
    session.end()?;
    Ok(SlowdownResults {
        rows,
        steady: median(steady),
        first: median(first),
        cache: cache_report,
        full: full_report,
    })
}

const FIRST_FIGURE: &str = "slowdown against the full table, first run, C16K L64 A4";
const STEADY: &str = "slowdown against the full table, later runs, C16K L64 A4";
const PROCESSOR: &str = "processor time against the full table, later runs, C16K L64 A4";
const MISSES: &str = "misses of later runs, C16K L64 A4";
const TIME: &str = "time of a later run, C16K L64 A4";
const BY_LINE: &str = "slowdown by memory of a line, C16K A4";
const BY_REACH: &str = "slowdown by memory of the cache, L64 A4";
const BY_WAYS: &str = "slowdown by ways, C16K L64";

/// Runs with fresh endpoints. Returns their ratios to the full table, and the last endpoint.
fn first_runs(
    session: &mut TranslationSession,
    full: usize,
    rounds: usize,
) -> anyhow::Result<(Vec<f64>, usize)> {
    let mut found = Vec::new();
    let mut fresh = session.open(LookupMode::REFERENCE)?;
    for round in 0..rounds {
        if round > 0 {
            session.close(fresh)?;
            fresh = session.open(LookupMode::REFERENCE)?;
        }
        // A run finds what the one before it has left in the caches, so each is first in turn.
        let order = if round % 2 == 0 { [FULL, CACHE] } else { [CACHE, FULL] };
        let budget = Budget::fixed(1, 1);
        let samples = compare_in(order, session, [full, fresh], EndpointTask::Program, budget)?;
        found.extend(samples.ratios(FULL, CACHE, |ran| ran.total_ns));
    }
    Ok((both_directions(&found), fresh))
}

/// Percentage of lookups that missed between two reports.
fn miss_percent(before: &LookupReport, after: &LookupReport) -> f64 {
    let misses = after.misses() - before.misses();
    let lookups = after.hits - before.hits + misses;
    100.0 * misses as f64 / lookups.max(1) as f64
}

/// Ratios of cache to full table, of each pair of rounds in both orders.
fn slowdowns(samples: &Samples, value: impl Fn(&Sample) -> f64) -> Vec<f64> {
    both_directions(&samples.ratios(FULL, CACHE, value))
}

/// Runs the program over the full table and over a cache.
fn run_both(
    session: &mut TranslationSession,
    endpoints: [usize; 2],
    rounds: usize,
) -> anyhow::Result<Samples> {
    compare(session, endpoints, EndpointTask::Program, Budget::fixed(rounds, 1))
}

/// Other shapes that are measured: those that differ from the reference shape in one property.
fn other_shapes(kind: ProgramKind, effort: Effort) -> Vec<CacheShape> {
    let telling = CacheShape::REFERENCE;
    let differences = |shape: &CacheShape| {
        usize::from(shape.entries != telling.entries)
            + usize::from(shape.line_entries != telling.line_entries)
            + usize::from(shape.ways != telling.ways)
    };
    match effort {
        Effort::Brief => Vec::new(),
        // The two programs on which the line length has the largest effect.
        Effort::Quick if matches!(kind, ProgramKind::Fourier | ProgramKind::Random) => {
            CacheShape::lines_of(telling.entries, telling.ways).filter(|s| *s != telling).collect()
        }
        Effort::Quick => Vec::new(),
        Effort::Full => CacheShape::all().filter(|shape| differences(shape) == 1).collect(),
    }
}

/// Figures that contain a shape, with its position on the size axis and the suffix of its series.
fn figures_of(shape: CacheShape) -> Vec<(&'static str, u64, String)> {
    let telling = CacheShape::REFERENCE;
    let page_bytes = shape.line_bytes() / shape.line_entries as u64;
    let reach = shape.entries as u64 * page_bytes;
    let mut places = Vec::new();
    if (shape.entries, shape.ways) == (telling.entries, telling.ways) {
        places.push((BY_LINE, shape.line_bytes(), String::new()));
    }
    if (shape.line_entries, shape.ways) == (telling.line_entries, telling.ways) {
        places.push((BY_REACH, reach, String::new()));
    }
    if (shape.entries, shape.line_entries) == (telling.entries, telling.line_entries) {
        places.push((BY_WAYS, 0, format!(", {} ways", shape.ways)));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_telling_shape_is_in_every_figure_and_the_others_in_one() {
        assert_eq!(figures_of(CacheShape::REFERENCE).len(), 3);
        let others = other_shapes(ProgramKind::Lu, Effort::Full);
        assert_eq!(others.len(), 7);
        assert!(others.iter().all(|shape| figures_of(*shape).len() == 1));
    }

    #[test]
    fn only_misses_between_two_reports_count() {
        let report = |hits, cold| {
            let mut report = LookupReport { hits, ..LookupReport::default() };
            report.send.cold = cold;
            report
        };
        assert_eq!(miss_percent(&report(100, 50), &report(175, 75)), 25.0);
        assert_eq!(miss_percent(&report(100, 50), &report(100, 50)), 0.0);
    }

    #[test]
    fn the_keys_rest_on_pairs_of_rounds_in_both_orders() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let RoundCounts { first, steady, others } = RoundCounts::of(effort);
            assert!([first, steady, others].iter().all(|rounds| rounds % 2 == 0), "{effort:?}");
            assert!(first >= 2 && steady >= 4, "{effort:?}");
        }
    }
}
