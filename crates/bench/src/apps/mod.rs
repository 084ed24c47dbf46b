//! `apps`: two complete programs whose time depends on messages, an integer sort and a Fourier
//! transform after the NAS benchmarks, against the same programs on MPI.

pub(crate) mod fourier;
pub(crate) mod integer_sort;

use super::{Bench, Effort};
use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::set;
use crate::harness::{Budget, Sample};
use crate::results::outcome::Outcome;
use crate::results::series::{MEMFERRY, SHAREABLE};

pub(crate) static BENCH: Bench = Bench::new(
    "apps",
    "An integer sort and a Fourier transform over several processes, against the same on MPI",
    run,
);

struct App {
    name: &'static str,
    task: GroupTask,
    key: &'static str,
}

const APPS: [App; 2] = [
    App {
        name: "integer sort of 4 Mi keys",
        task: GroupTask::IntegerSort { keys_log2: 22 },
        key: "is_vs_best",
    },
    App {
        name: "Fourier transform of 128³ points",
        task: GroupTask::Fourier { points: 128 },
        key: "ft_vs_best",
    },
];

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    progress.start((2 * (APPS.len() + 1)) as u64 + 1, &outcome.bench);
    progress.step("compiling the peers");
    let mut camp = BenchEnvironment::discover()?;
    let telling = reference_size(camp.cores());
    for members in sizes(effort, telling) {
        progress.step(&format!("starting groups of {members}"));
        let mut field = camp.candidates(members);
        for app in APPS {
            progress.step(&format!("{}, {members} processes", app.name));
            // The programs use ordinary memory in both series of Memferry, so the shareable
            // series would repeat the first.
            let apart = |series: &str| series != SHAREABLE;
            let rounds = field.interleave(app.task, Budget::of_groups(effort), apart);
            let figure = format!("{}, {members} processes", app.name);
            let inside = format!("{figure}: inside messages");
            let total = |timing: &Sample| timing.total_ns;
            outcome.rows.extend(rounds.rows(&figure, 0, "ns", total));
            let messages = |timing: &Sample| timing.messages_ns;
            outcome.rows.extend(rounds.rows(&inside, 0, "ns", messages));
            if members == telling {
                set(&mut outcome.summary, app.key, rounds.ratio_to_best_peer(MEMFERRY));
            }
        }
    }
    camp.finish(&mut outcome);
    outcome.notes.push(format!(
        "The keys are for {telling} processes. Every contestant checks its results: keys are \
         sorted over all processes and none is lost; the transform can be undone and keeps the \
         energy. The programs on MPI are in C, ours in Rust; both do the same steps without \
         processor-specific instructions. Times inside messages are those of the first process \
         and include waiting for the others."
    ));
    Ok(outcome)
}

/// Number of processes for the summary keys: 4 on a machine with at least 4 cores, else 2.
fn reference_size(cores: usize) -> usize {
    if cores >= 4 { 4 } else { 2 }
}

fn sizes(effort: Effort, telling: usize) -> Vec<usize> {
    if effort == Effort::Brief { vec![telling] } else { vec![2, 4] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_measured_with_every_effort() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            for cores in [1, 2, 3, 4, 64] {
                let telling = reference_size(cores);
                assert!(sizes(effort, telling).contains(&telling));
            }
        }
    }
}
