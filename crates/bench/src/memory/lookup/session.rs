//! Workers of this bench, controlled by typed commands.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, ensure};

use super::command::{LookupCommand, LookupMode, LookupReply, LookupReport, PutPattern, RunResult};
use super::workload::Problem;
use crate::group::WorkerPool;
use crate::group::worker::WorkerKind;

/// Environment variable that names the files to which lookups are recorded.
const TRACE_VARIABLE: &str = "MEMFERRY_LOOKUP_TRACE";
const TRACE_FILE: &str = "trace";

/// Started workers.
pub(super) struct TranslationSession {
    workers: WorkerPool,
    opened: usize,
    /// Digest of all runs of the current program so far.
    digest: Option<u64>,
}

impl TranslationSession {
    /// Starts `members` workers.
    pub(super) fn start(members: usize) -> anyhow::Result<Self> {
        Self::new(WorkerPool::start(WorkerKind::Lookup, members, None))
    }

    /// Starts workers, of which the leader records all its lookups.
    pub(super) fn start_recording(members: usize) -> anyhow::Result<Self> {
        Self::new(WorkerPool::start(
            WorkerKind::Lookup,
            members,
            Some((TRACE_VARIABLE, TRACE_FILE)),
        ))
    }

    fn new(crew: Result<WorkerPool, String>) -> anyhow::Result<Self> {
        let crew = crew.map_err(|reason| anyhow!("the workers: {reason}"))?;
        Ok(Self { workers: crew, opened: 0, digest: None })
    }

    fn request(&mut self, order: LookupCommand) -> anyhow::Result<LookupReply> {
        let line = serde_json::to_string(&order)?;
        let answer =
            self.workers.request(&line).map_err(|reason| anyhow!("{order:?}: {reason}"))?;
        match serde_json::from_str(&answer)? {
            LookupReply::Failed(reason) => bail!("{order:?}: {reason}"),
            answer => Ok(answer),
        }
    }

    /// Makes the workers allocate memory for a program.
    pub(super) fn begin(&mut self, problem: Problem) -> anyhow::Result<()> {
        (self.opened, self.digest) = (0, None);
        self.request(LookupCommand::Begin(problem)).map(drop)
    }

    /// Opens an endpoint and returns its number.
    pub(super) fn open(&mut self, table: LookupMode) -> anyhow::Result<usize> {
        self.request(LookupCommand::Open(table))?;
        self.opened += 1;
        Ok(self.opened - 1)
    }

    /// Runs the program over an endpoint and returns its times. The result must equal that of all
    /// previous runs, over any endpoint.
    pub(super) fn run(&mut self, endpoint: usize) -> anyhow::Result<RunResult> {
        let LookupReply::Ran(ran) = self.request(LookupCommand::Run(endpoint))? else {
            bail!("no run")
        };
        let first = *self.digest.get_or_insert(ran.digest);
        ensure!(first == ran.digest, "two runs of the same program differ in their results");
        Ok(ran)
    }

    /// Makes the leader put, and returns the time of one put in nanoseconds.
    pub(super) fn put(&mut self, endpoint: usize, pattern: PutPattern) -> anyhow::Result<f64> {
        match self.request(LookupCommand::Put { endpoint, pattern })? {
            LookupReply::Ran(ran) => Ok(ran.ns),
            _ => bail!("no puts"),
        }
    }

    /// Returns the counters and the memory of the leader's lookup of an endpoint.
    pub(super) fn report(&mut self, endpoint: usize) -> anyhow::Result<LookupReport> {
        match self.request(LookupCommand::Report(endpoint))? {
            LookupReply::Report(report) => Ok(*report),
            _ => bail!("no report"),
        }
    }

    pub(super) fn close(&mut self, endpoint: usize) -> anyhow::Result<()> {
        self.request(LookupCommand::Close(endpoint)).map(drop)
    }

    /// Makes the workers free the memory of the program.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        self.request(LookupCommand::End).map(drop)
    }

    /// Returns what the leader recorded over its only endpoint. The trace is complete once the
    /// endpoint is closed.
    pub(super) fn trace(&self) -> anyhow::Result<Vec<u8>> {
        // The file name continues with the process id and the number of the endpoint.
        let is_trace = |path: &PathBuf| is_named(path, TRACE_FILE);
        let entries = std::fs::read_dir(self.workers.folder())?;
        let mut traces = entries.flatten().map(|entry| entry.path()).filter(is_trace);
        let (Some(trace), None) = (traces.next(), traces.next()) else {
            bail!("the leader has not left exactly one trace");
        };
        Ok(std::fs::read(trace)?)
    }
}

/// Returns whether the name of a file begins with `word` and a dot.
fn is_named(path: &Path, word: &str) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    name.and_then(|name| name.strip_prefix(word)).is_some_and(|rest| rest.starts_with('.'))
}
