//! A group of workers of this program with a protocol of their own: the bench sends a line to all
//! workers, and the leader replies with a line. Only the bench and its workers interpret the lines.

use std::path::Path;

use super::cores::MemberCores;
use super::process_group::{ProcessGroup, REPLY_TIMEOUT};
use super::worker::{self, WorkerKind};
use super::workspace::TempWorkspace;

/// Workers, and their folder.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    // Terminated before the folder is removed.
    group: ProcessGroup,
    workspace: TempWorkspace,
}

impl WorkerPool {
    /// Starts `size` workers, each bound to a core, and waits until the leader is ready. The leader
    /// gets the environment variable `variable`, with the path of a file in the folder as its
    /// value.
    pub(crate) fn start(
        kind: WorkerKind,
        size: usize,
        variable: Option<(&str, &str)>,
    ) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("no folder: {error}");
        let scratch = TempWorkspace::new().map_err(said)?;
        let room = scratch.group_dir().map_err(said)?;
        let mut commands = worker::commands(kind, size, &MemberCores::of_this_machine(), &room)?;
        if let (Some((name, file)), Some(leader)) = (variable, commands.first_mut()) {
            leader.env(name, scratch.folder().join(file));
        }
        Ok(Self { group: ProcessGroup::start(commands, REPLY_TIMEOUT)?, workspace: scratch })
    }

    /// Folder in which the leader may leave files.
    pub(crate) fn folder(&self) -> &Path {
        self.workspace.folder()
    }

    /// Sends a line to all workers and returns the reply of the leader.
    pub(crate) fn request(&mut self, line: &str) -> Result<String, String> {
        self.group.request(line)
    }
}
