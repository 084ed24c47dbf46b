//! The registry of benches. A bench measures and hands back an outcome; it never prints. The
//! command line finds it here by name, and the views take its outcome from there.

mod alltoall;
mod apps;
mod bandwidth;
pub(crate) mod command;
pub(crate) mod devices;
mod gpu;
pub(crate) mod group;
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
mod suite;

use crate::outcome::Outcome;
use crate::show::Progress;

/// How much a bench should measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// The few most telling rows, for the short suite.
    Brief,
    /// All figures with few points, within half a minute.
    Quick,
    /// Everything.
    Full,
}

/// Something that measures.
pub(crate) trait Bench: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What it measures, in one line.
    fn about(&self) -> &'static str;

    /// Measures, and reports its steps as it goes.
    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome>;
}

/// Every name of the bench contract, whether this build has it or not.
pub(crate) const CONTRACT: [&str; 14] = [
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

/// The benches of this build, in the order the suite runs them.
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

/// The bench of a name, or a sentence that says why there is none.
pub(crate) fn find(name: &str) -> Result<&'static dyn Bench, String> {
    find_in(all(), name)
}

fn find_in(benches: &[&'static dyn Bench], name: &str) -> Result<&'static dyn Bench, String> {
    if let Some(bench) = benches.iter().find(|bench| bench.name() == name) {
        return Ok(*bench);
    }
    let names: Vec<_> = benches.iter().map(|bench| bench.name()).collect();
    let available = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(if CONTRACT.contains(&name) {
        format!("the bench `{name}` is planned but not built yet; available: {available}")
    } else {
        format!("there is no bench `{name}`; available: {available}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    struct Invented;

    impl Bench for Invented {
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
        let bench = find_in(&[&Invented], "copy-latency").unwrap();
        let outcome = bench.run(Effort::Brief, &Progress::new(false)).unwrap();
        assert_eq!(outcome.bench, "copy-latency");
    }

    #[test]
    fn a_planned_bench_is_told_apart_from_a_wrong_name() {
        let planned = find_in(&[&Invented], "overlap").err().unwrap();
        assert_eq!(
            planned,
            "the bench `overlap` is planned but not built yet; available: copy-latency"
        );
        let wrong = find_in(&[&Invented], "gup").err().unwrap();
        assert_eq!(wrong, "there is no bench `gup`; available: copy-latency");
    }

    #[test]
    fn this_build_has_exactly_the_benches_of_the_contract() {
        for bench in all() {
            assert!(CONTRACT.contains(&bench.name()), "{}", bench.name());
        }
        for name in CONTRACT {
            assert!(find(name).is_ok(), "{name}");
        }
    }
}
