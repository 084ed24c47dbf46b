//! MPI as a peer: our own small program, compiled here with the machine's MPI compilers and started
//! by their launchers, each with the settings it has out of the box.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::cores::Cores;
use super::members::{Group, PATIENCE};
use crate::process;

/// The program, file by file.
const SOURCES: [(&str, &str); 5] = [
    ("member.h", include_str!("mpi/member.h")),
    ("main.c", include_str!("mpi/main.c")),
    ("messages.c", include_str!("mpi/messages.c")),
    ("integer_sort.c", include_str!("mpi/integer_sort.c")),
    ("fourier.c", include_str!("mpi/fourier.c")),
];

/// The implementations that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    OpenMpi,
    Mpich,
}

/// An implementation that was found here.
#[derive(Debug)]
pub(super) struct Installed {
    flavour: Flavour,
    compiler: PathBuf,
    launcher: PathBuf,
    pub(super) version: String,
}

impl Flavour {
    pub(super) const ALL: [Self; 2] = [Self::OpenMpi, Self::Mpich];

    pub(super) fn series(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        }
    }

    /// What its programs are called where several implementations live side by side.
    fn suffix(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
        }
    }

    /// Whether a launcher that says this about itself is of this kind.
    fn wrote(self, version_text: &str) -> bool {
        let marks: &[&str] = match self {
            Self::OpenMpi => &["Open MPI", "OpenRTE", "open-mpi"],
            Self::Mpich => &["HYDRA", "MPICH"],
        };
        marks.iter().any(|mark| version_text.contains(mark))
    }

    /// Looks for its compiler and launcher, under its own name or the common one.
    pub(super) fn find(self) -> Result<Installed, String> {
        for suffix in [format!(".{}", self.suffix()), String::new()] {
            let programs =
                ["mpicc", "mpirun"].map(|name| process::find(&format!("{name}{suffix}")));
            let [Some(compiler), Some(launcher)] = programs else { continue };
            let mut ask = Command::new(&launcher);
            ask.arg("--version");
            let Ok(text) = process::output(ask, Duration::from_secs(10)) else { continue };
            if self.wrote(&text) {
                let version = process::version_in(&text).unwrap_or("unknown").to_owned();
                return Ok(Installed { flavour: self, compiler, launcher, version });
            }
        }
        Err("not installed".into())
    }
}

impl Installed {
    /// Compiles our program for this implementation into a folder.
    pub(super) fn compile(&self, folder: &Path) -> Result<PathBuf, String> {
        let folder = folder.join(self.flavour.suffix());
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
    pub(super) fn start(&self, member: &Path, size: usize, cores: &Cores) -> Result<Group, String> {
        let mut launcher = Command::new(&self.launcher);
        launcher.args(self.options(size, cores)).arg(member);
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
        match self.flavour {
            Flavour::OpenMpi => {
                if rustix::process::geteuid().is_root() {
                    words.push("--allow-run-as-root");
                }
                words.extend(if shared {
                    ["--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
                } else {
                    ["--map-by", "core", "--bind-to", "core"]
                });
            }
            Flavour::Mpich => words.extend(["-bind-to", "core"]),
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
    fn an_implementation_is_known_by_what_its_launcher_says() {
        assert!(Flavour::OpenMpi.wrote("mpirun (Open MPI) 5.0.3"));
        assert!(Flavour::OpenMpi.wrote("mpirun.openmpi (OpenRTE) 4.1.4"));
        assert!(Flavour::Mpich.wrote("HYDRA build details:\n    Version: 4.0.2"));
        assert!(!Flavour::Mpich.wrote("mpirun (Open MPI) 5.0.3"));
    }

    #[test]
    fn every_file_of_the_program_says_what_it_is_for() {
        for (name, text) in SOURCES {
            assert!(text.starts_with("/* "), "{name}");
        }
    }
}
