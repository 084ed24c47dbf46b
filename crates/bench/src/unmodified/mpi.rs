//! MPI programs that allocate by `malloc`, with the transport of their MPI, by `memferry mpirun` and by
//! `memferry mpirun --shared-heap`: messages to and fro, exchanges of four ranks, and a program that nobody
//! here wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::candidates::mpi::{self, MpiInstallation, MpirunMode};
use crate::candidates::mpi_over_memferry;
use crate::group::{BenchEnvironment, GroupTask, StartedGroup};
use crate::harness::{Budget, FnCandidate, Harness, Sample, Samples, set};
use crate::host::mpi::MpiFamily;
use crate::host::process;
use crate::results::outcome::Outcome;
use crate::results::series::{OPEN_MPI, OPEN_MPI_SHARED_HEAP};
use crate::results::size;
use crate::{Effort, Progress};

const PINGPONG: &str = "half round trip";
const ALLTOALL: &str = "from each to each of 4 ranks";
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);
/// The input of HPCC: small matrices, on two ranks.
const HPCC_INPUT: &str = include_str!("hpccinf.txt");

/// An MPI with the compiled candidate.
struct Mpi {
    family: MpiFamily,
    installed: MpiInstallation,
    member: PathBuf,
}

pub(super) fn measure(
    outcome: &mut Outcome,
    effort: Effort,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut environment = BenchEnvironment::in_process()?;
    progress.step("compiling the MPI programs");
    let found = discover(outcome, environment.folder());
    progress.step("starting 2 ranks");
    let groups = groups(&environment, &found, 2);
    let mut pairs = environment.candidates_of(groups);
    for bytes in sizes(effort) {
        progress.step(&format!("to and fro, {}", size::format(bytes)));
        let task = GroupTask::Pingpong { bytes };
        let samples = pairs.interleave(task, Budget::of_groups(effort), |_| true);
        let half = |sample: &Sample| sample.total_ns / 2.0;
        outcome.rows.extend(samples.rows(PINGPONG, bytes, "ns", half));
        set_key(outcome, &samples, key(task));
    }
    drop(pairs);
    progress.step("starting 4 ranks");
    let groups = self::groups(&environment, &found, 4);
    let mut fours = environment.candidates_of(groups);
    for bytes in exchanged_sizes(effort) {
        progress.step(&format!("from each to each, {}", size::format(bytes)));
        let task = GroupTask::Alltoall { bytes };
        let samples = fours.interleave(task, Budget::of_groups(effort), |_| true);
        outcome.rows.extend(samples.time_rows(ALLTOALL, bytes));
        set_key(outcome, &samples, key(task));
    }
    drop(fours);
    if effort == Effort::Full {
        progress.step("HPCC");
        measure_hpcc(outcome, &environment, &found);
    }
    environment.finish(outcome);
    Ok(())
}

fn sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief => vec![4 << 20, 64 << 20],
        Effort::Quick => vec![64 << 10, 1 << 20, 4 << 20, 64 << 20],
        Effort::Full => (16..=26).map(|shift| 1 << shift).collect(),
    }
}

fn exchanged_sizes(effort: Effort) -> Vec<u64> {
    if effort == Effort::Full {
        vec![16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
    } else {
        vec![64 << 10]
    }
}

/// The key of a task, if it has one.
fn key(task: GroupTask) -> Option<&'static str> {
    match task {
        GroupTask::Pingpong { bytes: 0x40_0000 } => Some("mpi_4m_shared_heap_vs_own"),
        GroupTask::Pingpong { bytes: 0x400_0000 } => Some("mpi_64m_shared_heap_vs_own"),
        GroupTask::Alltoall { bytes: 0x1_0000 } => Some("mpi_np4_64k_shared_heap_vs_own"),
        _ => None,
    }
}

fn set_key(outcome: &mut Outcome, samples: &Samples, key: Option<&str>) {
    if let Some(key) = key {
        set(&mut outcome.summary, key, samples.ratio(OPEN_MPI_SHARED_HEAP, OPEN_MPI));
    }
}

/// Finds an installation of each family that can run over Memferry, and compiles the candidate for it.
fn discover(outcome: &mut Outcome, folder: &Path) -> Vec<Mpi> {
    let mut found = Vec::new();
    for family in mpi::FAMILIES {
        let compiled = mpi_over_memferry::installation(family).and_then(|installed| {
            let member = installed.compile(folder)?;
            Ok(Mpi { family, installed, member })
        });
        match compiled {
            Ok(mpi) => {
                let version = mpi.installed.launcher.version.clone();
                outcome.versions.insert(mpi::series(family).to_owned(), version);
                found.push(mpi);
            }
            Err(reason) => outcome.missing.push(format!("{} ({reason})", mpi::series(family))),
        }
    }
    found
}

/// Starts groups of every MPI in every mode.
fn groups(environment: &BenchEnvironment, found: &[Mpi], size: usize) -> Vec<StartedGroup> {
    let mut groups = Vec::new();
    for Mpi { family, installed, member } in found {
        for mode in MpirunMode::ALL {
            let group = installed.start_unmodified(member, size, environment.member_cores(), mode);
            groups.push((mode.series(*family).to_owned(), mode.role(), group));
        }
    }
    groups
}

/// HPCC, which Debian builds with its Open MPI, on two ranks from start to end.
fn measure_hpcc(outcome: &mut Outcome, environment: &BenchEnvironment, found: &[Mpi]) {
    let (folder, cores) = (environment.folder(), environment.member_cores());
    let debian = process::find("mpirun.openmpi");
    let Some(hpcc) = process::find("hpcc") else {
        return outcome.missing.push("HPCC (apt install hpcc)".to_owned());
    };
    let open_mpi = found.iter().find(|mpi| {
        mpi.family == MpiFamily::OpenMpi && Some(&mpi.installed.launcher.path) == debian.as_ref()
    });
    let Some(mpi) = open_mpi else {
        let reason = "it needs Debian's Open MPI: apt install openmpi-bin libopenmpi-dev";
        return outcome.missing.push(format!("HPCC ({reason})"));
    };
    let options = mpi.installed.options(2, cores);
    let run = |mode| {
        let command = mpi.installed.unmodified_command(mode, &options)?;
        run_hpcc(command, &hpcc, folder)
    };
    let mut candidates = MpirunMode::ALL
        .map(|mode| FnCandidate::timed(mode.series(mpi.family), mode.role(), move |_| run(mode)));
    let samples = Harness::new(Budget::fixed(6, 1)).interleave(&mut candidates);
    for failure in samples.failures() {
        outcome.missing.push(format!("{} (HPCC: {})", failure.series, failure.reason));
    }
    outcome.rows.extend(samples.time_rows("HPCC on 2 ranks, from start to end", 0));
}

fn run_hpcc(mut command: Command, hpcc: &Path, folder: &Path) -> Result<Sample, String> {
    let cannot = |error: std::io::Error| format!("its input cannot be written: {error}");
    fs::write(folder.join("hpccinf.txt"), HPCC_INPUT).map_err(cannot)?;
    // HPCC appends to its output.
    let output = folder.join("hpccoutf.txt");
    let _ = fs::remove_file(&output);
    command.arg(hpcc).current_dir(folder);
    let begin = Instant::now();
    process::output(command, PROGRAM_TIMEOUT)?;
    let total_ns = begin.elapsed().as_nanos() as f64;
    let text = fs::read_to_string(output).unwrap_or_default();
    if !text.contains("Success=1") {
        return Err("its own checks failed".to_owned());
    }
    Ok(Sample::of_total(total_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_the_keys() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let pairs = sizes(effort).into_iter().map(|bytes| GroupTask::Pingpong { bytes });
            let fours =
                exchanged_sizes(effort).into_iter().map(|bytes| GroupTask::Alltoall { bytes });
            assert_eq!(pairs.chain(fours).filter_map(key).count(), 3, "{effort:?}");
        }
    }
}
