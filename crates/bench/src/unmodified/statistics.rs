//! What the counters of `memferry top` cost: small copies and small messages with counters, against the
//! same without.

use crate::Effort;
use crate::group::worker::WorkerKind;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::{Budget, Role, Sample, set};
use crate::results::outcome::Outcome;

/// The setting of the counters.
const VARIABLE: &str = "MEMFERRY_STATS";
const ON: &str = "memferry";
const OFF: &str = "memferry without counters";

/// The smallest requests, to which a counter adds most.
const TASKS: [(&str, GroupTask); 2] = [
    ("a copy of 64 bytes, with and without counters", GroupTask::SmallCopies { bytes: 64 }),
    (
        "a message of 8 bytes and its reply, with and without counters",
        GroupTask::Pingpong { bytes: 8 },
    ),
];

pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let mut environment = BenchEnvironment::in_process()?;
    let groups = [(ON, None), (OFF, Some((VARIABLE, "off")))].map(|(series, variable)| {
        let group = environment.start_with(WorkerKind::Memferry, 2, variable);
        (series.to_owned(), Role::Memferry, group)
    });
    let mut set_of_groups = environment.candidates_of(groups);
    let rounds = if effort == Effort::Full { 61 } else { 31 };
    let mut worst = f64::NAN;
    for (figure, task) in TASKS {
        let samples = set_of_groups.interleave(task, Budget::each(rounds, 8, 4000), |_| true);
        outcome.rows.extend(samples.rows(figure, 0, "ns", |sample: &Sample| sample.total_ns));
        worst = worst.max(samples.ratio(OFF, ON));
    }
    drop(set_of_groups);
    set(&mut outcome.summary, "stats_overhead", worst);
    environment.finish(outcome);
    Ok(())
}
