//! Contestants against each other: each gets its turn in every round, and what is compared is what
//! happened in the same round. A contestant that fails leaves the contest; the others go on.

use crate::bench::Effort;
use crate::bench::measure::median;
use crate::outcome::Row;

use super::{Contender, Order, Role, Task, Timing};

/// One contestant.
pub(super) struct Entry {
    /// Its series in tables and plots.
    pub(super) series: String,
    pub(super) role: Role,
    pub(super) contender: Box<dyn Contender>,
}

/// How many rounds, how long a turn should take, and how long a whole contest may.
#[derive(Debug, Clone, Copy)]
pub(in crate::bench) struct Patience {
    pub(in crate::bench) rounds: usize,
    pub(in crate::bench) slice_ns: f64,
    pub(in crate::bench) contest_ns: f64,
}

/// The fewest rounds whose median means something.
const FEWEST_ROUNDS: usize = 5;

impl Patience {
    pub(in crate::bench) fn of(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self { rounds: 7, slice_ns: 3e6, contest_ns: 1.0e9 },
            Effort::Quick => Self { rounds: 9, slice_ns: 4e6, contest_ns: 1.5e9 },
            Effort::Full => Self { rounds: 15, slice_ns: 10e6, contest_ns: 8e9 },
        }
    }

    /// As many rounds as fit when one takes `round_ns`, but no fewer than mean something.
    fn rounds_of(self, round_ns: f64) -> usize {
        let fit = (self.contest_ns / round_ns.max(1.0)) as usize;
        fit.clamp(FEWEST_ROUNDS.min(self.rounds), self.rounds)
    }
}

/// What every contestant took for one iteration, round by round.
#[derive(Debug, Clone, Default)]
pub(in crate::bench) struct Rounds {
    lines: Vec<Line>,
}

#[derive(Debug, Clone)]
struct Line {
    series: String,
    role: Role,
    times: Vec<Timing>,
}

/// Lets the contestants among `entries` that `takes_part` names do a task in turn. Those that fail
/// are taken out of `entries` and named, with the reason, in `missing`.
pub(super) fn contest(
    entries: &mut Vec<Entry>,
    missing: &mut Vec<String>,
    takes_part: impl Fn(&str) -> bool,
    task: Task,
    patience: Patience,
) -> Rounds {
    let mut turns: Vec<Option<Turns>> = Vec::new();
    let mut round_ns = 0.0;
    for entry in &mut *entries {
        turns.push(takes_part(&entry.series).then(|| {
            let fit = entry.contender.fit(task, patience.slice_ns);
            round_ns += fit.as_ref().map_or(0.0, |fit| fit.turn_ns());
            Turns {
                iterations: fit.as_ref().map_or(0, |fit| fit.iterations),
                times: fit.map(|_| Vec::new()),
            }
        }));
    }
    for round in 0..patience.rounds_of(round_ns) {
        for turn in 0..entries.len() {
            let index = place(turn, round, entries.len());
            if let Some(turns) = &mut turns[index] {
                turns.take_one(entries[index].contender.as_mut(), task);
            }
        }
    }
    let mut rounds = Rounds::default();
    for (index, turns) in turns.into_iter().enumerate().rev() {
        match turns.map(|turns| turns.times) {
            None => {}
            Some(Ok(times)) => {
                let (series, role) = (entries[index].series.clone(), entries[index].role);
                rounds.lines.insert(0, Line { series, role, times });
            }
            Some(Err(reason)) => {
                missing.push(format!("{} (at {task}: {reason})", entries[index].series));
                entries.remove(index);
            }
        }
    }
    rounds
}

/// How often a contestant does its task in a turn, and the times of its turns until it failed.
struct Turns {
    iterations: u64,
    times: Result<Vec<Timing>, String>,
}

impl Turns {
    fn take_one(&mut self, contender: &mut dyn Contender, task: Task) {
        let Ok(times) = &mut self.times else { return };
        match contender.carry_out(Order { task, iterations: self.iterations }) {
            Ok(timing) => times.push(timing.per(self.iterations)),
            Err(reason) => self.times = Err(reason),
        }
    }
}

/// Whose turn it is. The one that goes first changes, and so does the direction, so that none
/// profits or suffers from its place or its neighbour.
fn place(turn: usize, round: usize, count: usize) -> usize {
    let place = (turn + round / 2) % count;
    if round.is_multiple_of(2) { place } else { count - 1 - place }
}

impl Rounds {
    /// The median over rounds of how many times faster `series` is than the peer with the best
    /// median. Not a number if one of them did not take part.
    pub(in crate::bench) fn against_best(&self, series: &str) -> f64 {
        let median_of = |line: &&Line| self.median_ns(&line.series);
        let peers = self.lines.iter().filter(|line| line.role == Role::Peer);
        let best = peers.min_by(|one, other| median_of(one).total_cmp(&median_of(other)));
        best.map_or(f64::NAN, |best| self.times_longer(&best.series, series))
    }

    /// Whether a series took part, and did not fail.
    pub(in crate::bench) fn has(&self, series: &str) -> bool {
        self.line(series).is_some()
    }

    /// The median over rounds of how much longer `series` takes than `other`.
    pub(in crate::bench) fn times_longer(&self, series: &str, other: &str) -> f64 {
        let (Some(ours), Some(other)) = (self.line(series), self.line(other)) else {
            return f64::NAN;
        };
        let pairs = ours.times.iter().zip(&other.times);
        median(pairs.map(|(own, other)| own.total_ns / other.total_ns).collect())
    }

    /// The median time of a series.
    pub(in crate::bench) fn median_ns(&self, series: &str) -> f64 {
        median(self.values(series, |timing| timing.total_ns))
    }

    /// What a series took, round by round, turned into a value; nothing if it did not take part.
    pub(in crate::bench) fn values(
        &self,
        series: &str,
        value_of: impl Fn(&Timing) -> f64,
    ) -> Vec<f64> {
        let times = self.line(series).map(|line| &line.times[..]).unwrap_or_default();
        times.iter().map(value_of).collect()
    }

    /// A row for every contestant, with its times turned into a value of some unit.
    pub(in crate::bench) fn rows(
        &self,
        figure: &str,
        size: u64,
        unit: &str,
        value_of: impl Fn(&Timing) -> f64,
    ) -> Vec<Row> {
        let row = |line: &Line| {
            let values: Vec<_> = line.times.iter().map(&value_of).collect();
            Row::of_rounds(figure, &line.series, size, unit, &values)
        };
        self.lines.iter().map(row).collect()
    }

    fn line(&self, series: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.series == series)
    }
}

#[cfg(test)]
mod tests;
