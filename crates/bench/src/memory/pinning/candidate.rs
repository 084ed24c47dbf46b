//! Pin methods as candidates. Only the copies are timed, not the
//! preparation of fresh buffers.

use std::cell::RefCell;
use std::time::Instant;
use std::{fmt, io};

use memferry::sys::pages::Pages;

use super::device::{PinMethod, PinningDevice};
use crate::Effort;
use crate::harness::{Budget, Candidate, Harness, Role, Sample, Samples};
use crate::results::figure::is_memferry;

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

/// Runs every method with copies of `bytes`, interleaved.
pub(super) fn interleave(
    device: &PinningDevice,
    methods: &[(&'static str, PinMethod)],
    bytes: usize,
    buffers: PinBufferState,
    effort: Effort,
) -> anyhow::Result<Samples> {
    let mut source = Pages::new(bytes)?;
    for (place, byte) in source.as_mut_slice().iter_mut().enumerate() {
        *byte = (place * 31 + (place >> 12)) as u8;
    }
    let mut kept = Pages::new(bytes)?;
    kept.as_mut_slice().fill(POISON);
    let kept = RefCell::new(kept);
    let candidate = |&(series, method)| {
        let (source, kept) = (&source, &kept);
        PinCandidate { series, device, method, source, kept, buffers }
    };
    let mut candidates: Vec<_> = methods.iter().map(candidate).collect();
    let budget = Budget::fixed(rounds_of(effort), repeats_of(bytes, effort));
    let samples = Harness::new(budget).interleave(&mut candidates);
    samples.require_verified()?;
    Ok(samples)
}

/// Contents of a target before the copy that is verified.
const POISON: u8 = 0xA5;

/// A method to pin the buffers of a copy.
struct PinCandidate<'a> {
    series: &'static str,
    device: &'a PinningDevice,
    method: PinMethod,
    source: &'a Pages,
    /// Target of all methods, if it is reused.
    kept: &'a RefCell<Pages>,
    buffers: PinBufferState,
}

impl PinCandidate<'_> {
    /// Copies to the reused or to a fresh target, and returns the time of the copy alone.
    fn copy_once(&self) -> Result<f64, String> {
        let error_text = |error: io::Error| error.to_string();
        match self.buffers {
            PinBufferState::Reused => self.timed(&mut self.kept.borrow_mut()),
            PinBufferState::Fresh => {
                self.timed(&mut Pages::new(self.source.len()).map_err(error_text)?)
            }
        }
    }

    fn timed(&self, target: &mut Pages) -> Result<f64, String> {
        let start = Instant::now();
        // A pin can fail now and then at a limit, because other memory is unpinned later.
        let done = self.device.copy(self.method, self.source, target);
        done.map_err(|error| error.to_string())?;
        Ok(start.elapsed().as_nanos() as f64)
    }
}

impl Candidate for PinCandidate<'_> {
    fn series(&self) -> &str {
        self.series
    }

    fn role(&self) -> Role {
        if is_memferry(self.series) { Role::Memferry } else { Role::Peer }
    }

    fn prepare(&mut self) -> Result<(), String> {
        self.timed(&mut self.kept.borrow_mut()).map(|_| ())
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        // One untimed copy removes the effects of the previous method on the caches.
        self.copy_once()?;
        let mut total_ns = 0.0;
        for _ in 0..iterations {
            total_ns += self.copy_once()?;
        }
        Ok(Sample::of_total(total_ns).per_iteration(iterations))
    }

    fn verify(&mut self) -> Result<(), String> {
        let mut kept = self.kept.borrow_mut();
        kept.as_mut_slice().fill(POISON);
        // At a limit there is nothing to compare; the rounds before were measured.
        if self.timed(&mut kept).is_ok() && kept.as_slice() != self.source.as_slice() {
            return Err("a byte is wrong".into());
        }
        Ok(())
    }
}

fn rounds_of(effort: Effort) -> usize {
    match effort {
        Effort::Brief | Effort::Quick => 7,
        Effort::Full => 11,
    }
}

/// Number of copies per round: many short ones, or few long ones.
fn repeats_of(bytes: usize, effort: Effort) -> u64 {
    let max_bytes: usize = if effort == Effort::Full { 16 << 20 } else { 8 << 20 };
    (max_bytes / bytes).clamp(1, 20) as u64
}

#[cfg(test)]
mod tests {
    use memferry_memory::pinning::PinError;

    use super::*;

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
            left.map(|_| memferry_memory::pinning::PinToken::new(0)).map_err(limit)
        }

        fn unpin(
            &self,
            _range: memferry_memory::pinning::PageRange,
            _token: &memferry_memory::pinning::PinToken,
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
        let samples =
            interleave(&device, &ways, 64 << 10, PinBufferState::Fresh, Effort::Quick).unwrap();
        assert!(!samples.has("whole"));
        let [failure] = samples.failures() else { panic!("one failed") };
        assert_eq!(failure.series, "whole");
        let reason = &failure.reason;
        assert!(reason.contains("by other processes of its user"), "{reason}");
    }

    #[test]
    fn copies_are_repeated_but_never_too_often() {
        assert_eq!(repeats_of(64 << 10, Effort::Quick), 20);
        assert_eq!(repeats_of(4 << 20, Effort::Quick), 2);
        assert_eq!(repeats_of(64 << 20, Effort::Full), 1);
    }
}
