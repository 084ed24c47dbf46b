//! Processes of a group, from the side of the bench: started together, controlled by one line per
//! command and one line per reply, and terminated together in every case. A group that hangs or
//! crashes costs the bench a timeout and does not end it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use super::TaskRunner;
use super::command::{QUIT, READY, WorkerCommand};
use crate::harness::Sample;
use crate::host::process::{die_with_parent, terminate};

/// Timeout of a reply.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which a waiting bench checks that all members are alive.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A group of processes that has reported that it is ready.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    members: Vec<Child>,
    replies: ChildStdout,
    unread: Vec<u8>,
    stderr: File,
    timeout: Duration,
}

impl ProcessGroup {
    /// Starts the members, the leader first, and waits until the leader reports that the group is
    /// complete.
    pub(crate) fn start(commands: Vec<Command>, patience: Duration) -> Result<Self, String> {
        let complaints = memfd_create("complaints", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|error| format!("no memory for complaints: {error}"))?;
        let mut members: Vec<Child> = Vec::new();
        for command in commands {
            let leader = members.first().map(Child::id);
            match spawn(command, leader, &complaints) {
                Ok(member) => members.push(member),
                Err(error) => {
                    terminate(&mut members, false);
                    return Err(format!("cannot be started: {error}"));
                }
            }
        }
        let Some(answers) = members.first_mut().and_then(|leader| leader.stdout.take()) else {
            return Err("has no leader".into());
        };
        let unread = Vec::new();
        let mut group =
            Self { members, replies: answers, unread, stderr: complaints, timeout: patience };
        match group.read_line() {
            Ok(line) if line.trim() == READY => Ok(group),
            Ok(line) => Err(group.fail(format!("said `{}` instead of {READY}", line.trim()))),
            Err(reason) => Err(group.fail(reason)),
        }
    }

    /// Sends a line to every member, and returns the line that the leader replies.
    pub(crate) fn request(&mut self, line: &str) -> Result<String, String> {
        self.tell(line)?;
        self.reply()
    }

    /// Sends a line to every member, which [`ProcessGroup::reply`] must follow.
    pub(crate) fn tell(&mut self, line: &str) -> Result<(), String> {
        let told = self.broadcast(&format!("{line}\n"));
        told.map_err(|error| self.fail(format!("is deaf: {error}")))
    }

    /// Returns the line that the leader replies.
    pub(crate) fn reply(&mut self) -> Result<String, String> {
        self.read_line().map_err(|reason| self.fail(reason))
    }

    /// Sets the timeout of the next replies.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Identifiers of the processes that were started here: the members, or their launcher.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.members.iter().map(Child::id).collect()
    }

    /// Sends a line to every member. An MPI launcher forwards it to the leader, which distributes
    /// it.
    fn broadcast(&mut self, line: &str) -> io::Result<()> {
        for member in &mut self.members {
            if let Some(input) = &mut member.stdin {
                input.write_all(line.as_bytes())?;
                input.flush()?;
            }
        }
        Ok(())
    }

    /// Returns the leader's next line, or the reason why there is none.
    fn read_line(&mut self) -> Result<String, String> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<_> = self.unread.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("gave no answer within {:?}", self.timeout));
            }
            if self.has_input(left.min(ALIVE_CHECK_INTERVAL))? {
                let mut chunk = [0; 512];
                match self.replies.read(&mut chunk) {
                    Ok(0) => return Err(self.exit_reason().unwrap_or("ended".into())),
                    Ok(count) => self.unread.extend_from_slice(&chunk[..count]),
                    Err(error) => return Err(format!("cannot be heard: {error}")),
                }
            } else if let Some(obituary) = self.exit_reason() {
                return Err(obituary);
            }
        }
    }

    fn has_input(&self, wait: Duration) -> Result<bool, String> {
        let mut ears = [PollFd::new(&self.replies, PollFlags::IN)];
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut ears, Some(&wait)) {
            Ok(count) => Ok(count > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(format!("cannot be heard: {error}")),
        }
    }

    /// Returns how a member exited, if one has. A member that exits while its group is in use has
    /// failed, whatever its status.
    fn exit_reason(&mut self) -> Option<String> {
        let ended = |member: &mut Child| member.try_wait().ok().flatten();
        let status = self.members.iter_mut().find_map(ended)?;
        Some(format!("a member ended ({status})"))
    }

    /// Terminates the group, and appends the last line of its standard error to the reason.
    fn fail(&mut self, reason: String) -> String {
        terminate(&mut self.members, false);
        self.members.clear();
        match self.stderr_tail() {
            Some(complaint) => format!("{reason}: {complaint}"),
            None => reason,
        }
    }

    fn stderr_tail(&self) -> Option<String> {
        const TAIL_BYTES: u64 = 4096;
        let length = self.stderr.metadata().ok()?.len();
        let mut tail = vec![0; length.min(TAIL_BYTES) as usize];
        // A positioned read, because the members write at the file position that they share with
        // this descriptor.
        let start = length - tail.len() as u64;
        let count = self.stderr.read_at(&mut tail, start).ok()?;
        let text = String::from_utf8_lossy(&tail[..count]).into_owned();
        let telling = |line: &&str| line.chars().any(char::is_alphanumeric);
        text.lines().rev().map(str::trim).find(telling).map(str::to_owned)
    }
}

impl TaskRunner for ProcessGroup {
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
        let answer = self.request(&order.to_string())?;
        Sample::parse(&answer).map_err(|reason| self.fail(reason))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let told = self.broadcast(&format!("{QUIT}\n")).is_ok();
        terminate(&mut self.members, told);
    }
}

/// Starts one member in the process group of the leader. The member is killed when this process
/// exits.
fn spawn(mut command: Command, leader: Option<u32>, complaints: &File) -> io::Result<Child> {
    let process_group = leader.map_or(0, |id| id as i32);
    let answers = if leader.is_none() { Stdio::piped() } else { Stdio::null() };
    command.stdin(Stdio::piped()).stdout(answers).stderr(complaints.try_clone()?);
    die_with_parent(&mut command, process_group).spawn()
}

#[cfg(test)]
mod tests;
