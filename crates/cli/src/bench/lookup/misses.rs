//! Misses of the programs by route and kind, for every shape of the cache: one run of each is
//! recorded and replayed.

use memferry_memory::lookup::Counters;

use super::order::{Kinds, Table};
use super::session::Session;
use super::shape::Shape;
use super::workload::Problem;
use crate::bench::Effort;
use crate::outcome::Row;
use crate::replay::{self, Replayed};

/// What one program has shown.
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    /// What the recorded run has counted itself, and what its replay has.
    pub(super) live: u64,
    pub(super) replayed: u64,
}

/// Records one run of a program and replays it.
pub(super) fn measure(problem: Problem, members: usize, effort: Effort) -> anyhow::Result<Found> {
    let mut session = Session::start_recording(members)?;
    session.begin(problem)?;
    let endpoint = session.open(Table::of(Shape::RECORDED))?;
    session.run(endpoint)?;
    let live = session.report(endpoint)?.misses();
    session.close(endpoint)?;
    session.end()?;
    let replays = replay::sweep(&session.trace()?)?;
    let name = problem.kind.name();
    let own = replays.iter().find(|replay| replay.shape == Shape::RECORDED);
    let replayed = own.map_or(0, |replay| misses(&replay.counters));
    let mut rows = ratio_rows(name, &replays);
    let every = effort == Effort::Full;
    rows.extend(replays.iter().flat_map(|replay| kind_rows(name, replay, every)));
    Ok(Found { rows, live, replayed })
}

fn misses(counters: &Counters) -> u64 {
    counters.misses.send.total() + counters.misses.receive.total()
}

/// The miss ratio over the length of lines, for each size and number of ways.
fn ratio_rows(name: &str, replays: &[Replayed]) -> Vec<Row> {
    let row = |replay: &Replayed| {
        let percent = 100.0 * replay.counters.miss_ratio();
        let figure = format!("misses of {name} by memory of a line");
        let series = replay.shape.size_and_ways();
        Row::of_rounds(&figure, &series, replay.shape.line_bytes(), "%", &[percent])
    };
    replays.iter().map(row).collect()
}

/// Misses by route and kind. Without `every`, of the shapes that differ from the telling one in
/// their lines alone.
fn kind_rows(name: &str, replay: &Replayed, every: bool) -> Vec<Row> {
    let shape = replay.shape;
    let telling = Shape::TELLING;
    if !every && (shape.entries, shape.ways) != (telling.entries, telling.ways) {
        return Vec::new();
    }
    let figure = format!("misses of {name} by kind, {}", shape.size_and_ways());
    let mut rows = Vec::new();
    for (route, misses) in
        [("send", replay.counters.misses.send), ("receive", replay.counters.misses.receive)]
    {
        let Kinds { cold, capacity, conflict } = misses.into();
        for (kind, count) in [("cold", cold), ("capacity", capacity), ("conflict", conflict)] {
            let series = format!("{route}, {kind}");
            rows.push(Row::of_rounds(
                &figure,
                &series,
                shape.line_bytes(),
                "misses",
                &[count as f64],
            ));
        }
    }
    rows
}
