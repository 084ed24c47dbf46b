//! `scale`: many processes, more than cores: how long they need to start, what memory and processor
//! time they take, and messages among all of them, against MPI.

mod group;
mod member;
mod task;
mod usage;

use std::time::Duration;

use group::{ScaleCandidate, ScaleGroup, Starter};
pub(crate) use member::run_member;
use task::ScaleTask;

use crate::Progress;
use crate::group::BenchEnvironment;
use crate::harness::{Budget, Harness, Samples, median, set};
use crate::results::outcome::{Outcome, Row};
use crate::results::series::MEMFERRY;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "scale",
    "2 to 256 processes: start, memory, idle processor time, messages among all, against MPI",
    run,
);

/// The number of processes of the keys.
const REFERENCE: usize = 128;
/// Random neighbours of each process.
const NEIGHBOURS: usize = 8;

/// Extent of a measurement.
struct Extent {
    sizes: &'static [usize],
    /// Starts of Memferry and of each peer.
    starts: [usize; 2],
    /// Whether more is measured than what the keys need.
    all_tasks: bool,
    budget: Budget,
    /// Timeouts of the start of a group and of each of its replies.
    timeouts: [Duration; 2],
}

impl Extent {
    fn of(effort: Effort) -> Self {
        match effort {
            Effort::Full => Self {
                sizes: &[2, 8, 32, REFERENCE, 256],
                starts: [5, 3],
                all_tasks: true,
                budget: Budget::each(9, 200, 15_000),
                timeouts: [60, 60].map(Duration::from_secs),
            },
            Effort::Quick => Self {
                sizes: &[REFERENCE],
                starts: [3, 1],
                all_tasks: false,
                budget: Budget::each(7, 100, 4000),
                timeouts: [20, 8].map(Duration::from_secs),
            },
            Effort::Brief => Self {
                sizes: &[REFERENCE],
                starts: [1, 1],
                all_tasks: false,
                budget: Budget::each(6, 50, 1500),
                timeouts: [10, 4].map(Duration::from_secs),
            },
        }
    }

    fn tasks(&self) -> Vec<ScaleTask> {
        let mut tasks = vec![ScaleTask::Ring];
        if self.all_tasks {
            tasks.push(ScaleTask::Neighbours(NEIGHBOURS));
        }
        tasks.push(ScaleTask::Alltoall(8));
        if self.all_tasks {
            tasks.push(ScaleTask::Alltoall(1024));
        }
        tasks
    }
}

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let extent = Extent::of(effort);
    let steps = extent.sizes.len() * (extent.tasks().len() + 2) + 1;
    progress.start(steps as u64, &outcome.bench);
    progress.step("compiling the peers");
    let mut camp = BenchEnvironment::discover()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for &size in extent.sizes {
        progress.step(&format!("starting {size} processes"));
        let groups = start(&mut camp, &extent, size, &mut outcome);
        let mut point = Point { size, cores, groups, outcome: &mut outcome };
        point.memory("memory per process, after the start");
        for task in extent.tasks() {
            progress.step(&format!("{size} processes, {task}"));
            let failed = point.interleave(task, extent.budget);
            for (series, reason) in failed {
                camp.report_missing(series, &format!("{size} processes, {task}: {reason}"));
            }
        }
        let after = point.memory("memory per process, all connected");
        progress.step(&format!("{size} processes, idle"));
        let idle = point.idle();
        if size == REFERENCE {
            set(&mut outcome.summary, "rss_per_rank_128_mib", after);
            set(&mut outcome.summary, "idle_cpu_share_128", idle);
        }
    }
    camp.finish(&mut outcome);
    outcome.notes.push(note(cores));
    Ok(outcome)
}

/// Starts every candidate as often as wanted, interleaved, and keeps the last group of each. One
/// that cannot be started with this number of processes is missing.
fn start(
    camp: &mut BenchEnvironment,
    extent: &Extent,
    size: usize,
    outcome: &mut Outcome,
) -> Vec<ScaleGroup> {
    let mut groups: Vec<ScaleGroup> = Vec::new();
    let starters = Starter::all(camp);
    let mut times = vec![Vec::new(); starters.len()];
    for round in 0..extent.starts[0].max(extent.starts[1]) {
        for (starter, times) in starters.iter().zip(&mut times) {
            let wanted = extent.starts[usize::from(*starter != Starter::Memferry)];
            // One that failed is not started again.
            if round >= wanted || times.len() < round {
                continue;
            }
            let series = starter.series(camp);
            groups.retain(|group| group.series != series);
            match starter.start(camp, size, extent.timeouts) {
                Ok(group) => {
                    times.push(group.start_ms);
                    groups.push(group);
                }
                Err(reason) => {
                    camp.report_missing(series, &format!("{size} processes: {reason}"));
                }
            }
        }
    }
    for (starter, times) in starters.iter().zip(&times) {
        if !times.is_empty() {
            let series = starter.series(camp);
            outcome.rows.push(Row::of_rounds("start", series, size as u64, "ms", times));
        }
    }
    if size == REFERENCE {
        set(&mut outcome.summary, "start_128_ms", median(times[0].clone()));
    }
    groups
}

/// The groups of one number of processes.
struct Point<'a> {
    size: usize,
    cores: usize,
    groups: Vec<ScaleGroup>,
    outcome: &'a mut Outcome,
}

impl Point<'_> {
    fn row(&mut self, figure: &str, series: &str, unit: &str, value: f64) {
        let row = Row::of_rounds(figure, series, self.size as u64, unit, &[value]);
        self.outcome.rows.push(row);
    }

    /// Measures the memory of all groups, and the connections of Memferry's. Returns the resident
    /// memory of its processes; NaN if it has no group.
    fn memory(&mut self, figure: &str) -> f64 {
        let mut of_memferry = f64::NAN;
        let measured: Vec<_> = self.groups.iter().map(|g| (g.series, g.memory())).collect();
        for (series, usage) in measured {
            self.row(figure, series, "MiB", usage.rss);
            self.row(figure, &format!("{series}, pages of files"), "MiB", usage.of_files);
            self.row(figure, &format!("{series}, shared pages by their share"), "MiB", usage.pss);
            if series == MEMFERRY {
                of_memferry = usage.rss;
            }
        }
        let ours = self.groups.iter_mut().find(|group| group.series == MEMFERRY);
        if let Some(Ok(count)) = ours.map(ScaleGroup::connections) {
            let figure = format!("connections ({figure})");
            self.row(&figure, MEMFERRY, "connections", count);
        }
        of_memferry
    }

    /// Runs a task on all groups, interleaved. Returns the groups that failed, which are dropped.
    fn interleave(&mut self, task: ScaleTask, budget: Budget) -> Vec<(&'static str, String)> {
        let mut candidates: Vec<_> =
            self.groups.iter_mut().map(|group| ScaleCandidate { group, task }).collect();
        let samples: Samples = Harness::new(budget).interleave(&mut candidates);
        let figure = match task {
            ScaleTask::Ring => "8 bytes around all".to_owned(),
            ScaleTask::Neighbours(count) => format!("8 bytes to {count} random neighbours"),
            ScaleTask::Alltoall(bytes) => format!("{bytes} bytes from each to each"),
            ScaleTask::Idle | ScaleTask::Connections => task.to_string(),
        };
        self.outcome.rows.extend(samples.time_rows(&figure, self.size as u64));
        if self.size == REFERENCE && task == ScaleTask::Ring {
            let ratio = samples.ratio_to_best_peer(MEMFERRY);
            set(&mut self.outcome.summary, "ring_128_vs_best", ratio);
        }
        let mut failed = Vec::new();
        self.groups.retain(|group| {
            let failure = samples.failures().iter().find(|failure| failure.series == group.series);
            failed.extend(failure.map(|failure| (group.series, failure.reason.clone())));
            failure.is_none()
        });
        failed
    }

    /// Measures the processor time of groups that wait. Returns that of Memferry's; NaN if it has
    /// no group.
    fn idle(&mut self) -> f64 {
        let mut of_memferry = f64::NAN;
        let cores = self.cores;
        let measured: Vec<_> =
            self.groups.iter_mut().map(|g| (g.series, g.idle_share(cores))).collect();
        for (series, share) in measured {
            let Ok(share) = share else { continue };
            self.row("processor time while all wait", series, "share", share);
            if series == MEMFERRY {
                of_memferry = share;
            }
        }
        of_memferry
    }
}

fn note(cores: usize) -> String {
    format!(
        "Rows are by the number of processes; this machine has {cores} cores, to which no process is \
         bound. Start: from the first process until the join, or MPI_Init and a barrier, has \
         returned in all. Memory: the mean over the processes; the first row is what `top` shows \
         (RSS), with the pages of the program and its libraries and all shared pages; the third \
         (PSS) divides shared pages by their users. It is measured after the start, when a process \
         is connected with its neighbours in a tree, and after a message from each to each, when it \
         is connected with all; the key is the latter. Processor time while all wait: all but the \
         first process are in a receive from any other; the share is of all cores, over 1.5 s. Open \
         MPI runs with `--oversubscribe` and `mpi_yield_when_idle`, MPICH with \
         `MPIR_CVAR_POLLS_BEFORE_YIELD=1`. A peer that does not start or answer in time is missing. \
         A key `…_vs_best` is the median of the ratios of single rounds."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let extent = Extent::of(effort);
            assert!(extent.sizes.contains(&REFERENCE), "{effort:?}");
            assert!(extent.tasks().contains(&ScaleTask::Ring), "{effort:?}");
            assert!(extent.tasks().contains(&ScaleTask::Alltoall(8)), "{effort:?}");
        }
    }
}
