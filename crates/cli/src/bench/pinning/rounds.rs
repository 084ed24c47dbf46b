//! Ways to pin against each other, in turn, round by round. Only the copies are timed, not what
//! makes buffers fresh.

use std::fmt;
use std::time::Instant;

use anyhow::ensure;
use memferry::sys::pages::Pages;
use memferry_memory::pinning::PinError;

use super::device::{Device, Way};
use crate::bench::Effort;
use crate::bench::measure::median;
use crate::outcome::Row;

/// The state of the buffers of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffers {
    /// Never touched, at another address than before.
    Fresh,
    /// Used before.
    Reused,
}

impl fmt::Display for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fresh => "fresh",
            Self::Reused => "reused",
        })
    }
}

/// What each way took for one copy, in nanoseconds, round by round.
pub(super) struct Rounds {
    series: Vec<(&'static str, Vec<f64>)>,
    /// Ways that could not pin, with the reason.
    pub(super) failed: Vec<(&'static str, PinError)>,
}

/// Lets every way copy `bytes` in turn.
pub(super) fn contest(
    device: &Device,
    ways: &[(&'static str, Way)],
    bytes: usize,
    buffers: Buffers,
    effort: Effort,
) -> anyhow::Result<Rounds> {
    let mut source = Pages::new(bytes)?;
    for (place, byte) in source.as_mut_slice().iter_mut().enumerate() {
        *byte = (place * 31 + (place >> 12)) as u8;
    }
    let mut kept = Pages::new(bytes)?;
    kept.as_mut_slice().fill(0xA5);
    let mut rounds = Rounds { series: Vec::new(), failed: Vec::new() };
    let mut taking_part = Vec::new();
    for &(series, way) in ways {
        // Checked before anything is timed, which also warms up.
        kept.as_mut_slice().fill(0xA5);
        match device.copy(way, &source, &mut kept) {
            Ok(()) => {
                ensure!(kept.as_slice() == source.as_slice(), "`{series}` lost a byte");
                taking_part.push((series, way));
                rounds.series.push((series, Vec::new()));
            }
            Err(error) => rounds.failed.push((series, error)),
        }
    }
    let (count, repeats) = (rounds_of(effort), repeats_of(bytes, effort));
    for round in 0..count {
        for turn in 0..taking_part.len() {
            // The one that goes first changes, and so does the direction.
            let place = (turn + round / 2) % taking_part.len();
            let index = if round % 2 == 0 { place } else { taking_part.len() - 1 - place };
            let way = taking_part[index].1;
            // The first settles what the neighbour left behind.
            let mut total_ns = 0.0;
            for repeat in 0..=repeats {
                let once_ns = match buffers {
                    Buffers::Reused => timed(device, way, &source, &mut kept)?,
                    Buffers::Fresh => timed(device, way, &source, &mut Pages::new(bytes)?)?,
                };
                total_ns += if repeat == 0 { 0.0 } else { once_ns };
            }
            rounds.series[index].1.push(total_ns / repeats as f64);
        }
    }
    Ok(rounds)
}

fn timed(device: &Device, way: Way, source: &Pages, target: &mut Pages) -> anyhow::Result<f64> {
    let start = Instant::now();
    device.copy(way, source, target)?;
    Ok(start.elapsed().as_nanos() as f64)
}

fn rounds_of(effort: Effort) -> usize {
    match effort {
        Effort::Brief | Effort::Quick => 7,
        Effort::Full => 11,
    }
}

/// Many short copies, few long ones.
fn repeats_of(bytes: usize, effort: Effort) -> usize {
    let most_bytes: usize = if effort == Effort::Full { 16 << 20 } else { 8 << 20 };
    (most_bytes / bytes).clamp(1, 20)
}

impl Rounds {
    /// The median over rounds of how much longer `series` takes than `other`; not a number if one
    /// of them did not take part.
    pub(super) fn times_longer(&self, series: &str, other: &str) -> f64 {
        let of = |name: &str| self.series.iter().find(|(series, _)| *series == name);
        match (of(series), of(other)) {
            (Some((_, series)), Some((_, other))) => {
                median(series.iter().zip(other).map(|(series, other)| series / other).collect())
            }
            _ => f64::NAN,
        }
    }

    /// A row of bandwidth for each way.
    pub(super) fn rows(&self, figure: &str, bytes: u64) -> impl Iterator<Item = Row> {
        self.series.iter().map(move |(series, times)| {
            let speeds: Vec<_> = times.iter().map(|ns| bytes as f64 / ns).collect();
            Row::of_rounds(figure, series, bytes, "GB/s", &speeds)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round_and_those_that_failed_have_none() {
        let series = vec![("whole", vec![10.0, 100.0, 10.0]), ("cache", vec![5.0, 50.0, 10.0])];
        let rounds = Rounds { series, failed: Vec::new() };
        assert_eq!(rounds.times_longer("whole", "cache"), 2.0);
        assert!(rounds.times_longer("whole", "chunks").is_nan());
        assert_eq!(rounds.rows("figure", 10).count(), 2);
    }

    #[test]
    fn copies_are_repeated_but_never_too_often() {
        assert_eq!(repeats_of(64 << 10, Effort::Quick), 20);
        assert_eq!(repeats_of(4 << 20, Effort::Quick), 2);
        assert_eq!(repeats_of(64 << 20, Effort::Full), 1);
    }
}
