//! Comparison of candidates: every candidate runs once in every round, and ratios are taken within
//! a round. A candidate that fails is removed; the others continue.

use crate::Effort;
use crate::harness::median;
use crate::results::outcome::Row;

use super::{Candidate, GroupTask, Role, Sample, WorkerCommand};

/// A candidate with its series and role.
pub(crate) struct NamedCandidate {
    /// Series in tables and plots.
    pub(crate) series: String,
    pub(crate) role: Role,
    pub(crate) candidate: Box<dyn Candidate>,
}

/// Number of rounds, target duration of one run, and time limit of a comparison.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupBudget {
    pub(crate) rounds: usize,
    pub(crate) slice_ns: f64,
    pub(crate) total_ns: f64,
}

/// Minimum number of rounds for a meaningful median.
const MIN_ROUNDS: usize = 5;

impl GroupBudget {
    pub(crate) fn of(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self { rounds: 7, slice_ns: 3e6, total_ns: 1.0e9 },
            Effort::Quick => Self { rounds: 9, slice_ns: 4e6, total_ns: 1.5e9 },
            Effort::Full => Self { rounds: 15, slice_ns: 10e6, total_ns: 8e9 },
        }
    }

    /// Returns the number of rounds that fit if one round takes `round_ns`, at least
    /// [`MIN_ROUNDS`].
    fn rounds_of(self, round_ns: f64) -> usize {
        let fit = (self.total_ns / round_ns.max(1.0)) as usize;
        fit.clamp(MIN_ROUNDS.min(self.rounds), self.rounds)
    }
}

/// Times of all candidates per iteration, round by round.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupSamples {
    series: Vec<SampleSeries>,
}

#[derive(Debug, Clone)]
struct SampleSeries {
    series: String,
    role: Role,
    samples: Vec<Sample>,
}

/// Runs a task on the candidates of `entries` that `takes_part` selects, interleaved. Candidates
/// that fail are removed from `entries` and added to `missing`, with the reason.
pub(crate) fn interleave(
    entries: &mut Vec<NamedCandidate>,
    missing: &mut Vec<String>,
    takes_part: impl Fn(&str) -> bool,
    task: GroupTask,
    patience: GroupBudget,
) -> GroupSamples {
    let mut turns: Vec<Option<CandidateRun>> = Vec::new();
    let mut round_ns = 0.0;
    for entry in &mut *entries {
        turns.push(takes_part(&entry.series).then(|| {
            let fit = entry.candidate.calibrate(task, patience.slice_ns);
            round_ns += fit.as_ref().map_or(0.0, |fit| fit.run_ns());
            CandidateRun {
                iterations: fit.as_ref().map_or(0, |fit| fit.iterations),
                samples: fit.map(|_| Vec::new()),
            }
        }));
    }
    for round in 0..patience.rounds_of(round_ns) {
        for turn in 0..entries.len() {
            let index = candidate_index(turn, round, entries.len());
            if let Some(turns) = &mut turns[index] {
                turns.run_once(entries[index].candidate.as_mut(), task);
            }
        }
    }
    let mut rounds = GroupSamples::default();
    for (index, turns) in turns.into_iter().enumerate().rev() {
        match turns.map(|turns| turns.samples) {
            None => {}
            Some(Ok(times)) => {
                let (series, role) = (entries[index].series.clone(), entries[index].role);
                rounds.series.insert(0, SampleSeries { series, role, samples: times });
            }
            Some(Err(reason)) => {
                missing.push(format!("{} (at {task}: {reason})", entries[index].series));
                entries.remove(index);
            }
        }
    }
    rounds
}

/// Iterations of a candidate per run, and its samples until it failed.
struct CandidateRun {
    iterations: u64,
    samples: Result<Vec<Sample>, String>,
}

impl CandidateRun {
    fn run_once(&mut self, contender: &mut dyn Candidate, task: GroupTask) {
        let Ok(times) = &mut self.samples else { return };
        match contender.run(WorkerCommand { task, iterations: self.iterations }) {
            Ok(timing) => times.push(timing.per_iteration(self.iterations)),
            Err(reason) => self.samples = Err(reason),
        }
    }
}

/// Index of the candidate that runs next. The first candidate and the direction change from round
/// to round, so that no candidate has an advantage from its position or its predecessor.
fn candidate_index(turn: usize, round: usize, count: usize) -> usize {
    let place = (turn + round / 2) % count;
    if round.is_multiple_of(2) { place } else { count - 1 - place }
}

impl GroupSamples {
    /// Returns the median over rounds of the speedup of `series` over the peer with the best
    /// median. NaN if one of them did not run.
    pub(crate) fn ratio_to_best_peer(&self, series: &str) -> f64 {
        let median_of = |line: &&SampleSeries| self.median_ns(&line.series);
        let peers = self.series.iter().filter(|line| line.role == Role::Peer);
        let best = peers.min_by(|one, other| median_of(one).total_cmp(&median_of(other)));
        best.map_or(f64::NAN, |best| self.slowdown(&best.series, series))
    }

    /// Returns whether a series ran and did not fail.
    pub(crate) fn has(&self, series: &str) -> bool {
        self.find_series(series).is_some()
    }

    /// Returns the median over rounds of the time of `series` divided by the time of `other`.
    pub(crate) fn slowdown(&self, series: &str, other: &str) -> f64 {
        let (Some(ours), Some(other)) = (self.find_series(series), self.find_series(other)) else {
            return f64::NAN;
        };
        let pairs = ours.samples.iter().zip(&other.samples);
        median(pairs.map(|(own, other)| own.total_ns / other.total_ns).collect())
    }

    /// Median time of a series.
    pub(crate) fn median_ns(&self, series: &str) -> f64 {
        median(self.values(series, |timing| timing.total_ns))
    }

    /// Returns the samples of a series, round by round, converted to values; empty if the series
    /// did not run.
    pub(crate) fn values(&self, series: &str, value_of: impl Fn(&Sample) -> f64) -> Vec<f64> {
        let times = self.find_series(series).map(|line| &line.samples[..]).unwrap_or_default();
        times.iter().map(value_of).collect()
    }

    /// Returns a row for every candidate, with its samples converted to values of a unit.
    pub(crate) fn rows(
        &self,
        figure: &str,
        size: u64,
        unit: &str,
        value_of: impl Fn(&Sample) -> f64,
    ) -> Vec<Row> {
        let row = |line: &SampleSeries| {
            let values: Vec<_> = line.samples.iter().map(&value_of).collect();
            Row::of_rounds(figure, &line.series, size, unit, &values)
        };
        self.series.iter().map(row).collect()
    }

    fn find_series(&self, series: &str) -> Option<&SampleSeries> {
        self.series.iter().find(|line| line.series == series)
    }
}

#[cfg(test)]
mod tests;
