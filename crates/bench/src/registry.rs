//! Registry of benches, and what a bench is: something that measures and returns an outcome.

use std::time::Instant;

use crate::results::BENCH_NAMES;
use crate::results::outcome::Outcome;
use crate::{apps, copy, devices, gpu, memory, message};

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

/// A bench.
pub trait Bench: Sync {
    /// Name on the command line.
    fn name(&self) -> &'static str;

    /// What the bench measures, in one line.
    fn about(&self) -> &'static str;

    /// Runs the bench and reports its steps to `progress`.
    fn run(&self, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome>;

    /// Measures what the screen shows of the bench, and starts nothing optional after `until`.
    fn run_for_screen(&self, until: Instant, progress: &dyn Progress) -> anyhow::Result<Outcome> {
        let _ = until;
        self.run(Effort::Brief, progress)
    }
}

/// Benches of this build, in the order of the suite.
pub fn all() -> &'static [&'static dyn Bench] {
    &[
        &copy::latency::CopyLatency,
        &copy::bandwidth::CopyBandwidth,
        &copy::overlap::Overlap,
        &copy::overhead::Overhead,
        &copy::pollution::Pollution,
        &message::ipc::Ipc,
        &message::pingpong::Pingpong,
        &message::alltoall::Alltoall,
        &message::receive_overhead::ReceiveOverhead,
        &memory::pinning::Pinning,
        &memory::lookup::Lookup,
        &gpu::Gpu,
        &devices::Devices,
        &apps::Apps,
    ]
}

/// Returns the bench with this name, or an error sentence for the user.
pub fn find(name: &str) -> Result<&'static dyn Bench, String> {
    find_in(all(), name)
}

fn find_in(benches: &[&'static dyn Bench], name: &str) -> Result<&'static dyn Bench, String> {
    if let Some(bench) = benches.iter().find(|bench| bench.name() == name) {
        return Ok(*bench);
    }
    let names: Vec<_> = benches.iter().map(|bench| bench.name()).collect();
    let available = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(if BENCH_NAMES.contains(&name) {
        format!("the bench `{name}` is planned but not built yet; available: {available}")
    } else {
        format!("there is no bench `{name}`; available: {available}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    struct FakeBench;

    impl Bench for FakeBench {
        fn name(&self) -> &'static str {
            "copy-latency"
        }

        fn about(&self) -> &'static str {
            "Invented numbers."
        }

        fn run(&self, _effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
            progress.start(1, self.name());
            progress.step("nothing");
            progress.finish();
            Ok(sample::latency())
        }
    }

    #[test]
    fn a_bench_is_found_by_its_name() {
        let bench = find_in(&[&FakeBench], "copy-latency").unwrap();
        let outcome = bench.run(Effort::Brief, &NoProgress).unwrap();
        assert_eq!(outcome.bench, "copy-latency");
    }

    #[test]
    fn a_planned_bench_is_told_apart_from_a_wrong_name() {
        let planned = find_in(&[&FakeBench], "overlap").err().unwrap();
        assert_eq!(
            planned,
            "the bench `overlap` is planned but not built yet; available: copy-latency"
        );
        let wrong = find_in(&[&FakeBench], "gup").err().unwrap();
        assert_eq!(wrong, "there is no bench `gup`; available: copy-latency");
    }

    #[test]
    fn this_build_has_exactly_the_benches_of_the_contract() {
        for bench in all() {
            assert!(BENCH_NAMES.contains(&bench.name()), "{}", bench.name());
        }
        for name in BENCH_NAMES {
            assert!(find(name).is_ok(), "{name}");
        }
    }
}
