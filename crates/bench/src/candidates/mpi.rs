//! MPI as a peer: a small program, compiled here with the machine's MPI compilers and started by
//! their launchers, each with its default settings or over Memferry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::group::cores::MemberCores;
use crate::group::process_group::{ProcessGroup, REPLY_TIMEOUT};
use crate::harness::Role;
use crate::host::mpi::variables::{self, Variable};
use crate::host::mpi::{Launcher, MpiFamily};
use crate::host::process;
use crate::results::series::{
    MPICH, MPICH_OVER_MEMFERRY, MPICH_SHARED_HEAP, OPEN_MPI, OPEN_MPI_OVER_MEMFERRY,
    OPEN_MPI_SHARED_HEAP,
};

/// Source files of the program.
const SOURCES: [(&str, &str); 8] = [
    ("member.h", include_str!("mpi/member.h")),
    ("main.c", include_str!("mpi/main.c")),
    ("collectives.c", include_str!("mpi/collectives.c")),
    ("matching.c", include_str!("mpi/matching.c")),
    ("messages.c", include_str!("mpi/messages.c")),
    ("scale.c", include_str!("mpi/scale.c")),
    ("integer_sort.c", include_str!("mpi/integer_sort.c")),
    ("fourier.c", include_str!("mpi/fourier.c")),
];

/// An MPI implementation on this machine, with its compiler.
#[derive(Debug, Clone)]
pub(crate) struct MpiInstallation {
    pub(crate) launcher: Launcher,
    compiler: PathBuf,
}

/// Transport of the messages of an MPI.
#[derive(Debug, Clone)]
pub(crate) enum MpiTransport {
    /// Default transport of the implementation.
    Own,
    /// Default transport, with other settings of the implementation.
    Adjusted(Vec<Variable>),
    /// Memferry's provider, selected by these environment variables.
    Memferry(Vec<Variable>),
}

impl MpiTransport {
    /// Lets the ranks load a library before all others.
    pub(crate) fn preload(&mut self, library: &Path) {
        if let Self::Adjusted(variables) | Self::Memferry(variables) = self {
            variables.push(variables::preload(&[library]));
        }
    }
}

/// How an MPI program that is not changed is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MpirunMode {
    /// By the launcher of the implementation.
    Own,
    /// By `memferry mpirun`.
    Memferry,
    /// By `memferry mpirun --shared-heap`.
    SharedHeap,
}

impl MpirunMode {
    pub(crate) const ALL: [Self; 3] = [Self::Own, Self::Memferry, Self::SharedHeap];

    pub(crate) fn series(self, family: MpiFamily) -> &'static str {
        match (self, family) {
            (Self::Own, _) => series(family),
            (Self::Memferry, MpiFamily::OpenMpi) => OPEN_MPI_OVER_MEMFERRY,
            (Self::Memferry, MpiFamily::Mpich) => MPICH_OVER_MEMFERRY,
            (Self::SharedHeap, MpiFamily::OpenMpi) => OPEN_MPI_SHARED_HEAP,
            (Self::SharedHeap, MpiFamily::Mpich) => MPICH_SHARED_HEAP,
        }
    }

    pub(crate) fn role(self) -> Role {
        if self == Self::Own { Role::Peer } else { Role::Reference }
    }
}

/// Implementations that are measured.
pub(crate) const FAMILIES: [MpiFamily; 2] = [MpiFamily::OpenMpi, MpiFamily::Mpich];

/// Components of Open MPI for collectives, each with the variable of its priority.
const COLLECTIVE_COMPONENTS: [(&str, &str); 2] =
    [("han", "OMPI_MCA_coll_han_priority"), ("xhc", "OMPI_MCA_coll_xhc_priority")];

/// Variables against remarks that are no errors.
const QUIET: [(&str, &str); 3] = [
    ("OMPI_MCA_btl_base_warn_component_unused", "0"),
    ("OMPI_MCA_orte_base_help_aggregate", "1"),
    ("UCX_WARN_UNUSED_ENV_VARS", "n"),
];

/// Series of an implementation with its own transport.
pub(crate) fn series(family: MpiFamily) -> &'static str {
    match family {
        MpiFamily::OpenMpi => OPEN_MPI,
        MpiFamily::Mpich => MPICH,
    }
}

/// Suffix of the program names of an implementation on machines with several implementations.
fn suffix(family: MpiFamily) -> &'static str {
    match family {
        MpiFamily::OpenMpi => "openmpi",
        MpiFamily::Mpich => "mpich",
    }
}

/// Finds the compiler and launcher of an implementation, with its suffix or with the common name.
pub(crate) fn find(family: MpiFamily) -> Result<MpiInstallation, String> {
    for suffix in [format!(".{}", suffix(family)), String::new()] {
        let programs = ["mpicc", "mpirun"].map(|name| process::find(&format!("{name}{suffix}")));
        let [Some(compiler), Some(launcher)] = programs else { continue };
        let Ok(launcher) = Launcher::recognise(&launcher) else { continue };
        if launcher.family == family {
            return Ok(MpiInstallation { launcher, compiler });
        }
    }
    Err("not installed".into())
}

impl MpiInstallation {
    /// Returns the installation of a launcher, with the compiler in the same directory.
    pub(crate) fn of(launcher: Launcher) -> Result<Self, String> {
        let compiler = launcher.compiler();
        let compiler = compiler.ok_or_else(|| format!("there is no mpicc beside {launcher}"))?;
        Ok(Self { launcher, compiler })
    }

    #[cfg(test)]
    pub(crate) fn for_test(launcher: Launcher) -> Self {
        Self { launcher, compiler: PathBuf::new() }
    }

    /// Compiles the program for this implementation into a folder.
    pub(crate) fn compile(&self, folder: &Path) -> Result<PathBuf, String> {
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
        process::output(compiler, REPLY_TIMEOUT)?;
        Ok(folder.join("member"))
    }

    /// Components for collectives of an Open MPI that it does not use by default, each with the
    /// variable that makes it use the component.
    pub(crate) fn collective_components(&self) -> Vec<(&'static str, Variable)> {
        let program = self.launcher.path.with_file_name("ompi_info");
        if self.launcher.family != MpiFamily::OpenMpi || !program.is_file() {
            return Vec::new();
        }
        let listed = process::output(Command::new(program), REPLY_TIMEOUT).unwrap_or_default();
        let is_listed = |name: &str| listed.contains(&format!("MCA coll: {name} "));
        COLLECTIVE_COMPONENTS
            .into_iter()
            .filter(|(name, _)| is_listed(name))
            .map(|(name, variable)| (name, (variable, "100".into())))
            .collect()
    }

    /// Starts a group of `size` ranks.
    pub(crate) fn start(
        &self,
        member: &Path,
        size: usize,
        cores: &MemberCores,
        transport: &MpiTransport,
    ) -> Result<ProcessGroup, String> {
        let launcher = self.command(member, self.options(size, cores), transport);
        ProcessGroup::start(vec![launcher], REPLY_TIMEOUT)
    }

    /// Starts a group of `size` ranks that are bound to no core and yield it while they poll, as
    /// suits more ranks than cores.
    pub(crate) fn start_many(
        &self,
        member: &Path,
        size: usize,
        patience: Duration,
    ) -> Result<ProcessGroup, String> {
        let mut words: Vec<String> = Vec::new();
        if self.launcher.family == MpiFamily::OpenMpi {
            if rustix::process::geteuid().is_root() {
                words.push("--allow-run-as-root".into());
            }
            words.extend(["--oversubscribe", "--bind-to", "none"].map(str::to_owned));
        }
        words.extend(["-np".to_owned(), size.to_string()]);
        let mut launcher = self.command(member, words, &MpiTransport::Own);
        launcher
            .envs([("OMPI_MCA_mpi_yield_when_idle", "1"), ("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")]);
        ProcessGroup::start(vec![launcher], patience)
    }

    /// Starts a group of `size` ranks that allocate by `malloc`, as ordinary programs do.
    pub(crate) fn start_unmodified(
        &self,
        member: &Path,
        size: usize,
        cores: &MemberCores,
        mode: MpirunMode,
    ) -> Result<ProcessGroup, String> {
        let mut launcher = self.unmodified_command(mode, &self.options(size, cores))?;
        launcher.arg(member).arg("malloc");
        ProcessGroup::start(vec![launcher], REPLY_TIMEOUT)
    }

    /// Command that starts an MPI program, to which the program can be added.
    pub(crate) fn unmodified_command(
        &self,
        mode: MpirunMode,
        options: &[String],
    ) -> Result<Command, String> {
        let memferry = std::env::current_exe().map_err(|error| format!("no program: {error}"))?;
        let mut launcher = match mode {
            MpirunMode::Own => Command::new(&self.launcher.path),
            MpirunMode::Memferry | MpirunMode::SharedHeap => Command::new(memferry),
        };
        match mode {
            MpirunMode::Own => self.remove_memferry(&mut launcher),
            MpirunMode::Memferry => _ = launcher.args(["mpirun", "--mpi"]),
            MpirunMode::SharedHeap => _ = launcher.args(["mpirun", "--shared-heap", "--mpi"]),
        }
        if mode != MpirunMode::Own {
            launcher.arg(&self.launcher.path);
        }
        launcher.args(options).envs(QUIET);
        Ok(launcher)
    }

    /// Removes the variables of `memferry env`, which the user's shell may have evaluated.
    fn remove_memferry(&self, launcher: &mut Command) {
        for (name, _) in variables::for_family(self.launcher.family, Path::new("/"), None) {
            launcher.env_remove(name);
        }
    }

    /// Command of the launcher, with options before the program.
    fn command(&self, member: &Path, options: Vec<String>, transport: &MpiTransport) -> Command {
        let mut launcher = Command::new(&self.launcher.path);
        launcher.args(options).arg(member);
        if !matches!(transport, MpiTransport::Memferry(_)) {
            self.remove_memferry(&mut launcher);
        }
        if let MpiTransport::Adjusted(variables) | MpiTransport::Memferry(variables) = transport {
            launcher.envs(variables.iter().map(|(name, value)| (name, value)));
        }
        launcher.envs(QUIET);
        launcher
    }

    /// Options that bind every rank to a core like the other members. Ranks share cores if there
    /// are more ranks than cores.
    pub(crate) fn options(&self, size: usize, cores: &MemberCores) -> Vec<String> {
        let shared = size > cores.physical_count();
        let mut words: Vec<&str> = Vec::new();
        match self.launcher.family {
            MpiFamily::OpenMpi => {
                if rustix::process::geteuid().is_root() {
                    words.push("--allow-run-as-root");
                }
                words.extend(if shared {
                    ["--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
                } else {
                    ["--map-by", "core", "--bind-to", "core"]
                });
            }
            MpiFamily::Mpich => words.extend(["-bind-to", "core"]),
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
