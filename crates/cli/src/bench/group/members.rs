//! The processes of a group as the bench sees them: started together, asked by a line, answering by
//! a line, ended together whatever happens. A group that hangs or dies costs its bench a while,
//! never its life.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use super::Contender;
use super::order::{Order, QUIT, READY, Timing};
use crate::process::{die_with_parent, end};

/// The longest that a group may take to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting bench looks whether all members are still alive.
const LOOK: Duration = Duration::from_millis(100);

/// A group of processes that has said it is ready.
#[derive(Debug)]
pub(super) struct Group {
    members: Vec<Child>,
    answers: ChildStdout,
    unread: Vec<u8>,
    complaints: File,
    patience: Duration,
}

impl Group {
    /// Starts the members, the leader first, and waits until the leader says that all are there.
    pub(super) fn start(commands: Vec<Command>, patience: Duration) -> Result<Self, String> {
        let complaints = memfd_create("complaints", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|error| format!("no memory for complaints: {error}"))?;
        let mut members: Vec<Child> = Vec::new();
        for command in commands {
            let leader = members.first().map(Child::id);
            match spawn(command, leader, &complaints) {
                Ok(member) => members.push(member),
                Err(error) => {
                    end(&mut members, false);
                    return Err(format!("cannot be started: {error}"));
                }
            }
        }
        let Some(answers) = members.first_mut().and_then(|leader| leader.stdout.take()) else {
            return Err("has no leader".into());
        };
        let unread = Vec::new();
        let mut group = Self { members, answers, unread, complaints, patience };
        match group.read_line() {
            Ok(line) if line.trim() == READY => Ok(group),
            Ok(line) => Err(group.failed(format!("said `{}` instead of {READY}", line.trim()))),
            Err(reason) => Err(group.failed(reason)),
        }
    }

    /// Tells every member one line, and hands back the line that the leader answers.
    pub(super) fn ask(&mut self, line: &str) -> Result<String, String> {
        let told = self.tell(&format!("{line}\n")).map_err(|error| format!("is deaf: {error}"));
        told.and_then(|()| self.read_line()).map_err(|reason| self.failed(reason))
    }

    /// Tells every member. Launchers pass it on to the leader, who tells the others.
    fn tell(&mut self, line: &str) -> io::Result<()> {
        for member in &mut self.members {
            if let Some(input) = &mut member.stdin {
                input.write_all(line.as_bytes())?;
                input.flush()?;
            }
        }
        Ok(())
    }

    /// The leader's next line, or why there will be none.
    fn read_line(&mut self) -> Result<String, String> {
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<_> = self.unread.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("gave no answer within {:?}", self.patience));
            }
            if self.has_input(left.min(LOOK))? {
                let mut chunk = [0; 512];
                match self.answers.read(&mut chunk) {
                    Ok(0) => return Err(self.obituary().unwrap_or("ended".into())),
                    Ok(count) => self.unread.extend_from_slice(&chunk[..count]),
                    Err(error) => return Err(format!("cannot be heard: {error}")),
                }
            } else if let Some(obituary) = self.obituary() {
                return Err(obituary);
            }
        }
    }

    fn has_input(&self, wait: Duration) -> Result<bool, String> {
        let mut ears = [PollFd::new(&self.answers, PollFlags::IN)];
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut ears, Some(&wait)) {
            Ok(count) => Ok(count > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(format!("cannot be heard: {error}")),
        }
    }

    /// How a member ended, if one did. One that ends as its group is ready has left the others alone.
    fn obituary(&mut self) -> Option<String> {
        let ended = |member: &mut Child| member.try_wait().ok().flatten();
        let status = self.members.iter_mut().find_map(ended)?;
        Some(format!("a member ended ({status})"))
    }

    /// Ends the group, and adds the last it complained about to the reason.
    fn failed(&mut self, reason: String) -> String {
        end(&mut self.members, false);
        self.members.clear();
        match self.last_complaint() {
            Some(complaint) => format!("{reason}: {complaint}"),
            None => reason,
        }
    }

    fn last_complaint(&self) -> Option<String> {
        const TAIL: u64 = 4096;
        let length = self.complaints.metadata().ok()?.len();
        let mut tail = vec![0; length.min(TAIL) as usize];
        // At a place, because the members write at the position that they share with this file.
        let start = length - tail.len() as u64;
        let count = self.complaints.read_at(&mut tail, start).ok()?;
        let text = String::from_utf8_lossy(&tail[..count]).into_owned();
        let telling = |line: &&str| line.chars().any(char::is_alphanumeric);
        text.lines().rev().map(str::trim).find(telling).map(str::to_owned)
    }
}

impl Contender for Group {
    fn carry_out(&mut self, order: Order) -> Result<Timing, String> {
        let answer = self.ask(&order.to_string())?;
        Timing::parse(&answer).map_err(|reason| self.failed(reason))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let told = self.tell(&format!("{QUIT}\n")).is_ok();
        end(&mut self.members, told);
    }
}

/// Starts one member in the process group of the leader, to end when this process ends.
fn spawn(mut command: Command, leader: Option<u32>, complaints: &File) -> io::Result<Child> {
    let process_group = leader.map_or(0, |id| id as i32);
    let answers = if leader.is_none() { Stdio::piped() } else { Stdio::null() };
    command.stdin(Stdio::piped()).stdout(answers).stderr(complaints.try_clone()?);
    die_with_parent(&mut command, process_group).spawn()
}

#[cfg(test)]
mod tests;
