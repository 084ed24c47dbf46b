//! Comparison of pin methods, interleaved, round by round. Only the copies are timed, not the
//! preparation of fresh buffers.

use std::fmt;
use std::time::Instant;

use anyhow::ensure;
use memferry::sys::pages::Pages;
use memferry_memory::pinning::PinError;

use super::device::{PinMethod, PinningDevice};
use crate::Effort;
use crate::harness::median;
use crate::results::outcome::Row;

/// State of the buffers of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PinBufferState {
    /// Never touched, at another address than before.
    Fresh,
    /// Used before.
    Reused,
}

impl fmt::Display for PinBufferState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fresh => "fresh",
            Self::Reused => "reused",
        })
    }
}

/// Times of each method for one copy, in nanoseconds, round by round.
pub(super) struct PinningSamples {
    series: Vec<(&'static str, Vec<f64>)>,
    /// Methods that could not pin, with the reason.
    pub(super) failed: Vec<(&'static str, PinError)>,
}

/// Runs every method with copies of `bytes`, interleaved.
pub(super) fn interleave(
    device: &PinningDevice,
    ways: &[(&'static str, PinMethod)],
    bytes: usize,
    buffers: PinBufferState,
    effort: Effort,
) -> anyhow::Result<PinningSamples> {
    let mut source = Pages::new(bytes)?;
    for (place, byte) in source.as_mut_slice().iter_mut().enumerate() {
        *byte = (place * 31 + (place >> 12)) as u8;
    }
    let mut kept = Pages::new(bytes)?;
    kept.as_mut_slice().fill(0xA5);
    let mut rounds = PinningSamples { series: Vec::new(), failed: Vec::new() };
    let mut taking_part = Vec::new();
    for &(series, way) in ways {
        // An untimed copy is verified; it also fills the caches.
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
        // A method that fails is skipped, so that the order of the others stays.
        let among = taking_part.len();
        for turn in 0..among {
            // The first method and the direction change from round to round.
            let place = (turn + round / 2) % among;
            let index = if round % 2 == 0 { place } else { among - 1 - place };
            let (series, way) = taking_part[index];
            if rounds.failed.iter().any(|(failed, _)| *failed == series) {
                continue;
            }
            let once = |kept: &mut Pages| match buffers {
                PinBufferState::Reused => timed(device, way, &source, kept),
                PinBufferState::Fresh => timed(device, way, &source, &mut Pages::new(bytes)?),
            };
            match repeated(repeats, || once(&mut kept)) {
                Ok(mean_ns) => rounds.series[index].1.push(mean_ns),
                // A pin can fail now and then at a limit, because other memory is unpinned later.
                Err(MeasureError::Pin(error)) => rounds.failed.push((series, error)),
                Err(MeasureError::Memory(error)) => return Err(error.into()),
            }
        }
    }
    let failed: Vec<_> = rounds.failed.iter().map(|(series, _)| *series).collect();
    rounds.series.retain(|(series, _)| !failed.contains(series));
    Ok(rounds)
}

/// Reason why a copy could not be timed.
enum MeasureError {
    Pin(PinError),
    Memory(std::io::Error),
}

impl From<std::io::Error> for MeasureError {
    fn from(error: std::io::Error) -> Self {
        Self::Memory(error)
    }
}

/// Mean of several times, after one untimed run that removes the effects of the previous method on
/// the caches.
fn repeated(
    repeats: usize,
    mut once: impl FnMut() -> Result<f64, MeasureError>,
) -> Result<f64, MeasureError> {
    once()?;
    let mut total_ns = 0.0;
    for _ in 0..repeats {
        total_ns += once()?;
    }
    Ok(total_ns / repeats as f64)
}

fn timed(
    device: &PinningDevice,
    way: PinMethod,
    source: &Pages,
    target: &mut Pages,
) -> Result<f64, MeasureError> {
    let start = Instant::now();
    device.copy(way, source, target).map_err(MeasureError::Pin)?;
    Ok(start.elapsed().as_nanos() as f64)
}

fn rounds_of(effort: Effort) -> usize {
    match effort {
        Effort::Brief | Effort::Quick => 7,
        Effort::Full => 11,
    }
}

/// Number of copies per round: many short ones, or few long ones.
fn repeats_of(bytes: usize, effort: Effort) -> usize {
    let most_bytes: usize = if effort == Effort::Full { 16 << 20 } else { 8 << 20 };
    (most_bytes / bytes).clamp(1, 20)
}

impl PinningSamples {
    /// Returns the median over rounds of the time of `series` divided by the time of `other`; NaN
    /// if one of them did not run.
    pub(super) fn slowdown(&self, series: &str, other: &str) -> f64 {
        let of = |name: &str| self.series.iter().find(|(series, _)| *series == name);
        match (of(series), of(other)) {
            (Some((_, series)), Some((_, other))) => {
                median(series.iter().zip(other).map(|(series, other)| series / other).collect())
            }
            _ => f64::NAN,
        }
    }

    /// Rows of bandwidth, one for each method.
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
        let rounds = PinningSamples { series, failed: Vec::new() };
        assert_eq!(rounds.slowdown("whole", "cache"), 2.0);
        assert!(rounds.slowdown("whole", "chunks").is_nan());
        assert_eq!(rounds.rows("figure", 10).count(), 2);
    }

    /// A pinner that reaches its limit after a number of pins.
    #[derive(Debug)]
    struct LimitedPinner(std::sync::atomic::AtomicUsize);

    impl memferry_memory::pinning::Pinner for LimitedPinner {
        fn name(&self) -> &'static str {
            "tired"
        }

        fn pin(
            &self,
            range: memferry_memory::pinning::PageRange,
            _access: memferry_memory::pinning::Access,
        ) -> Result<memferry_memory::pinning::PinToken, PinError> {
            use std::sync::atomic::Ordering::Relaxed;
            let left = self.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            let limit = |_| PinError::MemlockLimit {
                limit_bytes: 8 << 20,
                locked_bytes: 0,
                requested_bytes: range.bytes() as u64,
            };
            left.map(|_| memferry_memory::pinning::PinToken(0)).map_err(limit)
        }

        fn unpin(
            &self,
            _range: memferry_memory::pinning::PageRange,
            _token: memferry_memory::pinning::PinToken,
        ) {
        }

        fn tracks_mapping(&self) -> bool {
            true
        }
    }

    #[test]
    fn a_limit_that_is_met_in_the_middle_ends_a_series_and_not_the_bench() {
        use memferry_memory::pinning::ChunkSchedule;
        // Enough pins for the verification, and for some of the rounds.
        let device = PinningDevice::new(std::sync::Arc::new(LimitedPinner(20.into()))).unwrap();
        let ways = [("whole", PinMethod::EachTime(ChunkSchedule::Whole))];
        let rounds =
            interleave(&device, &ways, 64 << 10, PinBufferState::Fresh, Effort::Quick).unwrap();
        assert_eq!(rounds.rows("figure", 1).count(), 0);
        let [(series, error)] = &rounds.failed[..] else { panic!("one failed") };
        assert_eq!(*series, "whole");
        assert!(error.to_string().contains("by other processes of its user"), "{error}");
    }

    #[test]
    fn copies_are_repeated_but_never_too_often() {
        assert_eq!(repeats_of(64 << 10, Effort::Quick), 20);
        assert_eq!(repeats_of(4 << 20, Effort::Quick), 2);
        assert_eq!(repeats_of(64 << 20, Effort::Full), 1);
    }
}
