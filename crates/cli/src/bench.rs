//! `memferry bench`: runs the screen, one bench or all benches, and shows their outcomes as text,
//! JSON and report. A suite continues after a bench that fails, and names it at the end.

use std::path::PathBuf;

use anyhow::{Context, bail};
use memferry_bench::host::machine::Machine;
use memferry_bench::results::outcome::Outcome;
use memferry_bench::results::suite;
use memferry_bench::{Bench, Effort, Progress, Screen, all, find, measure};

use crate::args::BenchArgs;
use crate::report::{self, Origin, ReportView};
use crate::show::table::TableView;
use crate::show::{self, Paint, TerminalProgress, screen, table};
use crate::timeline::Timeline;

/// Runs what the arguments select.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(path) = report_path(args) {
        // An unwritable report fails before the benches run, not after minutes of measuring.
        std::fs::OpenOptions::new().append(true).create(true).open(&path).with_context(|| {
            let path = path.display();
            format!("the report {path} cannot be written: name another file with --report")
        })?;
    }
    match &args.name {
        Some(name) => run_one(find(name).map_err(anyhow::Error::msg)?, args),
        None if args.all => run_suite(all(), args),
        None => run_screen(args),
    }
}

/// Path of the report, if one is written. With --json the reader is a script, so there is no
/// default path.
fn report_path(args: &BenchArgs) -> Option<PathBuf> {
    let default =
        || (args.name.is_none() && !args.json).then(|| PathBuf::from(report::DEFAULT_FILE));
    args.report.clone().or_else(default)
}

fn run_screen(args: &BenchArgs) -> anyhow::Result<()> {
    let measured = Screen::measure(&TerminalProgress::new(!args.json));
    if args.json {
        show::print_json(&measured.json()?)?;
    } else {
        show::print(&screen_text(&measured, Paint::for_stdout()))?;
    }
    if !measured.outcomes.is_empty() {
        write_report(&measured.outcomes, args)?;
    }
    let mut failures = measured.failures;
    failures.extend(measured.outcomes.iter().filter_map(|outcome| {
        let failed = own_failure(outcome)?;
        show::print_error(&format!("memferry: the bench {}: {failed}", outcome.bench));
        find(&outcome.bench).ok().map(|bench| bench.name)
    }));
    if !failures.is_empty() {
        bail!("benches failed: {}", failures.join(", "));
    }
    Ok(())
}

/// The screen as text.
fn screen_text(measured: &Screen, paint: Paint) -> String {
    screen::render(&Machine::detect(), &measured.lines(), &measured.notes(), paint)
}

fn run_one(bench: &Bench, args: &BenchArgs) -> anyhow::Result<()> {
    let effort = if args.quick { Effort::Quick } else { Effort::Full };
    let progress = TerminalProgress::new(!args.json);
    let timeline = args.trace.as_ref().map(|_| Timeline::start()).transpose()?;
    let outcome = measure(bench, &progress, || bench.run(effort, &progress))?;
    if let (Some(timeline), Some(path)) = (&timeline, &args.trace) {
        let events = timeline.write(path)?;
        show::print_error(&format!("{events} events of transfers in {}", path.display()));
    }
    if args.json {
        show::print_json(&outcome)?;
    } else {
        show::print(&table::render(&outcome, view(args)))?;
    }
    let failed = own_failure(&outcome).map(str::to_owned);
    let outcomes = [outcome];
    write_report(&outcomes, args)?;
    if let Some(failed) = failed {
        bail!("{failed}");
    }
    judge(&outcomes, args)
}

fn view(args: &BenchArgs) -> TableView {
    TableView {
        paint: Paint::for_stdout(),
        bars: args.bars,
        names_report: args.name.is_some() && args.report.is_none(),
    }
}

/// Fails if the targets are shown and one is missed.
fn judge(outcomes: &[Outcome], args: &BenchArgs) -> anyhow::Result<()> {
    let missed: Vec<_> = outcomes.iter().flat_map(Outcome::missed_targets).collect();
    if args.bars && !missed.is_empty() {
        bail!("targets missed: {}", missed.join(", "));
    }
    Ok(())
}

/// Reason why one of Memferry's own candidates did not finish. This is a failure of the bench; a
/// missing peer is not.
fn own_failure(outcome: &Outcome) -> Option<&str> {
    outcome.failed_and_missing().0.first().copied()
}

fn run_suite(benches: &[&'static Bench], args: &BenchArgs) -> anyhow::Result<()> {
    if benches.is_empty() {
        bail!("this build has no benches");
    }
    let (name, effort) = if args.quick { ("suite", Effort::Brief) } else { ("all", Effort::Full) };
    let (outcomes, failures) = measure_all(benches, effort, args)?;
    if args.json {
        show::print_json(&suite::join(name, &outcomes)?)?;
    }
    if !outcomes.is_empty() {
        write_report(&outcomes, args)?;
    }
    if !failures.is_empty() {
        bail!("{} of {} benches failed: {}", failures.len(), benches.len(), failures.join(", "));
    }
    judge(&outcomes, args)
}

/// Runs benches one after the other and shows each outcome at once. Returns the outcomes, and the
/// names of the benches that failed.
fn measure_all(
    benches: &[&'static Bench],
    effort: Effort,
    args: &BenchArgs,
) -> anyhow::Result<(Vec<Outcome>, Vec<&'static str>)> {
    let progress = TerminalProgress::new(!args.json);
    let (mut outcomes, mut failures) = (Vec::new(), Vec::new());
    for (index, bench) in benches.iter().enumerate() {
        progress.set_part(index + 1, benches.len());
        match measure(bench, &progress, || bench.run(effort, &progress)) {
            Ok(outcome) => {
                if !args.json {
                    show::print(&format!("{}\n", table::render(&outcome, view(args))))?;
                }
                if let Some(failed) = own_failure(&outcome) {
                    show::print_error(&format!("memferry: the bench {}: {failed}", bench.name));
                    failures.push(bench.name);
                }
                outcomes.push(outcome);
            }
            Err(error) => {
                show::print_error(&format!("memferry: {error:#}"));
                failures.push(bench.name);
            }
        }
    }
    Ok((outcomes, failures))
}

fn write_report(outcomes: &[Outcome], args: &BenchArgs) -> anyhow::Result<()> {
    let Some(path) = report_path(args) else { return Ok(()) };
    report::write(&path, outcomes, ReportView { origin: Origin::Today, bars: args.bars })?;
    let line = report::location(&path);
    if args.json {
        show::print_error(&line);
    } else {
        show::print(&format!("{line}\n"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::sample;

    use super::*;

    static PASSING: Bench =
        Bench::new("copy-latency", "Invented numbers.", |_, _, _| Ok(sample::latency()));
    static FAILING: Bench = Bench::new("overlap", "Never works.", |_, _, _| bail!("out of luck"));

    fn json() -> BenchArgs {
        BenchArgs { json: true, ..BenchArgs::default() }
    }

    #[test]
    fn a_missed_target_is_a_failure_only_where_targets_are_wanted() {
        let outcomes = [sample::latency()];
        assert!(judge(&outcomes, &BenchArgs::default()).is_ok());
        let args = BenchArgs { bars: true, ..BenchArgs::default() };
        let error = judge(&outcomes, &args).unwrap_err().to_string();
        let missed = "copy-latency.worst_small_vs_memcpy (0.930×, target ≥ 0.95×)";
        assert_eq!(error, format!("targets missed: {missed}"));
    }

    #[test]
    fn a_suite_goes_on_after_a_bench_that_fails() {
        let (outcomes, failures) =
            measure_all(&[&FAILING, &PASSING], Effort::Brief, &json()).unwrap();
        assert_eq!(outcomes.len(), 1);
        assert_eq!(outcomes[0].bench, "copy-latency");
        assert_eq!(failures, ["overlap"]);
    }

    #[test]
    fn a_suite_whose_benches_all_fail_names_them() {
        let error = run_suite(&[&FAILING], &BenchArgs::default()).unwrap_err().to_string();
        assert_eq!(error, "1 of 1 benches failed: overlap");
    }
}
