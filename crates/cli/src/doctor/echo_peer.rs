//! The peer of the messages that `memferry doctor` sends: a second process of this program, which
//! replies until its standard input is closed. `doctor` kills it after 15 s at the latest.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use memferry::message::{Endpoint, Peer, PeerAccess, Source, TAG_ALL, TAG_ANY};

use crate::show;

/// The line that the peer prints as soon as its endpoint accepts connections.
const READY: &str = "ready";
/// The maximum lifetime of the peer.
const MAX_LIFETIME: Duration = Duration::from_secs(15);
/// The tags of the messages: `ECHO` is sent back unchanged, `ACCESS_REPORT` requests a report of
/// how the peer can access the memory of this process.
const ECHO: u64 = 1;
const ACCESS_REPORT: u64 = 2;
/// The maximum length of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// The main loop of the peer, which the hidden command `memferry partner` runs.
pub(crate) fn run(name: &str) -> anyhow::Result<()> {
    let endpoint = Endpoint::open(name)?;
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    show::print(&format!("{READY}\n"))?;
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    loop {
        let received = endpoint.recv(Source::Any, 0, TAG_ANY, &mut buffer[..])?;
        if received.tag == ACCESS_REPORT {
            let PeerAccess { read, write, denied } = endpoint.peer_access(received.source)?;
            let why = denied.map_or(String::new(), |denied| denied.to_string());
            let answer = format!("{read} {write} {why}");
            endpoint.send(received.source, ACCESS_REPORT, answer.as_bytes())?;
        } else {
            endpoint.send(received.source, ECHO, &buffer[..received.length as usize])?;
        }
    }
}

/// The access of the peer to the memory of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PeerAccessReport {
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) denied: Option<String>,
}

impl PeerAccessReport {
    fn parse(answer: &str) -> Option<Self> {
        let (read, rest) = answer.split_once(' ')?;
        let (write, why) = rest.split_once(' ')?;
        let denied = Some(why.to_owned()).filter(|why| !why.is_empty());
        Some(Self { read: read.parse().ok()?, write: write.parse().ok()?, denied })
    }
}

/// A connected peer process.
#[derive(Debug)]
pub(super) struct EchoPeer {
    // The endpoint is dropped first, while the peer process is still alive.
    endpoint: Endpoint,
    peer: Peer,
    _process: EchoProcess,
}

impl EchoPeer {
    /// Starts a peer process and connects to it.
    pub(super) fn start() -> Result<Self, String> {
        let own = format!("doctor-{}", std::process::id());
        let name = format!("{own}-partner");
        let process = EchoProcess::start(&name)?;
        let endpoint = Endpoint::open(&own).map_err(|error| format!("{error:?}"))?;
        let peer = endpoint.connect(&name).map_err(|error| format!("{error:?}"))?;
        Ok(Self { endpoint, peer, _process: process })
    }

    /// The access of this process to the peer's memory.
    pub(super) fn peer_access(&self) -> Result<PeerAccess, String> {
        self.endpoint.peer_access(self.peer).map_err(|error| format!("{error:?}"))
    }

    /// The access of the peer to the memory of this process.
    pub(super) fn peer_access_to_us(&self) -> Result<PeerAccessReport, String> {
        let mut answer = [0; 1024];
        let length = self.exchange(ACCESS_REPORT, &[], &mut answer)?;
        let answer = String::from_utf8_lossy(&answer[..length]);
        PeerAccessReport::parse(&answer)
            .ok_or_else(|| format!("the answer makes no sense: {answer}"))
    }

    /// Sends a message and receives the echo.
    pub(super) fn echo(&self, message: &[u8], back: &mut [u8]) -> Result<(), String> {
        let length = self.exchange(ECHO, message, back)?;
        if length == message.len() { Ok(()) } else { Err(format!("{length} bytes came back")) }
    }

    fn exchange(&self, tag: u64, message: &[u8], back: &mut [u8]) -> Result<usize, String> {
        let sent = self.endpoint.send(self.peer, tag, message);
        sent.and_then(|()| self.endpoint.recv(self.peer, tag, TAG_ALL, back))
            .map(|received| received.length as usize)
            .map_err(|error| format!("{error:?}"))
    }
}

/// The peer process. It is killed when this value is dropped, or after `MAX_LIFETIME`.
#[derive(Debug)]
struct EchoProcess {
    child: Arc<Mutex<Child>>,
    _alive: mpsc::Sender<()>,
}

impl EchoProcess {
    /// Starts the process and waits until it is ready.
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
                if ends.recv_timeout(MAX_LIFETIME) == Err(mpsc::RecvTimeoutError::Timeout) {
                    kill_child(&child);
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

impl Drop for EchoProcess {
    fn drop(&mut self) {
        kill_child(&self.child);
    }
}

fn kill_child(child: &Mutex<Child>) {
    let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_about_reach_is_understood() {
        let yes = PeerAccessReport { read: true, write: true, denied: None };
        assert_eq!(PeerAccessReport::parse("true true "), Some(yes));
        let no = PeerAccessReport::parse("true false the kernel refused it").unwrap();
        assert_eq!((no.read, no.write), (true, false));
        assert_eq!(no.denied.as_deref(), Some("the kernel refused it"));
        assert_eq!(PeerAccessReport::parse("perhaps"), None);
    }
}
