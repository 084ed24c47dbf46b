//! A group of workers of this program with words of their own: the bench says a line to all of
//! them, the leader answers with a line. What the lines mean is between the bench and its workers.

use std::path::Path;

use super::cores::Cores;
use super::members::{Group, PATIENCE};
use super::scratch::Scratch;
use super::worker::{self, Kind};

/// Workers, and the folder that goes with them.
#[derive(Debug)]
pub(in crate::bench) struct Crew {
    // Ended before the folder goes.
    group: Group,
    scratch: Scratch,
}

impl Crew {
    /// Starts `size` workers, each bound to a core, and waits until the leader is ready. The leader
    /// gets `variable` in its environment, with the path of a file in the folder as its value.
    pub(in crate::bench) fn start(
        kind: Kind,
        size: usize,
        variable: Option<(&str, &str)>,
    ) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("no folder: {error}");
        let scratch = Scratch::new().map_err(said)?;
        let room = scratch.room().map_err(said)?;
        let mut commands = worker::commands(kind, size, &Cores::of_this_machine(), &room)?;
        if let (Some((name, file)), Some(leader)) = (variable, commands.first_mut()) {
            leader.env(name, scratch.folder().join(file));
        }
        Ok(Self { group: Group::start(commands, PATIENCE)?, scratch })
    }

    /// The folder, in which the leader may leave files.
    pub(in crate::bench) fn folder(&self) -> &Path {
        self.scratch.folder()
    }

    /// Says a line to all workers and hands back what the leader answers.
    pub(in crate::bench) fn ask(&mut self, line: &str) -> Result<String, String> {
        self.group.ask(line)
    }
}
