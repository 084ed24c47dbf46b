//! `memferry bench`: runs one bench or all of them, and shows what they found as tables, JSON and
//! report. A suite goes on after a bench that fails, and says so at the end.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use memferry_sys::throttle::Watched;

use super::load::{self, Load};
use super::{Bench, Effort, all, find, suite};
use crate::args::BenchArgs;
use crate::outcome::Outcome;
use crate::report;
use crate::show::{self, Paint, Progress, table};

/// Where the report of a suite goes unless told otherwise.
const DEFAULT_REPORT: &str = "memferry-report.html";

/// Runs what the arguments ask for.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let default = (args.name.is_none() && !args.json).then(|| PathBuf::from(DEFAULT_REPORT));
    if let Some(path) = args.report.as_deref().or(default.as_deref()) {
        // Better now than after minutes of measuring.
        std::fs::OpenOptions::new().append(true).create(true).open(path).with_context(|| {
            let path = path.display();
            format!("the report {path} cannot be written: name another file with --report")
        })?;
    }
    match &args.name {
        Some(name) => run_one(find(name).map_err(anyhow::Error::msg)?, args),
        None => run_suite(all(), args),
    }
}

fn run_one(bench: &'static dyn Bench, args: &BenchArgs) -> anyhow::Result<()> {
    let effort = if args.quick { Effort::Quick } else { Effort::Full };
    let progress = Progress::new(!args.json);
    let outcome = measure(bench, effort, &progress)?;
    if args.json {
        show::print_json(&outcome)?;
    } else {
        show::print(&table::render(&outcome, Paint::for_stdout()))?;
    }
    let failed = failure_of_ours(&outcome).map(str::to_owned);
    write_report(args.report.as_deref(), &[outcome], args)?;
    failed.map_or(Ok(()), |failed| bail!("{failed}"))
}

/// What happened to one of our own contestants that did not get to the end: a failure, not a peer
/// that happens to be missing.
fn failure_of_ours(outcome: &Outcome) -> Option<&str> {
    outcome.failed_and_absent().0.first().copied()
}

fn run_suite(benches: &[&'static dyn Bench], args: &BenchArgs) -> anyhow::Result<()> {
    if benches.is_empty() {
        bail!("this build has no benches");
    }
    let (name, effort) = if args.all { ("all", Effort::Full) } else { ("suite", Effort::Brief) };
    let (outcomes, failures) = measure_all(benches, effort, !args.json)?;
    if args.json {
        show::print_json(&suite::join(name, &outcomes)?)?;
    }
    // With --json somebody's script is reading, and did not ask for a file.
    let default = (!args.json).then(|| PathBuf::from(DEFAULT_REPORT));
    if !outcomes.is_empty() {
        let path = args.report.as_deref().or(default.as_deref());
        write_report(path, &outcomes, args)?;
    }
    if !failures.is_empty() {
        bail!("{} of {} benches failed: {}", failures.len(), benches.len(), failures.join(", "));
    }
    Ok(())
}

/// Runs benches one after the other, each shown as soon as it is done. Hands back what worked and
/// the names of those that failed.
fn measure_all(
    benches: &[&'static dyn Bench],
    effort: Effort,
    shown: bool,
) -> anyhow::Result<(Vec<Outcome>, Vec<&'static str>)> {
    let progress = Progress::new(shown);
    let (mut outcomes, mut failures) = (Vec::new(), Vec::new());
    for (index, bench) in benches.iter().enumerate() {
        progress.set_part(index + 1, benches.len());
        match measure(*bench, effort, &progress) {
            Ok(outcome) => {
                if shown {
                    show::print(&format!("{}\n", table::render(&outcome, Paint::for_stdout())))?;
                }
                if let Some(failed) = failure_of_ours(&outcome) {
                    show::complain(&format!("memferry: the bench {}: {failed}", bench.name()));
                    failures.push(bench.name());
                }
                outcomes.push(outcome);
            }
            Err(error) => {
                show::complain(&format!("memferry: {error:#}"));
                failures.push(bench.name());
            }
        }
    }
    Ok((outcomes, failures))
}

/// Runs a bench and takes its progress bar away, whatever comes of it.
fn measure(bench: &dyn Bench, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
    let (before, quota) = (Load::now(), Watched::begin());
    let outcome = bench.run(effort, progress);
    progress.finish();
    let mut outcome = outcome.with_context(|| format!("the bench {} failed", bench.name()))?;
    outcome.busy = before.and_then(Load::others_since);
    outcome.throttled = Some(quota.share());
    if let Some(disturbance) = outcome.disturbance() {
        outcome.notes.push(load::warning(disturbance));
    }
    Ok(outcome)
}

fn write_report(path: Option<&Path>, outcomes: &[Outcome], args: &BenchArgs) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    report::write(path, outcomes)?;
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let line = format!("The report is in {}", full.display());
    if args.json {
        show::complain(&line);
    } else {
        show::print(&format!("{line}\n"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    struct Invented;
    struct Broken;

    impl Bench for Invented {
        fn name(&self) -> &'static str {
            "copy-latency"
        }

        fn about(&self) -> &'static str {
            "Invented numbers."
        }

        fn run(&self, _effort: Effort, _progress: &Progress) -> anyhow::Result<Outcome> {
            Ok(sample::latency())
        }
    }

    impl Bench for Broken {
        fn name(&self) -> &'static str {
            "overlap"
        }

        fn about(&self) -> &'static str {
            "Never works."
        }

        fn run(&self, _effort: Effort, _progress: &Progress) -> anyhow::Result<Outcome> {
            bail!("out of luck")
        }
    }

    #[test]
    fn a_suite_goes_on_after_a_bench_that_fails() {
        let (outcomes, failures) =
            measure_all(&[&Broken, &Invented], Effort::Brief, false).unwrap();
        assert_eq!(outcomes.len(), 1);
        assert_eq!(outcomes[0].bench, "copy-latency");
        assert_eq!(failures, ["overlap"]);
    }

    #[test]
    fn a_suite_whose_benches_all_fail_names_them() {
        let error = run_suite(&[&Broken], &BenchArgs::default()).unwrap_err().to_string();
        assert_eq!(error, "1 of 1 benches failed: overlap");
    }

    #[test]
    fn a_failing_bench_is_named_with_its_cause() {
        let error = measure(&Broken, Effort::Full, &Progress::new(false)).unwrap_err();
        assert_eq!(format!("{error:#}"), "the bench overlap failed: out of luck");
    }
}
