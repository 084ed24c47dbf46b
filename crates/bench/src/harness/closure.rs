//! Closures as candidates.

use std::time::Instant;

use super::{Candidate, Role, Sample};

/// A candidate that is a closure.
pub(crate) struct FnCandidate<'a> {
    series: String,
    role: Role,
    work: Work<'a>,
}

enum Work<'a> {
    /// One iteration, which is timed here.
    Plain(Box<dyn FnMut() + 'a>),
    /// A number of iterations, which the closure times.
    Timed(Box<dyn FnMut(u64) -> Result<Sample, String> + 'a>),
}

impl<'a> FnCandidate<'a> {
    /// A closure of which every call is an iteration.
    pub(crate) fn new(series: impl Into<String>, role: Role, run: impl FnMut() + 'a) -> Self {
        Self { series: series.into(), role, work: Work::Plain(Box::new(run)) }
    }

    /// A closure that runs a number of iterations and returns the times of one.
    pub(crate) fn timed(
        series: impl Into<String>,
        role: Role,
        run: impl FnMut(u64) -> Result<Sample, String> + 'a,
    ) -> Self {
        Self { series: series.into(), role, work: Work::Timed(Box::new(run)) }
    }
}

impl Candidate for FnCandidate<'_> {
    fn series(&self) -> &str {
        &self.series
    }

    fn role(&self) -> Role {
        self.role
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        match &mut self.work {
            Work::Plain(once) => {
                // One untimed call wakes sleeping channels and trains the branch predictor.
                once();
                let start = Instant::now();
                for _ in 0..iterations {
                    once();
                }
                let total_ns = start.elapsed().as_nanos() as f64;
                Ok(Sample::of_total(total_ns).per_iteration(iterations))
            }
            Work::Timed(run) => run(iterations),
        }
    }
}
