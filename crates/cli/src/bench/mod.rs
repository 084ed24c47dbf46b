//! Registry of benches. A bench measures and returns an outcome; it prints nothing. The command
//! line finds benches here by name, and the views show their outcomes.

mod alltoall;
mod apps;
mod bandwidth;
pub(crate) mod command;
pub(crate) mod devices;
mod gpu;
pub(crate) mod group;
pub(crate) mod headline;
mod ipc;
mod latency;
mod load;
pub(crate) mod lookup;
mod measure;
mod overhead;
mod overlap;
mod pingpong;
mod pinning;
mod pollution;
mod receive_overhead;
mod screen;
pub(crate) mod suite;

use std::time::Instant;

use crate::outcome::Outcome;
use crate::show::Progress;

/// Extent of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Only the most important rows.
    Brief,
    /// All figures with few points, within 30 s.
    Quick,
    /// All figures with all points.
    Full,
}

/// A bench.
pub(crate) trait Bench: Sync {
    /// Name on the command line.
    fn name(&self) -> &'static str;

    /// What the bench measures, in one line.
    fn about(&self) -> &'static str;

    /// Runs the bench and reports its steps to `progress`.
    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome>;

    /// Measures what the screen shows of the bench, and starts nothing optional after `until`.
    fn run_for_screen(&self, until: Instant, progress: &Progress) -> anyhow::Result<Outcome> {
        let _ = until;
        self.run(Effort::Brief, progress)
    }
}

/// Names of all benches, including those that this build lacks.
pub(crate) const BENCH_NAMES: [&str; 14] = [
    "copy-latency",
    "copy-bandwidth",
    "overlap",
    "overhead",
    "pollution",
    "ipc",
    "pingpong",
    "alltoall",
    "receive-overhead",
    "pinning",
    "lookup",
    "gpu",
    "devices",
    "apps",
];

/// Benches of this build, in the order of the suite.
pub(crate) fn all() -> &'static [&'static dyn Bench] {
    &[
        &latency::CopyLatency,
        &bandwidth::CopyBandwidth,
        &overlap::Overlap,
        &overhead::Overhead,
        &pollution::Pollution,
        &ipc::Ipc,
        &pingpong::Pingpong,
        &alltoall::Alltoall,
        &receive_overhead::ReceiveOverhead,
        &pinning::Pinning,
        &lookup::Lookup,
        &gpu::Gpu,
        &devices::Devices,
        &apps::Apps,
    ]
}

/// Returns the bench with this name, or an error sentence for the user.
pub(crate) fn find(name: &str) -> Result<&'static dyn Bench, String> {
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
    use crate::sample;

    struct FakeBench;

    impl Bench for FakeBench {
        fn name(&self) -> &'static str {
            "copy-latency"
        }

        fn about(&self) -> &'static str {
            "Invented numbers."
        }

        fn run(&self, _effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
            progress.start(1, self.name());
            progress.step("nothing");
            progress.finish();
            Ok(sample::latency())
        }
    }

    #[test]
    fn a_bench_is_found_by_its_name() {
        let bench = find_in(&[&FakeBench], "copy-latency").unwrap();
        let outcome = bench.run(Effort::Brief, &Progress::new(false)).unwrap();
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
