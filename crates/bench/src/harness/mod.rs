//! The harness of all benches. Candidates run interleaved, round by round, so that a disturbance of
//! the machine affects all of them. Ratios are taken within a round; the result is the median over
//! rounds. A candidate that fails is reported, and the others continue.

mod budget;
mod closure;
mod fixtures;
mod samples;

pub(crate) use budget::{Budget, Calibration, Iterations, warm_up_iterations};
pub(crate) use closure::FnCandidate;
pub(crate) use fixtures::{BufferPair, ColdCursor, compute, memcpy, set};
pub(crate) use samples::{Sample, Samples, both_directions, max_or_nan, median, min_or_nan};

use samples::SampleSeries;

/// Role of a candidate in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Memferry.
    Memferry,
    /// A candidate that Memferry is compared with.
    Peer,
    /// A candidate that is compared with one named series, and is not a peer of Memferry.
    Reference,
    /// The lower bound of every candidate.
    LowerBound,
}

/// What is measured: a call, a group of processes, a route of a copy, an endpoint. After an error
/// no method is called again.
pub(crate) trait Candidate {
    /// Series in tables and plots.
    fn series(&self) -> &str;

    /// Role in the comparison.
    fn role(&self) -> Role;

    /// Does what comes before the first round, untimed.
    fn prepare(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Runs a number of iterations, and returns the times of one of them. What comes before the
    /// timed part, such as iterations that fill the caches, is not in the times.
    fn run(&mut self, iterations: u64) -> Result<Sample, String>;

    /// Checks the result after the last round, untimed.
    fn verify(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Determines how many iterations fit into a time slice.
    fn calibrate(&mut self, slice_ns: f64) -> Result<Calibration, String> {
        Calibration::by_trial(slice_ns, |iterations| self.run(iterations))
    }
}

/// What a candidate failed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Preparation, or a run.
    Run,
    /// The check of the result.
    Verify,
}

/// A candidate that failed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) series: String,
    pub(crate) stage: Stage,
    pub(crate) reason: String,
}

/// Compares candidates within a budget.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Harness {
    budget: Budget,
}

impl Harness {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { budget }
    }

    /// Runs the candidates: prepares all, calibrates all, runs each once in every round, and
    /// verifies all.
    pub(crate) fn interleave<C: Candidate>(&self, candidates: &mut [C]) -> Samples {
        let mut turns: Vec<_> = candidates.iter_mut().map(Turns::new).collect();
        for turn in &mut turns {
            turn.attempt(Stage::Run, Candidate::prepare);
        }
        let rounds = self.calibrate(&mut turns);
        for round in 0..rounds {
            for turn in 0..turns.len() {
                let index = candidate_index(turn, round, turns.len());
                turns[index].run_once();
            }
        }
        for turn in &mut turns {
            turn.attempt(Stage::Verify, Candidate::verify);
        }
        let mut samples = Samples::default();
        for turn in turns {
            let series = turn.candidate.series().to_owned();
            match turn.failure {
                None => {
                    let role = turn.candidate.role();
                    samples.series.push(SampleSeries { series, role, samples: turn.samples });
                }
                Some((stage, reason)) => samples.failures.push(Failure { series, stage, reason }),
            }
        }
        samples
    }

    /// Sets the iterations of every candidate, and returns the number of rounds.
    fn calibrate<C: Candidate>(&self, turns: &mut [Turns<'_, C>]) -> usize {
        let slice_ns = match self.budget.iterations {
            Iterations::Fixed(iterations) => {
                turns.iter_mut().for_each(|turn| turn.iterations = iterations);
                return self.budget.rounds;
            }
            Iterations::Equal(slice) | Iterations::Each(slice) => slice.as_nanos() as f64,
        };
        let mut round_ns = 0.0;
        for turn in &mut *turns {
            if let Some(fit) = turn.attempt(Stage::Run, |it| it.calibrate(slice_ns)) {
                turn.iterations = fit.iterations;
                round_ns += fit.run_ns();
            }
        }
        if matches!(self.budget.iterations, Iterations::Equal(_)) {
            let running = turns.iter().filter(|turn| turn.failure.is_none());
            let fewest = running.map(|turn| turn.iterations).min().unwrap_or(1);
            turns.iter_mut().for_each(|turn| turn.iterations = fewest);
        }
        self.budget.rounds_of(round_ns)
    }
}

/// A candidate with its samples until it failed.
struct Turns<'a, C> {
    candidate: &'a mut C,
    iterations: u64,
    samples: Vec<Sample>,
    failure: Option<(Stage, String)>,
}

impl<'a, C: Candidate> Turns<'a, C> {
    fn new(candidate: &'a mut C) -> Self {
        Self { candidate, iterations: 1, samples: Vec::new(), failure: None }
    }

    /// Calls the candidate unless it failed before. An error takes it out of the comparison.
    fn attempt<T>(
        &mut self,
        stage: Stage,
        call: impl FnOnce(&mut C) -> Result<T, String>,
    ) -> Option<T> {
        if self.failure.is_some() {
            return None;
        }
        match call(self.candidate) {
            Ok(value) => Some(value),
            Err(reason) => {
                self.failure = Some((stage, reason));
                None
            }
        }
    }

    fn run_once(&mut self) {
        let iterations = self.iterations;
        let sample = self.attempt(Stage::Run, |candidate| candidate.run(iterations));
        self.samples.extend(sample);
    }
}

/// Index of the candidate that runs next. The first candidate and the direction change from round
/// to round, so that no candidate has an advantage from its position or its predecessor.
fn candidate_index(turn: usize, round: usize, count: usize) -> usize {
    let place = (turn + round / 2) % count;
    if round.is_multiple_of(2) { place } else { count - 1 - place }
}

#[cfg(test)]
mod tests;
