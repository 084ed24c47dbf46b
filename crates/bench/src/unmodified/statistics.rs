//! What the counters of `memferry top` cost: small copies and small messages with counters, against the
//! same without.

use crate::Effort;
use crate::group::worker::WorkerKind;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::{Budget, Role, Sample, Samples, max_or_nan, set};
use crate::results::outcome::Outcome;

/// The setting of the counters.
const VARIABLE: &str = "MEMFERRY_STATS";
const ON: &str = "memferry";
const OFF: &str = "memferry without counters";

/// The smallest requests, to which a counter adds most.
const TASKS: [(&str, GroupTask); 2] = [
    (
        "a copy of 64 bytes, started and waited for, with and without counters",
        GroupTask::SmallCopies { bytes: 64 },
    ),
    (
        "a message of 8 bytes and its reply, with and without counters",
        GroupTask::Pingpong { bytes: 8 },
    ),
];

pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let mut environment = BenchEnvironment::in_process()?;
    // Where the kernel places stack and heap of a process changes the time of a small copy, and stays as
    // it is while the process runs: so there are several.
    let (starts, rounds) = if effort == Effort::Full { (15, 9) } else { (7, 5) };
    let mut all = TASKS.map(|_| Samples::default());
    for start in 0..starts {
        let mut settings = [(ON, None), (OFF, Some((VARIABLE, "off")))];
        // The second one may get the worse core.
        settings.rotate_left(start % 2);
        let groups = settings.map(|(series, variable)| {
            let group = environment.start_with(WorkerKind::Memferry, 2, variable);
            (series.to_owned(), Role::Memferry, group)
        });
        let mut set_of_groups = environment.candidates_of(groups);
        for ((_, task), samples) in TASKS.iter().zip(&mut all) {
            let budget = Budget::each(rounds, 8, 4000);
            samples.append(set_of_groups.interleave(*task, budget, |_| true));
        }
    }
    let mut ratios = Vec::new();
    for ((figure, _), samples) in TASKS.iter().zip(&all) {
        outcome.rows.extend(samples.rows(figure, 0, "ns", |sample: &Sample| sample.total_ns));
        // The processes of one round are no pair.
        let median = |series| samples.median_of_all(series, starts * rounds);
        ratios.push(median(ON) / median(OFF));
    }
    set(&mut outcome.summary, "stats_overhead", max_or_nan(ratios));
    environment.finish(outcome);
    outcome.missing.sort();
    outcome.missing.dedup();
    Ok(())
}
