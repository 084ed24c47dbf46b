//! Misses of the programs by data path and kind, for every shape of the cache: one run of each
//! program is recorded and replayed.

use std::collections::BTreeSet;

use memferry_memory::lookup::LookupCounters;

use super::session::TranslationSession;
use super::workload::Problem;
use crate::Effort;
use crate::memory::lookup::command::LookupMode;
use crate::replay::CacheShape;
use crate::replay::MissTotals;
use crate::replay::{self, ReplayResult};
use crate::results::outcome::Row;

/// Results of one program.
pub(super) struct MissResults {
    pub(super) rows: Vec<Row>,
    /// Misses that the recorded run counted, and those that its replay counted.
    pub(super) live: u64,
    pub(super) replayed: u64,
}

/// Records one run of a program and replays it.
pub(super) fn measure(
    problem: Problem,
    members: usize,
    effort: Effort,
) -> anyhow::Result<MissResults> {
    let mut session = TranslationSession::start_recording(members)?;
    session.begin(problem)?;
    let endpoint = session.open(LookupMode::of(CacheShape::RECORDED))?;
    session.run(endpoint)?;
    let live = session.report(endpoint)?.misses();
    session.close(endpoint)?;
    session.end()?;
    let replays = replay::sweep(&session.trace()?)?;
    let name = problem.kind.name();
    let own = replays.iter().find(|replay| replay.shape == CacheShape::RECORDED);
    let replayed = own.map_or(0, |replay| misses(&replay.counters));
    let mut rows = ratio_rows(name, &replays);
    let every = effort == Effort::Full;
    rows.extend(kind_rows(name, &replays, every));
    Ok(MissResults { rows, live, replayed })
}

fn misses(counters: &LookupCounters) -> u64 {
    counters.misses.send.total() + counters.misses.receive.total()
}

/// Rows of the miss ratio over the line length, for each size and number of ways.
fn ratio_rows(name: &str, replays: &[ReplayResult]) -> Vec<Row> {
    let row = |replay: &ReplayResult| {
        let percent = 100.0 * replay.counters.miss_ratio();
        let figure = format!("misses of {name} by memory of a line");
        let series = replay.shape.size_and_ways();
        Row::of_rounds(&figure, &series, replay.shape.line_bytes(), "%", &[percent])
    };
    replays.iter().map(row).collect()
}

/// Rows of misses by data path and kind, as shares of all lookups. Without `every`, only for the
/// size and the ways of the reference shape.
fn kind_rows(name: &str, replays: &[ReplayResult], every: bool) -> Vec<Row> {
    let telling = CacheShape::REFERENCE;
    let is_shown = |replay: &&ReplayResult| {
        every || (replay.shape.entries, replay.shape.ways) == (telling.entries, telling.ways)
    };
    let mut rows = Vec::new();
    for replay in replays.iter().filter(is_shown) {
        let (counters, shape) = (&replay.counters, replay.shape);
        let lookups = counters.hits.send + counters.hits.receive + misses(counters);
        let figure = format!("misses of {name} by kind, {}", shape.size_and_ways());
        for (route, misses) in
            [("send", counters.misses.send), ("receive", counters.misses.receive)]
        {
            for (kind, count) in MissTotals::from(misses).named() {
                let (series, percent) = (format!("{route}, {kind}"), 100.0 * count as f64);
                let share = percent / lookups.max(1) as f64;
                rows.push(Row::of_rounds(&figure, &series, shape.line_bytes(), "%", &[share]));
            }
        }
    }
    // A kind of miss that never occurs in a program gets no row.
    let shown: BTreeSet<_> = rows
        .iter()
        .filter(|row| row.value > 0.0)
        .map(|row| (row.figure.clone(), row.series.clone()))
        .collect();
    rows.retain(|row| shown.contains(&(row.figure.clone(), row.series.clone())));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_that_never_occur_have_no_rows() {
        let replays: Vec<_> = CacheShape::all()
            .map(|shape| {
                let mut counters = LookupCounters::default();
                counters.hits.send = 90;
                counters.misses.send.cold = if shape.line_entries == 8 { 10 } else { 0 };
                ReplayResult { shape, counters }
            })
            .collect();
        let rows = kind_rows("lu", &replays, false);
        assert_eq!(rows.len(), 4, "one for each length of lines");
        assert!(rows.iter().all(|row| row.series == "send, cold"));
        assert_eq!(rows[0].value, 10.0);
        assert_eq!(kind_rows("lu", &replays, true).len(), 36);
    }
}
