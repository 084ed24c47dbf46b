//! The samples of a comparison: rows, and ratios within rounds.

use anyhow::bail;

use super::{Failure, Role, Stage};
use crate::results::outcome::Row;

/// Times: total, the part spent in messages, and processor time, where the candidate measures them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) total_ns: f64,
    pub(crate) messages_ns: f64,
    pub(crate) cpu_ns: f64,
}

impl Sample {
    /// A sample of a candidate that measures only the total.
    pub(crate) fn of_total(total_ns: f64) -> Self {
        Self { total_ns, messages_ns: 0.0, cpu_ns: 0.0 }
    }

    /// A sample of a task that only sends messages.
    pub(crate) fn of_messages(total_ns: f64) -> Self {
        Self::of_parts(total_ns, total_ns)
    }

    /// A sample of a program that uses messages.
    pub(crate) fn of_parts(total_ns: f64, messages_ns: f64) -> Self {
        Self { total_ns, messages_ns, cpu_ns: 0.0 }
    }

    /// Returns the times per iteration.
    pub(crate) fn per_iteration(self, iterations: u64) -> Self {
        let share = iterations.max(1) as f64;
        Self {
            total_ns: self.total_ns / share,
            messages_ns: self.messages_ns / share,
            cpu_ns: self.cpu_ns / share,
        }
    }
}

/// Times of all candidates per iteration, round by round, and the candidates that failed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples {
    pub(super) series: Vec<SampleSeries>,
    pub(super) failures: Vec<Failure>,
}

#[derive(Debug, Clone)]
pub(super) struct SampleSeries {
    pub(super) series: String,
    pub(super) role: Role,
    pub(super) samples: Vec<Sample>,
}

impl Samples {
    /// Returns whether a series ran and did not fail.
    pub(crate) fn has(&self, series: &str) -> bool {
        self.find(series).is_some()
    }

    /// Adds further rounds of the same candidates, such as those after a new start of their programs.
    /// Rounds of two series may not correspond any more: [`Samples::median_of_all`] is for these.
    pub(crate) fn append(&mut self, more: Self) {
        for line in more.series {
            match self.series.iter_mut().find(|known| known.series == line.series) {
                Some(known) => known.samples.extend(line.samples),
                None => self.series.push(line),
            }
        }
        self.failures.extend(more.failures);
    }

    /// Candidates that failed. They have no samples.
    pub(crate) fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// Fails if the result of a candidate was wrong.
    pub(crate) fn require_verified(&self) -> anyhow::Result<()> {
        match self.failures.iter().find(|failure| failure.stage == Stage::Verify) {
            Some(Failure { series, reason, .. }) => bail!("`{series}`: {reason}"),
            None => Ok(()),
        }
    }

    /// Fails if a candidate failed.
    pub(crate) fn require_all(&self) -> anyhow::Result<()> {
        match self.failures.first() {
            Some(Failure { series, reason, .. }) => bail!("`{series}`: {reason}"),
            None => Ok(()),
        }
    }

    /// Returns how many times faster `series` is than `peer`: the median over the pairs of rounds
    /// that run the candidates in opposite directions, of the geometric mean of their two ratios. A
    /// median over all rounds would be the value of one direction, where a candidate is faster after
    /// another. NaN if one of them did not run.
    pub(crate) fn ratio(&self, series: &str, peer: &str) -> f64 {
        let ratios = self.ratios(series, peer, |sample| sample.total_ns);
        median(both_directions(&ratios))
    }

    /// Returns the values of `peer` divided by those of `series`, round by round; empty if one of
    /// them did not run.
    pub(crate) fn ratios(
        &self,
        series: &str,
        peer: &str,
        value: impl Fn(&Sample) -> f64,
    ) -> Vec<f64> {
        let (Some(ours), Some(theirs)) = (self.find(series), self.find(peer)) else {
            return Vec::new();
        };
        let rounds = ours.samples.iter().zip(&theirs.samples);
        rounds.map(|(ours, theirs)| value(theirs) / value(ours)).collect()
    }

    /// Returns the ratio to the peer with the best median; NaN if there is none.
    pub(crate) fn ratio_to_best_peer(&self, series: &str) -> f64 {
        let median_of = |line: &&SampleSeries| self.median_ns(&line.series);
        let peers = self.series.iter().filter(|line| line.role == Role::Peer);
        let best = peers.min_by(|one, other| median_of(one).total_cmp(&median_of(other)));
        best.map_or(f64::NAN, |best| self.ratio(series, &best.series))
    }

    /// Median time of a series that ran in each of `rounds` rounds; NaN if it did not.
    pub(crate) fn median_of_all(&self, series: &str, rounds: usize) -> f64 {
        let values = self.values(series, |sample| sample.total_ns);
        if values.len() == rounds { median(values) } else { f64::NAN }
    }

    /// Median time of a series; NaN if it did not run.
    pub(crate) fn median_ns(&self, series: &str) -> f64 {
        median(self.values(series, |sample| sample.total_ns))
    }

    /// Returns the samples of a series, round by round, converted to values; empty if the series
    /// did not run.
    pub(crate) fn values(&self, series: &str, value: impl Fn(&Sample) -> f64) -> Vec<f64> {
        let samples = self.find(series).map(|line| &line.samples[..]).unwrap_or_default();
        samples.iter().map(value).collect()
    }

    /// Returns a row for every candidate, with its samples converted to values of a unit.
    pub(crate) fn rows(
        &self,
        figure: &str,
        bytes: u64,
        unit: &str,
        value: impl Fn(&Sample) -> f64,
    ) -> Vec<Row> {
        let row = |line: &SampleSeries| {
            let values: Vec<_> = line.samples.iter().map(&value).collect();
            Row::of_rounds(figure, &line.series, bytes, unit, &values)
        };
        self.series.iter().map(row).collect()
    }

    /// Rows of bandwidth, for iterations that move `moved` bytes each.
    pub(crate) fn bandwidth_rows(&self, figure: &str, bytes: u64, moved: u64) -> Vec<Row> {
        self.rows(figure, bytes, "GB/s", |sample| moved as f64 / sample.total_ns)
    }

    /// Rows of the time of one iteration.
    pub(crate) fn time_rows(&self, figure: &str, bytes: u64) -> Vec<Row> {
        self.rows(figure, bytes, "ns", |sample| sample.total_ns)
    }

    fn find(&self, series: &str) -> Option<&SampleSeries> {
        self.series.iter().find(|line| line.series == series)
    }
}

/// Returns the largest value; NaN if one is NaN, or if there is none.
pub(crate) fn max_or_nan(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |one: f64, other: f64| if other.is_nan() || other > one { other } else { one };
    values.into_iter().reduce(larger).unwrap_or(f64::NAN)
}

/// Returns the smallest value; NaN if one is NaN, or if there is none.
pub(crate) fn min_or_nan(values: impl IntoIterator<Item = f64>) -> f64 {
    -max_or_nan(values.into_iter().map(|value| -value))
}

/// Median; NaN without values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

/// The geometric mean of each pair of rounds. A last round without its other direction does not count,
/// unless it is the only one.
pub(crate) fn both_directions(rounds: &[f64]) -> Vec<f64> {
    match rounds {
        [only] => vec![*only],
        _ => rounds.chunks_exact(2).map(|pair| (pair[0] * pair[1]).sqrt()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(of: &[(&str, Role, &[f64])]) -> Samples {
        let line = |&(series, role, times): &(&str, Role, &[f64])| SampleSeries {
            series: series.to_owned(),
            role,
            samples: times.iter().map(|&ns| Sample::of_total(ns)).collect(),
        };
        Samples { series: of.iter().map(line).collect(), failures: Vec::new() }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![9.0]), 9.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let samples = samples(&[
            ("peer", Role::Peer, &[10.0, 100.0, 10.0]),
            ("ours", Role::Memferry, &[5.0, 50.0, 10.0]),
        ]);
        assert_eq!(samples.ratio("ours", "peer"), 2.0);
        assert_eq!(samples.ratio("peer", "ours"), 0.5);
        let halves = samples.ratios("ours", "peer", |sample| sample.total_ns);
        assert_eq!(halves, [2.0, 2.0, 1.0]);
        assert!(samples.ratio("ours", "absent").is_nan());
        assert_eq!(samples.bandwidth_rows("figure", 8, 100)[0].value, 10.0);
    }

    #[test]
    fn whoever_is_faster_after_the_other_has_no_advantage() {
        let samples = samples(&[
            ("peer", Role::Peer, &[10.0, 8.0, 10.0, 8.0, 10.0]),
            ("ours", Role::Memferry, &[8.0, 10.0, 8.0, 10.0, 8.0]),
        ]);
        let ratio = samples.ratio("ours", "peer");
        assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn only_a_peer_can_be_the_best_peer() {
        let samples = samples(&[
            ("ours", Role::Memferry, &[10.0]),
            ("slow", Role::Peer, &[40.0]),
            ("quick", Role::Peer, &[20.0]),
            ("quick over ours", Role::Reference, &[5.0]),
            ("floor", Role::LowerBound, &[1.0]),
        ]);
        assert_eq!(samples.ratio_to_best_peer("ours"), 2.0);
        assert_eq!(samples.ratio("quick over ours", "quick"), 4.0);
        assert!(samples.ratio_to_best_peer("absent").is_nan());
    }

    #[test]
    fn a_wrong_result_is_told_apart_from_a_failed_run() {
        let failure = |stage| Failure { series: "a".into(), stage, reason: "lost a byte".into() };
        let mut samples = Samples::default();
        assert!(samples.require_all().is_ok());
        samples.failures.push(failure(Stage::Run));
        assert!(samples.require_verified().is_ok());
        assert_eq!(samples.require_all().unwrap_err().to_string(), "`a`: lost a byte");
        samples.failures.push(failure(Stage::Verify));
        assert!(samples.require_verified().is_err());
    }
}
