//! The other side of the messages that `memferry doctor` sends: a second process of this very
//! program, which answers until its standard input ends. One that hangs is ended after a while.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use memferry::message::{Endpoint, Peer, Reach, Source, TAG_ALL, TAG_ANY};

use crate::show;

/// What it says when others can connect.
const READY: &str = "ready";
/// The longest that a partner may live.
const PATIENCE: Duration = Duration::from_secs(15);
/// Messages that are sent back as they are, and the question what it can do with our memory.
const ECHO: u64 = 1;
const REACH: u64 = 2;
/// The longest message.
pub(super) const LARGEST: usize = 4 << 20;

/// Answers messages. The hidden command `memferry partner` ends up here.
pub(crate) fn run(name: &str) -> anyhow::Result<()> {
    let endpoint = Endpoint::open(name)?;
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    show::print(&format!("{READY}\n"))?;
    let mut buffer = vec![0; LARGEST];
    loop {
        let received = endpoint.recv(Source::Any, 0, TAG_ANY, &mut buffer[..])?;
        if received.tag == REACH {
            let Reach { read, write, denied } = endpoint.reach(received.source)?;
            let why = denied.map_or(String::new(), |denied| denied.to_string());
            let answer = format!("{read} {write} {why}");
            endpoint.send(received.source, REACH, answer.as_bytes())?;
        } else {
            endpoint.send(received.source, ECHO, &buffer[..received.length as usize])?;
        }
    }
}

/// What the partner can do with the memory of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TheirReach {
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) denied: Option<String>,
}

impl TheirReach {
    fn parse(answer: &str) -> Option<Self> {
        let (read, rest) = answer.split_once(' ')?;
        let (write, why) = rest.split_once(' ')?;
        let denied = Some(why.to_owned()).filter(|why| !why.is_empty());
        Some(Self { read: read.parse().ok()?, write: write.parse().ok()?, denied })
    }
}

/// A partner that is connected.
#[derive(Debug)]
pub(super) struct Partner {
    // The endpoint goes first, while the process at its other end still lives.
    endpoint: Endpoint,
    peer: Peer,
    _process: Process,
}

impl Partner {
    /// Starts a partner and connects to it.
    pub(super) fn start() -> Result<Self, String> {
        let own = format!("doctor-{}", std::process::id());
        let name = format!("{own}-partner");
        let process = Process::start(&name)?;
        let endpoint = Endpoint::open(&own).map_err(|error| error.to_string())?;
        let peer = endpoint.connect(&name).map_err(|error| error.to_string())?;
        Ok(Self { endpoint, peer, _process: process })
    }

    /// What this process can do with the partner's memory.
    pub(super) fn reach(&self) -> Result<Reach, String> {
        self.endpoint.reach(self.peer).map_err(|error| error.to_string())
    }

    /// What the partner can do with the memory of this process.
    pub(super) fn their_reach(&self) -> Result<TheirReach, String> {
        let mut answer = [0; 1024];
        let length = self.exchange(REACH, &[], &mut answer)?;
        let answer = String::from_utf8_lossy(&answer[..length]);
        TheirReach::parse(&answer).ok_or_else(|| format!("the answer makes no sense: {answer}"))
    }

    /// Sends a message and gets it back.
    pub(super) fn echo(&self, message: &[u8], back: &mut [u8]) -> Result<(), String> {
        let length = self.exchange(ECHO, message, back)?;
        if length == message.len() { Ok(()) } else { Err(format!("{length} bytes came back")) }
    }

    fn exchange(&self, tag: u64, message: &[u8], back: &mut [u8]) -> Result<usize, String> {
        let sent = self.endpoint.send(self.peer, tag, message);
        sent.and_then(|()| self.endpoint.recv(self.peer, tag, TAG_ALL, back))
            .map(|received| received.length as usize)
            .map_err(|error| error.to_string())
    }
}

/// The process of a partner, ended with this value or when its time is up.
#[derive(Debug)]
struct Process {
    child: Arc<Mutex<Child>>,
    _alive: mpsc::Sender<()>,
}

impl Process {
    /// Starts it and waits until it is ready.
    fn start(name: &str) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["partner", "--name", name]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("no second process: {error}"))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let child = Arc::new(Mutex::new(child));
        let (alive, ends) = mpsc::channel::<()>();
        thread::spawn({
            let child = child.clone();
            move || {
                if ends.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                    end(&child);
                }
            }
        });
        let process = Self { child, _alive: alive };
        let mut line = String::new();
        let read = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        if line.trim() == READY && matches!(read, Some(Ok(_))) {
            return Ok(process);
        }
        drop(process);
        let mut complaint = String::new();
        let _ = stderr.map(|mut stderr| stderr.read_to_string(&mut complaint));
        Err(format!("the second process did not come up: {}", complaint.trim()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        end(&self.child);
    }
}

fn end(child: &Mutex<Child>) {
    let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_about_reach_is_understood() {
        let yes = TheirReach { read: true, write: true, denied: None };
        assert_eq!(TheirReach::parse("true true "), Some(yes));
        let no = TheirReach::parse("true false the kernel refused it").unwrap();
        assert_eq!((no.read, no.write), (true, false));
        assert_eq!(no.denied.as_deref(), Some("the kernel refused it"));
        assert_eq!(TheirReach::parse("perhaps"), None);
    }
}
