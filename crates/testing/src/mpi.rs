//! The MPIs of this machine: Debian's, and those that MEMFERRY_OPENMPI and MEMFERRY_MPICH name (a folder
//! that contains bin/mpicc and bin/mpirun, or its mpirun).

use std::env;
use std::path::{Path, PathBuf};
use std::process::Output;

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
