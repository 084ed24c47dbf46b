//! `unmodified`: programs that do not know Memferry, as they are and started by `memferry run` or by
//! `memferry mpirun`. What the library in front of the C library gives them, and what it costs.

mod mpi;
mod programs;
mod python;
mod session;
mod statistics;
mod tiny;

use crate::group::workspace::TempWorkspace;
use crate::harness::{median, set};
use crate::results::outcome::Outcome;
use crate::{Bench, Effort, Progress};

pub(crate) static BENCH: Bench = Bench::new(
    "unmodified",
    "Programs that do not know Memferry: as they are, and by `memferry run` and `memferry mpirun`",
    run,
);

/// A folder for files that lie in memory.
const MEMORY_FILES: &str = "/dev/shm";

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let workspace = TempWorkspace::new()?;
    progress.start(if effort == Effort::Full { 43 } else { 31 }, &outcome.bench);
    progress.step("tiny copies");
    tiny::measure(&mut outcome, effort, workspace.folder());
    // Removed with the workspace.
    let prefix = format!("{MEMORY_FILES}/{}", workspace.group_dir()?.name);
    let mut overheads = programs::measure(&mut outcome, effort, &prefix, progress)?;
    overheads.push(python::measure(&mut outcome, effort, progress));
    overheads.retain(|overhead| overhead.is_finite());
    set(&mut outcome.summary, "profile_overhead", median(overheads));
    mpi::measure(&mut outcome, effort, progress)?;
    progress.step("counters");
    statistics::measure(&mut outcome, effort)?;
    outcome.notes.extend(notes().map(String::from));
    Ok(outcome)
}

fn notes() -> [&'static str; 3] {
    [
        "A tiny copy is one of ten million of 1 to 96 bytes, in a program that does nothing else and is \
         started several times; tiny_overhead is the larger ratio of both rows of sizes. Python \
         and NumPy copy between memory that was used before, except that a new bytes object is fresh \
         memory. zstd and dd are measured from start to end, with the start of memferry itself; dd copies by \
         system calls alone, which nothing can share. profile_overhead is the median of three programs: \
         SQLite with rows and an index, which calls memcpy, memset and memcmp tens of millions of times \
         in a second, zstd, and the interpreter of Python.",
        "MPI ranks allocate by malloc in all series. A shared heap is that of `memferry mpirun \
         --shared-heap`. Keys compare Open MPI with its own transport, in the same rounds.",
        "stats_overhead is the larger one of the ratios of a small copy and of a small message, each by \
         the medians over several starts of the processes.",
    ]
}
