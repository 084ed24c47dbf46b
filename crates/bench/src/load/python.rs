//! The Python interpreter whose package `memferry` is measured, and the benches of that package.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::bail;
use memferry_sys::settings;
use serde::Deserialize;

use super::script;
use crate::Effort;
use crate::harness::set;
use crate::host::process;
use crate::results::outcome::{Outcome, Row, Summary};

const VARIABLE: &str = "MEMFERRY_PYTHON";
const INSTALL: &str = "`pip install crates/python` in the source tree";
/// Time to import the package.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// Searches for the interpreter that `MEMFERRY_PYTHON` names, or `python3` in `PATH`. One that was
/// named and does not work is an error; otherwise the reason is returned, with the cure.
pub(super) fn find() -> anyhow::Result<Result<Python, String>> {
    let named = settings::read_variable(VARIABLE, |text| Some(text.to_owned()));
    match named.ok().flatten() {
        Some(name) => match Python::named(&name) {
            Ok(python) => Ok(Ok(python)),
            Err(reason) => bail!("{VARIABLE}={name}: {reason}"),
        },
        None => Ok(Python::in_path()),
    }
}

/// An interpreter that can import the package.
#[derive(Debug)]
pub(super) struct Python {
    program: PathBuf,
    package_version: String,
}

impl Python {
    fn in_path() -> Result<Self, String> {
        let program = process::find("python3").ok_or_else(|| {
            format!("there is no python3 in PATH: install Python 3.11 or later and its package memferry ({INSTALL}), or set {VARIABLE}")
        })?;
        Self::at(program)
    }

    fn named(name: &str) -> Result<Self, String> {
        let program = if name.contains('/') { Some(name.into()) } else { process::find(name) };
        Self::at(program.ok_or("there is no such program in PATH")?)
    }

    /// The interpreter at a path, if it can import the package.
    pub(super) fn at(program: PathBuf) -> Result<Self, String> {
        let mut command = script::command(&program);
        command.args(["-c", "import memferry; print('memferry', memferry.__version__)"]);
        let said = process::output(command, IMPORT_TIMEOUT).map_err(|error| {
            format!("its package memferry cannot be imported: {error}; install it by {INSTALL}")
        })?;
        let version = said.lines().rev().find_map(|line| line.strip_prefix("memferry "));
        let version = version.map(|version| version.trim().to_owned());
        let package_version = version.filter(|version| !version.is_empty()).ok_or_else(|| {
            format!("{} is not a Python interpreter: it said `{}`", program.display(), said.trim())
        })?;
        Ok(Self { program, package_version })
    }

    pub(super) fn package_version(&self) -> &str {
        &self.package_version
    }

    /// Runs a bench of the package, and calls `step` with the name of each figure when it begins.
    pub(super) fn measure(
        &self,
        bench: PythonBench,
        effort: Effort,
        folder: &Path,
        step: &mut dyn FnMut(&str),
    ) -> Result<PythonOutcome, String> {
        let mut command: Command = script::command(&self.program);
        command.args(["-m", "memferry.bench", bench.name(), "--json"]).args(extent(effort));
        command.arg("--folder").arg(folder);
        let said = script::run(command, time_limit(effort), step)?;
        serde_json::from_str(&said).map_err(|error| format!("its output is no outcome: {error}"))
    }
}

/// Rounds, and the size of the files.
fn extent(effort: Effort) -> [&'static str; 4] {
    match effort {
        Effort::Brief => ["--rounds", "2", "--gib", "0.25"],
        Effort::Quick => ["--rounds", "3", "--gib", "0.5"],
        Effort::Full => ["--rounds", "5", "--gib", "4"],
    }
}

/// Time of one bench of the package after which it is ended.
fn time_limit(effort: Effort) -> Duration {
    Duration::from_secs(if effort == Effort::Full { 1200 } else { 180 })
}

/// A bench of the package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PythonBench {
    Load,
    Overhead,
    Queue,
}

impl PythonBench {
    pub(super) const ALL: [Self; 3] = [Self::Overhead, Self::Queue, Self::Load];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Overhead => "overhead",
            Self::Queue => "queue",
        }
    }

    /// Number of figures, which are the steps of the progress.
    fn figures(self) -> u64 {
        match self {
            Self::Load => 6,
            Self::Overhead | Self::Queue => 1,
        }
    }

    pub(super) fn all_figures() -> u64 {
        Self::ALL.into_iter().map(Self::figures).sum()
    }
}

/// What a bench of the package prints with `--json`.
#[derive(Debug, Deserialize)]
pub(super) struct PythonOutcome {
    versions: BTreeMap<String, String>,
    rows: Vec<Row>,
    summary: Summary,
    missing: Vec<String>,
}

impl PythonOutcome {
    /// Adds rows, keys, versions and missing peers to an outcome.
    pub(super) fn add_to(self, outcome: &mut Outcome) {
        for (name, version) in self.versions {
            // The version of the program is there; that of the package has a name of its own.
            outcome.versions.entry(name).or_insert(version);
        }
        outcome.rows.extend(self.rows);
        for (key, value) in self.summary.iter() {
            set(&mut outcome.summary, key, value);
        }
        outcome.missing.extend(self.missing);
    }
}
