//! How much longer programs take with a cache of translations than with a full table: the same
//! processes, the same memory, two endpoints, in turn.

use super::order::{Ran, Report, Table};
use super::session::Session;
use super::shape::Shape;
use super::workload::{Kind, Problem};
use crate::bench::Effort;
use crate::bench::measure::median;
use crate::outcome::Row;

/// How often everything is measured.
#[derive(Debug, Clone, Copy)]
struct Rounds {
    /// With an endpoint that has looked nothing up before.
    first: usize,
    /// With one that has run the program before.
    steady: usize,
    /// With the other shapes.
    others: usize,
}

impl Rounds {
    fn of(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self { first: 1, steady: 3, others: 0 },
            Effort::Quick => Self { first: 2, steady: 5, others: 1 },
            Effort::Full => Self { first: 3, steady: 7, others: 2 },
        }
    }
}

/// What one program has shown.
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    /// Medians of the ratios, once warm and in the first run.
    pub(super) steady: f64,
    pub(super) first: f64,
    /// The lookups of the leader at the end: the cache of the keys, and the full table.
    pub(super) cache: Report,
    pub(super) full: Report,
}

/// Measures one program.
pub(super) fn measure(
    session: &mut Session,
    problem: Problem,
    effort: Effort,
) -> anyhow::Result<Found> {
    let rounds = Rounds::of(effort);
    let name = problem.kind.name();
    session.begin(problem)?;
    let full = session.open(Table::Full)?;
    // The first run wakes the memory itself up, which has nothing to do with translations.
    session.run(full)?;
    let (first, mut fresh) = first_runs(session, full, rounds.first)?;
    let before = session.report(fresh)?;
    let times = compare(session, [full, fresh], rounds.steady)?;
    let steady = ratios(&times, |ran| ran.ns);
    let (cache_report, full_report) = (session.report(fresh)?, session.report(full)?);
    let mut rows = vec![
        Row::of_rounds(FIRST, name, 0, "ratio", &first),
        Row::of_rounds(STEADY, name, 0, "ratio", &steady),
        Row::of_rounds(PROCESSOR, name, 0, "ratio", &ratios(&times, |ran| ran.processor_ns)),
    ];
    let later_misses = miss_percent(&before, &cache_report);
    rows.push(Row::of_rounds(MISSES, name, 0, "%", &[later_misses]));
    for (which, series) in ["full table", "cache"].into_iter().enumerate() {
        let times: Vec<f64> = times.iter().map(|pair| pair[which].ns).collect();
        rows.push(Row::of_rounds(TIME, &format!("{name}, {series}"), 0, "ns", &times));
    }
    for shape in others(problem.kind, effort) {
        session.close(fresh)?;
        fresh = session.open(Table::of(shape))?;
        session.run(fresh)?;
        let times = compare(session, [full, fresh], rounds.others)?;
        let ratios = ratios(&times, |ran| ran.ns);
        rows.extend(places_of(shape).into_iter().map(|(figure, bytes, suffix)| {
            let series = format!("{name}{suffix}");
            Row::of_rounds(figure, &series, bytes, "ratio", &ratios)
        }));
    }
    // Beside the others, where there are some.
    let beside = places_of(Shape::TELLING).into_iter();
    let beside = beside.filter(|(figure, ..)| rows.iter().any(|row| row.figure == *figure));
    let beside: Vec<Row> = beside
        .map(|(figure, bytes, suffix)| {
            Row::of_rounds(figure, &format!("{name}{suffix}"), bytes, "ratio", &steady)
        })
        .collect();
    rows.extend(beside);
    session.end()?;
    Ok(Found {
        rows,
        steady: median(steady),
        first: median(first),
        cache: cache_report,
        full: full_report,
    })
}

const FIRST: &str = "slowdown against the full table, first run, C16K L64 A4";
const STEADY: &str = "slowdown against the full table, later runs, C16K L64 A4";
const PROCESSOR: &str = "processor time against the full table, later runs, C16K L64 A4";
const MISSES: &str = "misses of later runs, C16K L64 A4";
const TIME: &str = "time of a later run, C16K L64 A4";
const BY_LINE: &str = "slowdown by memory of a line, C16K A4";
const BY_REACH: &str = "slowdown by memory of the cache, L64 A4";
const BY_WAYS: &str = "slowdown by ways, C16K L64";

/// Runs with fresh endpoints: their ratios to the full table, and the last endpoint.
fn first_runs(
    session: &mut Session,
    full: usize,
    rounds: usize,
) -> anyhow::Result<(Vec<f64>, usize)> {
    let mut found = Vec::new();
    let mut fresh = session.open(Table::TELLING)?;
    for round in 0..rounds {
        if round > 0 {
            session.close(fresh)?;
            fresh = session.open(Table::TELLING)?;
        }
        let times = compare(session, [full, fresh], 1)?;
        found.extend(ratios(&times, |ran| ran.ns));
    }
    Ok((found, fresh))
}

/// How many of a hundred lookups missed between two reports.
fn miss_percent(before: &Report, after: &Report) -> f64 {
    let misses = after.misses() - before.misses();
    let lookups = after.hits - before.hits + misses;
    100.0 * misses as f64 / lookups.max(1) as f64
}

/// The ratios of cache to full table, round by round.
fn ratios(times: &[[Ran; 2]], of: impl Fn(&Ran) -> f64) -> Vec<f64> {
    times.iter().map(|[full, cache]| of(cache) / of(full)).collect()
}

/// Runs over two endpoints in turn; the one that goes first changes.
fn compare(
    session: &mut Session,
    endpoints: [usize; 2],
    rounds: usize,
) -> anyhow::Result<Vec<[Ran; 2]>> {
    let mut times = Vec::new();
    for round in 0..rounds {
        let (first, second) = (round % 2, (round + 1) % 2);
        let ran = [session.run(endpoints[first])?, session.run(endpoints[second])?];
        times.push([ran[first], ran[second]]);
    }
    Ok(times)
}

/// The other shapes that are timed: those that differ from the telling one in one respect.
fn others(kind: Kind, effort: Effort) -> Vec<Shape> {
    let telling = Shape::TELLING;
    let differences = |shape: &Shape| {
        usize::from(shape.entries != telling.entries)
            + usize::from(shape.line_entries != telling.line_entries)
            + usize::from(shape.ways != telling.ways)
    };
    match effort {
        Effort::Brief => Vec::new(),
        // Where lines matter most.
        Effort::Quick if matches!(kind, Kind::Fourier | Kind::Random) => {
            Shape::lines_of(telling.entries, telling.ways).filter(|s| *s != telling).collect()
        }
        Effort::Quick => Vec::new(),
        Effort::Full => Shape::all().filter(|shape| differences(shape) == 1).collect(),
    }
}

/// The figures that a shape has a place in: with the place, and what the series is called there.
fn places_of(shape: Shape) -> Vec<(&'static str, u64, String)> {
    let telling = Shape::TELLING;
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
        assert_eq!(places_of(Shape::TELLING).len(), 3);
        let others = others(Kind::Lu, Effort::Full);
        assert_eq!(others.len(), 7);
        assert!(others.iter().all(|shape| places_of(*shape).len() == 1));
    }

    #[test]
    fn only_misses_between_two_reports_count() {
        let report = |hits, cold| {
            let mut report = Report { hits, ..Report::default() };
            report.send.cold = cold;
            report
        };
        assert_eq!(miss_percent(&report(100, 50), &report(175, 75)), 25.0);
        assert_eq!(miss_percent(&report(100, 50), &report(100, 50)), 0.0);
    }

    #[test]
    fn the_keys_rest_on_five_rounds_unless_time_is_short() {
        assert!(Rounds::of(Effort::Quick).steady >= 5);
        assert!(Rounds::of(Effort::Full).steady >= 5);
    }
}
