//! The MPIs of this machine: Debian's, and those that MEMFERRY_OPENMPI and MEMFERRY_MPICH name (a folder
//! that contains bin/mpicc and bin/mpirun, or its mpirun).

use std::collections::HashSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread;
use std::time::Duration;

use crate::{Requirement, skip};

/// A family of MPI libraries with the same launcher and the same variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiFamily {
    /// Open MPI.
    OpenMpi,
    /// MPICH.
    Mpich,
}

/// An MPI of this machine.
#[derive(Debug, Clone)]
pub struct Mpi {
    /// The family of the library.
    pub family: MpiFamily,
    /// The compiler of C programs.
    pub compiler: PathBuf,
    /// The launcher.
    pub launcher: PathBuf,
}

impl Mpi {
    fn at(family: MpiFamily, folder: &Path, suffix: &str) -> Option<Self> {
        let [compiler, launcher] =
            ["mpicc", "mpirun"].map(|name| folder.join(format!("{name}{suffix}")));
        let is_there = compiler.is_file() && launcher.is_file();
        is_there.then_some(Self { family, compiler, launcher })
    }

    /// The MPI of a family that Debian installs, if it is there.
    pub fn of_debian(family: MpiFamily) -> Option<Self> {
        let suffix = match family {
            MpiFamily::OpenMpi => ".openmpi",
            MpiFamily::Mpich => ".mpich",
        };
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).find_map(|folder| Self::at(family, &folder, suffix))
    }

    /// The MPI of a family that a variable names, if it is there.
    pub fn named(family: MpiFamily) -> Option<Self> {
        let variable = match family {
            MpiFamily::OpenMpi => "MEMFERRY_OPENMPI",
            MpiFamily::Mpich => "MEMFERRY_MPICH",
        };
        let named = env::var_os(variable).map(PathBuf::from)?;
        let folder = if named.is_dir() { named.join("bin") } else { named.parent()?.into() };
        Self::at(family, &folder, "")
    }
}

impl MpiFamily {
    /// Skips what needs an MPI of this family.
    pub fn skip(self, cure: &str) {
        match self {
            Self::OpenMpi => skip(Requirement::OpenMpi, cure),
            Self::Mpich => skip(Requirement::Mpich, cure),
        }
    }
}

/// What a program has printed, and how it has ended.
pub fn output_text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}\n{err}", output.status)
}

/// A guard of a job in which a rank is killed: when it is dropped, it removes the files in shared memory that
/// the job has left. MPICH leaves them when its launcher cannot end the ranks in order.
#[derive(Debug)]
pub struct SharedFiles {
    before: HashSet<PathBuf>,
}

impl SharedFiles {
    /// Starts before the job.
    #[must_use]
    pub fn guard() -> Self {
        Self { before: Self::all() }
    }

    /// The files of MPI libraries in shared memory.
    fn all() -> HashSet<PathBuf> {
        let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let is_of_mpi =
            |name: &str| name.starts_with("mpich_shm_") || name.starts_with("vader_segment");
        files.filter(|f| f.file_name().to_str().is_some_and(is_of_mpi)).map(|f| f.path()).collect()
    }
}

impl Drop for SharedFiles {
    fn drop(&mut self) {
        // Ranks may exit shortly after their launcher.
        const ATTEMPTS: usize = 50;
        for left in Self::all().difference(&self.before) {
            for _ in 0..ATTEMPTS {
                if is_old(left) && !is_mapped(left) {
                    // Another guard may have removed it.
                    let _ = fs::remove_file(left);
                    break;
                }
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Whether a process has the file mapped: the file then belongs to another job that runs concurrently.
fn is_mapped(file: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let name = file.to_string_lossy().into_owned();
    let maps = |process: fs::DirEntry| fs::read_to_string(process.path().join("maps")).ok();
    processes.filter_map(maps).any(|maps| maps.contains(&name))
}

/// Whether the file is so old that no job that is just starting has created it and is about to map it.
fn is_old(file: &Path) -> bool {
    let age = fs::metadata(file)
        .and_then(|facts| facts.modified())
        .ok()
        .and_then(|then| then.elapsed().ok());
    age.is_some_and(|age| age > Duration::from_secs(1))
}
