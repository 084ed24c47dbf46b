//! A crew of workers of this bench, asked in words that the compiler knows.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, ensure};

use super::order::{Answer, Order, Pattern, Ran, Report, Table};
use super::workload::Problem;
use crate::bench::group::Crew;
use crate::bench::group::worker::Kind;

/// The variable that names the files to which lookups are recorded.
const TRACE_VARIABLE: &str = "MEMFERRY_LOOKUP_TRACE";
const TRACE_FILE: &str = "trace";

/// Workers that stand ready.
pub(super) struct Session {
    crew: Crew,
    opened: usize,
    /// What every run of the present program has come to so far.
    digest: Option<u64>,
}

impl Session {
    /// Starts so many workers.
    pub(super) fn start(members: usize) -> anyhow::Result<Self> {
        Self::over(Crew::start(Kind::Lookup, members, None))
    }

    /// Starts workers, of which the leader records all its lookups.
    pub(super) fn start_recording(members: usize) -> anyhow::Result<Self> {
        Self::over(Crew::start(Kind::Lookup, members, Some((TRACE_VARIABLE, TRACE_FILE))))
    }

    fn over(crew: Result<Crew, String>) -> anyhow::Result<Self> {
        let crew = crew.map_err(|reason| anyhow!("the workers: {reason}"))?;
        Ok(Self { crew, opened: 0, digest: None })
    }

    fn ask(&mut self, order: Order) -> anyhow::Result<Answer> {
        let line = serde_json::to_string(&order)?;
        let answer = self.crew.ask(&line).map_err(|reason| anyhow!("{order:?}: {reason}"))?;
        match serde_json::from_str(&answer)? {
            Answer::Failed(reason) => bail!("{order:?}: {reason}"),
            answer => Ok(answer),
        }
    }

    /// Lets the workers take memory for a program.
    pub(super) fn begin(&mut self, problem: Problem) -> anyhow::Result<()> {
        (self.opened, self.digest) = (0, None);
        self.ask(Order::Begin(problem)).map(drop)
    }

    /// Opens an endpoint and says its number.
    pub(super) fn open(&mut self, table: Table) -> anyhow::Result<usize> {
        self.ask(Order::Open(table))?;
        self.opened += 1;
        Ok(self.opened - 1)
    }

    /// Runs the program over an endpoint, and says what it took. Its result must be that of all runs
    /// before, over whichever endpoint.
    pub(super) fn run(&mut self, endpoint: usize) -> anyhow::Result<Ran> {
        let Answer::Ran(ran) = self.ask(Order::Run(endpoint))? else { bail!("no run") };
        let first = *self.digest.get_or_insert(ran.digest);
        ensure!(first == ran.digest, "two runs of the same program differ in their results");
        Ok(ran)
    }

    /// Lets the leader put, and says what one put took in nanoseconds.
    pub(super) fn put(&mut self, endpoint: usize, pattern: Pattern) -> anyhow::Result<f64> {
        match self.ask(Order::Put { endpoint, pattern })? {
            Answer::Ran(ran) => Ok(ran.ns),
            _ => bail!("no puts"),
        }
    }

    /// What the leader's lookup behind an endpoint has counted and takes.
    pub(super) fn report(&mut self, endpoint: usize) -> anyhow::Result<Report> {
        match self.ask(Order::Report(endpoint))? {
            Answer::Report(report) => Ok(*report),
            _ => bail!("no report"),
        }
    }

    pub(super) fn close(&mut self, endpoint: usize) -> anyhow::Result<()> {
        self.ask(Order::Close(endpoint)).map(drop)
    }

    /// Lets the workers give back the memory of the program.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        self.ask(Order::End).map(drop)
    }

    /// What the leader has recorded over its only endpoint. Complete once that is closed.
    pub(super) fn trace(&self) -> anyhow::Result<Vec<u8>> {
        // The name goes on with the number of the process and that of the endpoint.
        let is_trace = |path: &PathBuf| is_named(path, TRACE_FILE);
        let entries = std::fs::read_dir(self.crew.folder())?;
        let mut traces = entries.flatten().map(|entry| entry.path()).filter(is_trace);
        let (Some(trace), None) = (traces.next(), traces.next()) else {
            bail!("the leader has not left exactly one trace");
        };
        Ok(std::fs::read(trace)?)
    }
}

/// Whether the name of a file begins with a word and a point.
fn is_named(path: &Path, word: &str) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    name.and_then(|name| name.strip_prefix(word)).is_some_and(|rest| rest.starts_with('.'))
}
