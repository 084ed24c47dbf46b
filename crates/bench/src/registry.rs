//! Registry of benches, and what a bench is: something that measures and returns an outcome.

use std::time::Instant;

use crate::results::outcome::Outcome;
use crate::{apps, copy, devices, gpu, load, memory, message, unmodified};

/// Extent of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Only the most important rows.
    Brief,
    /// All figures with few points, within 30 s.
    Quick,
    /// All figures with all points.
    Full,
}

/// Receives the steps of a bench, to show them while it runs.
pub trait Progress {
    /// Sets the number of the current bench within its suite, such as 2 of 5.
    fn set_part(&self, part: usize, parts: usize);

    /// Begins a bench of `total_steps` steps, and ends the previous one.
    fn start(&self, total_steps: u64, label: &str);

    /// A step is done; `message` is the label of the next one.
    fn step(&self, message: &str);

    /// A bench is over, so that its outcome can be shown.
    fn finish(&self);

    /// A line for the user, such as the reason why a bench failed.
    fn report(&self, line: &str);
}

/// Shows nothing.
#[cfg(test)]
pub(crate) struct NoProgress;

#[cfg(test)]
impl Progress for NoProgress {
    fn set_part(&self, _part: usize, _parts: usize) {}
    fn start(&self, _total_steps: u64, _label: &str) {}
    fn step(&self, _message: &str) {}
    fn finish(&self) {}
    fn report(&self, _line: &str) {}
}

/// The function of a bench: completes an empty outcome, and reports its steps.
type RunBench = fn(Outcome, Effort, &dyn Progress) -> anyhow::Result<Outcome>;
/// The same for the screen, within a time.
type RunForScreen = fn(Outcome, Instant, &dyn Progress) -> anyhow::Result<Outcome>;

/// A bench.
#[derive(Debug)]
pub struct Bench {
    /// Name on the command line.
    pub name: &'static str,
    /// What the bench measures, in one line.
    pub about: &'static str,
    run: RunBench,
    run_for_screen: Option<RunForScreen>,
}

impl Bench {
    /// Creates a bench of which the screen shows the brief run.
    pub const fn new(name: &'static str, about: &'static str, run: RunBench) -> Self {
        Self { name, about, run, run_for_screen: None }
    }

    /// Sets what measures for the screen, and starts nothing optional after the given time.
    pub(crate) const fn with_screen(self, run: RunForScreen) -> Self {
        Self { run_for_screen: Some(run), ..self }
    }

    /// Runs the bench and reports its steps to `progress`.
    pub fn run(&self, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
        (self.run)(Outcome::new(self.name), effort, progress)
    }

    /// Measures what the screen shows of the bench, and starts nothing optional after `until`.
    pub(crate) fn run_for_screen(
        &self,
        until: Instant,
        progress: &dyn Progress,
    ) -> anyhow::Result<Outcome> {
        match self.run_for_screen {
            Some(run) => run(Outcome::new(self.name), until, progress),
            None => self.run(Effort::Brief, progress),
        }
    }
}

/// Benches of this build, in the order of the suite.
pub fn all() -> &'static [&'static Bench] {
    static ALL: &[&Bench] = &[
        &copy::latency::BENCH,
        &copy::bandwidth::BENCH,
        &copy::overlap::BENCH,
        &copy::overhead::BENCH,
        &copy::pollution::BENCH,
        &message::ipc::BENCH,
        &message::pingpong::BENCH,
        &message::alltoall::BENCH,
        &message::collectives::BENCH,
        &message::receive_overhead::BENCH,
        &message::matching::BENCH,
        &message::scale::BENCH,
        &memory::pinning::BENCH,
        &memory::lookup::BENCH,
        &gpu::BENCH,
        &load::BENCH,
        &devices::BENCH,
        &apps::BENCH,
        &unmodified::BENCH,
    ];
    ALL
}

/// Returns the bench with this name, or an error sentence for the user.
pub fn find(name: &str) -> Result<&'static Bench, String> {
    all().iter().find(|bench| bench.name == name).copied().ok_or_else(|| {
        let names: Vec<_> = all().iter().map(|bench| bench.name).collect();
        format!("there is no bench `{name}`; available: {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::BENCH_NAMES;

    #[test]
    fn an_unknown_bench_is_answered_with_those_there_are() {
        let wrong = find("gup").unwrap_err();
        assert!(wrong.starts_with("there is no bench `gup`; available: copy-latency, "), "{wrong}");
    }

    #[test]
    fn this_build_has_exactly_the_benches_of_the_contract() {
        for bench in all() {
            assert!(BENCH_NAMES.contains(&bench.name), "{}", bench.name);
        }
        for name in BENCH_NAMES {
            assert!(find(name).is_ok(), "{name}");
        }
    }
}
