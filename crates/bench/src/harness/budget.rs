//! How long a comparison takes: rounds, iterations of a run, and a limit of the total time.

use std::time::Duration;

use super::Sample;
use crate::Effort;

/// Minimum number of rounds for a meaningful median of pairs, one of which may be disturbed.
const MIN_ROUNDS: usize = 6;
/// Maximum number of iterations of one run.
const MAX_ITERATIONS: u64 = 100_000;

/// Number of iterations of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Iterations {
    /// This number, for every candidate.
    Fixed(u64),
    /// As many as the slowest candidate can do in this time, for every candidate: so that the
    /// caches are in the same state.
    Equal(Duration),
    /// As many as each candidate can do in this time.
    Each(Duration),
}

/// Extent of a comparison.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Maximum number of rounds.
    pub(crate) rounds: usize,
    pub(crate) iterations: Iterations,
    /// Expected time of all rounds, beyond which there are fewer, but at least six.
    pub(crate) total: Duration,
}

impl Budget {
    /// Calls within this process, of which all candidates do the same number.
    pub(crate) fn of_calls(effort: Effort) -> Self {
        let (rounds, slice_ms) = match effort {
            Effort::Brief => (7, 4),
            Effort::Quick => (11, 4),
            Effort::Full => (21, 10),
        };
        let iterations = Iterations::Equal(Duration::from_millis(slice_ms));
        Self { rounds, iterations, total: Duration::MAX }
    }

    /// Tasks of groups, whose candidates may differ by orders of magnitude.
    pub(crate) fn of_groups(effort: Effort) -> Self {
        match effort {
            Effort::Brief => Self::each(7, 3, 1000),
            Effort::Quick => Self::each(9, 4, 1500),
            Effort::Full => Self::each(15, 10, 8000),
        }
    }

    /// Runs of `slice_ms` milliseconds, within `total_ms` milliseconds.
    pub(crate) fn each(rounds: usize, slice_ms: u64, total_ms: u64) -> Self {
        let iterations = Iterations::Each(Duration::from_millis(slice_ms));
        Self { rounds, iterations, total: Duration::from_millis(total_ms) }
    }

    /// Runs of as many iterations as the slowest candidate does in `slice_ms` milliseconds, within
    /// `total_ms` milliseconds.
    pub(crate) fn equal(rounds: usize, slice_ms: u64, total_ms: u64) -> Self {
        let iterations = Iterations::Equal(Duration::from_millis(slice_ms));
        Self { rounds, iterations, total: Duration::from_millis(total_ms) }
    }

    /// Runs of this number of iterations.
    pub(crate) fn fixed(rounds: usize, iterations: u64) -> Self {
        Self { rounds, iterations: Iterations::Fixed(iterations), total: Duration::MAX }
    }

    /// Returns the number of rounds that fit if one round takes `round_ns`.
    pub(super) fn rounds_of(self, round_ns: f64) -> usize {
        let fit = (self.total.as_nanos() as f64 / round_ns.max(1.0)) as usize;
        fit.clamp(MIN_ROUNDS.min(self.rounds), self.rounds)
    }
}

/// Number of iterations that fit into a time slice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Calibration {
    pub(super) iterations: u64,
    once_ns: f64,
}

impl Calibration {
    /// Number of iterations that fit into `slice_ns`, at least 1.
    pub(crate) fn for_slice(slice_ns: f64, once_ns: f64) -> Self {
        Self { iterations: ((slice_ns / once_ns) as u64).clamp(1, MAX_ITERATIONS), once_ns }
    }

    /// Raises the number of iterations to a minimum.
    pub(crate) fn at_least(self, iterations: u64) -> Self {
        Self { iterations: self.iterations.max(iterations), ..self }
    }

    /// Tries more and more iterations until they fill a good part of the slice.
    pub(crate) fn by_trial(
        slice_ns: f64,
        mut run: impl FnMut(u64) -> Result<Sample, String>,
    ) -> Result<Self, String> {
        let mut iterations = 1;
        loop {
            let once_ns = run(iterations)?.total_ns;
            // A run of a quarter of the slice is long enough to extrapolate.
            if once_ns * iterations as f64 * 4.0 >= slice_ns || iterations >= MAX_ITERATIONS {
                return Ok(Self::for_slice(slice_ns, once_ns));
            }
            let halfway = (slice_ns / once_ns / 2.0) as u64;
            iterations = halfway.clamp(2 * iterations, 64 * iterations);
        }
    }

    /// Expected time of a run, including its warm-up iterations.
    pub(super) fn run_ns(self) -> f64 {
        (self.iterations + warm_up_iterations(self.iterations)) as f64 * self.once_ns
    }
}

/// Number of iterations before the clock starts: they wake sleeping processes and fill the caches.
/// The C candidate uses the same rule.
pub(crate) fn warm_up_iterations(iterations: u64) -> u64 {
    1 + iterations / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_candidates_get_fewer_rounds_but_never_too_few() {
        let short = Budget::each(7, 1, 1000);
        assert_eq!(short.rounds_of(1.0), 7);
        assert_eq!(short.rounds_of(1e9), 6);
        assert_eq!(Budget::each(15, 10, 8000).rounds_of(1e9), 8);
        assert_eq!(Budget::fixed(3, 1).rounds_of(1e12), 3);
    }

    #[test]
    fn iterations_grow_until_they_fill_a_slice() {
        let mut tried = Vec::new();
        let mut trial = |once_ns: f64| {
            tried.clear();
            let fit = Calibration::by_trial(10e6, |iterations| {
                tried.push(iterations);
                Ok(Sample::of_total(once_ns))
            });
            (fit.unwrap(), tried.clone())
        };
        let (fit, tried) = trial(1000.0);
        assert_eq!(fit.iterations, 10_000);
        assert!(tried.len() <= 4, "{tried:?}");
        let (fit, tried) = trial(50e6);
        assert_eq!((fit.iterations, fit.once_ns, tried), (1, 50e6, vec![1]));
        assert_eq!(fit.run_ns(), 100e6);
        assert_eq!(trial(0.1).0.iterations, MAX_ITERATIONS);
    }

    #[test]
    fn a_trial_that_fails_ends_the_calibration() {
        let failed = Calibration::by_trial(1e6, |_| Err("out of luck".to_owned()));
        assert_eq!(failed, Err("out of luck".to_owned()));
    }
}
