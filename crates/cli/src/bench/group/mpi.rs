//! MPI as a peer: our own small program, compiled here with the machine's MPI compilers and started
//! by their launchers, each with the settings it has out of the box, or over Memferry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cores::Cores;
use super::members::{Group, PATIENCE};
use crate::mpi::variables::{self, Variable};
use crate::mpi::{Family, Launcher};
use crate::process;

/// Open MPI with its own transport.
pub(in crate::bench) const OPEN_MPI: &str = "Open MPI";
/// MPICH with its own transport.
pub(in crate::bench) const MPICH: &str = "MPICH";

/// The program, file by file.
const SOURCES: [(&str, &str); 5] = [
    ("member.h", include_str!("mpi/member.h")),
    ("main.c", include_str!("mpi/main.c")),
    ("messages.c", include_str!("mpi/messages.c")),
    ("integer_sort.c", include_str!("mpi/integer_sort.c")),
    ("fourier.c", include_str!("mpi/fourier.c")),
];

/// An implementation that was found here, with its compiler.
#[derive(Debug, Clone)]
pub(super) struct Installed {
    pub(super) launcher: Launcher,
    compiler: PathBuf,
}

/// What carries the messages of an MPI.
#[derive(Debug, Clone)]
pub(super) enum Transport {
    /// Whatever it has out of the box.
    Own,
    /// Memferry's provider, by these variables.
    Memferry(Vec<Variable>),
}

/// The implementations that are measured.
pub(super) const FAMILIES: [Family; 2] = [Family::OpenMpi, Family::Mpich];

/// The series of an implementation with its own transport.
pub(super) fn series(family: Family) -> &'static str {
    match family {
        Family::OpenMpi => OPEN_MPI,
        Family::Mpich => MPICH,
    }
}

/// What its programs are called where several implementations live side by side.
fn suffix(family: Family) -> &'static str {
    match family {
        Family::OpenMpi => "openmpi",
        Family::Mpich => "mpich",
    }
}

/// Looks for compiler and launcher of an implementation, under its own name or the common one.
pub(super) fn find(family: Family) -> Result<Installed, String> {
    for suffix in [format!(".{}", suffix(family)), String::new()] {
        let programs = ["mpicc", "mpirun"].map(|name| process::find(&format!("{name}{suffix}")));
        let [Some(compiler), Some(launcher)] = programs else { continue };
        let Ok(launcher) = Launcher::recognise(&launcher) else { continue };
        if launcher.family == family {
            return Ok(Installed { launcher, compiler });
        }
    }
    Err("not installed".into())
}

impl Installed {
    /// A launcher with the compiler beside it.
    pub(super) fn of(launcher: Launcher) -> Result<Self, String> {
        let compiler = launcher.compiler();
        let compiler = compiler.ok_or_else(|| format!("there is no mpicc beside {launcher}"))?;
        Ok(Self { launcher, compiler })
    }

    #[cfg(test)]
    pub(super) fn for_test(launcher: Launcher) -> Self {
        Self { launcher, compiler: PathBuf::new() }
    }

    /// Compiles our program for this implementation into a folder.
    pub(super) fn compile(&self, folder: &Path) -> Result<PathBuf, String> {
        let Launcher { family, version, .. } = &self.launcher;
        let folder = folder.join(format!("{}-{version}", suffix(*family)));
        let cannot = |error: std::io::Error| format!("cannot be compiled: {error}");
        fs::create_dir_all(&folder).map_err(cannot)?;
        let mut compiler = Command::new(&self.compiler);
        compiler.args(["-std=gnu11", "-O3", "-o", "member"]).current_dir(&folder);
        for (name, text) in SOURCES {
            fs::write(folder.join(name), text).map_err(cannot)?;
            if name.ends_with(".c") {
                compiler.arg(name);
            }
        }
        compiler.arg("-lm");
        process::output(compiler, PATIENCE)?;
        Ok(folder.join("member"))
    }

    /// Starts a group of `size` ranks.
    pub(super) fn start(
        &self,
        member: &Path,
        size: usize,
        cores: &Cores,
        transport: &Transport,
    ) -> Result<Group, String> {
        let mut launcher = Command::new(&self.launcher.path);
        launcher.args(self.options(size, cores)).arg(member);
        match transport {
            Transport::Own => {
                // Somebody may have said `eval "$(memferry env)"`.
                for (name, _) in variables::for_family(self.launcher.family, Path::new("/"), None) {
                    launcher.env_remove(name);
                }
            }
            Transport::Memferry(variables) => {
                launcher.envs(variables.iter().map(|(name, value)| (name, value)));
            }
        }
        launcher.envs([
            ("OMPI_MCA_btl_base_warn_component_unused", "0"),
            ("OMPI_MCA_orte_base_help_aggregate", "1"),
            ("UCX_WARN_UNUSED_ENV_VARS", "n"),
        ]);
        Group::start(vec![launcher], PATIENCE)
    }

    /// Every rank on a core, as the other members; they share where there are more ranks than cores.
    fn options(&self, size: usize, cores: &Cores) -> Vec<String> {
        let shared = size > cores.whole();
        let mut words: Vec<&str> = Vec::new();
        match self.launcher.family {
            Family::OpenMpi => {
                if rustix::process::geteuid().is_root() {
                    words.push("--allow-run-as-root");
                }
                words.extend(if shared {
                    ["--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
                } else {
                    ["--map-by", "core", "--bind-to", "core"]
                });
            }
            Family::Mpich => words.extend(["-bind-to", "core"]),
        }
        let count = size.to_string();
        words.extend(["-np", &count]);
        words.into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_program_says_what_it_is_for() {
        for (name, text) in SOURCES {
            assert!(text.starts_with("/* "), "{name}");
        }
    }
}
