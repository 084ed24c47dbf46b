//! How two processes get to know each other.
//!
//! The connecting side makes the shared memory and sends it in one packet with all that the other
//! side must know; the accepting side answers with one packet. Nobody waits inside a handshake for
//! a peer that does not answer: what has not come yet is looked at again later.
//!
//! Which process and which user the other side is, is asked of the kernel. What a packet says beyond
//! that (which endpoint of the process it is, and the name that it listens on) counts only together
//! with it: an identity is that of one process and nobody else's, see [`EndpointId`]; a name leads to
//! the process that listens there, see [`Listening`], and to nobody who merely says so. A caller of
//! another user has no name unless it is the process that listens there.

pub(crate) mod hello;
pub(crate) mod listener;
pub(crate) mod reach;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use memferry_sys::packet_socket::{PacketSocket, SocketName};
use memferry_sys::peer_process::{self, Credentials};

use crate::error::{ConnectError, ValidationError};
use crate::ring::layout::{End, Memory};
use crate::window::board::BoardView;
use hello::{Hello, Identity, Refusal, Welcome};
use reach::{ProbeWords, Reach, Stuck, Trial};

/// Why a process is refused whose probe words cannot be read: only one that lies has such words.
const ABSENT: &str = "memory that was named for trying out the access to it does not come";

/// An endpoint: which process it is in, as the kernel says, and which of them, as the process says.
/// Two processes that say the same are two all the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndpointId {
    pub(crate) identity: Identity,
    pub(crate) credentials: Credentials,
}

impl PartialEq for EndpointId {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && is_same(self.credentials, other.credentials)
    }
}

impl Eq for EndpointId {}

/// Whether two credentials are of one process. Those of a socket are from when it was connected or
/// began to listen, and a process may change its user after that.
fn is_same(one: Credentials, other: Credentials) -> bool {
    if one.pid == 0 { one == other } else { one.pid == other.pid }
}

/// A process that listens, as the kernel tells it to somebody who has connected: who it is, and the
/// name that it was bound to, whatever name led there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listening {
    pub(crate) name: String,
    pub(crate) credentials: Credentials,
}

impl Listening {
    fn at(socket: &PacketSocket, credentials: Credentials) -> Self {
        // A name that cannot be told is nobody's.
        let name = socket.peer_name().map_or_else(String::new, |name| name.to_string());
        Self { name, credentials }
    }

    /// Whether a process that says it listens on `name` does so, and is this one.
    pub(crate) fn is(&self, name: &str, credentials: Credentials) -> bool {
        !name.is_empty() && self.name == name && is_same(self.credentials, credentials)
    }
}

/// Whether a process is the one that listens on a name. Never waits: `false` if it cannot be found
/// out now.
pub(crate) fn listens_on(name: &str, credentials: Credentials) -> bool {
    let socket = parse_name(name).ok().and_then(|name| PacketSocket::connect(&name).ok());
    let listener = socket.and_then(|socket| peer_process::credentials(socket.as_fd()).ok());
    listener.is_some_and(|listener| is_same(listener, credentials))
}

/// Everything that a new connection is made of.
#[derive(Debug)]
pub(crate) struct Acquaintance {
    /// The shared memory.
    pub(crate) memory: Memory,
    /// The socket of the handshake, kept for descriptors, for wake-ups, and to notice the end.
    pub(crate) socket: PacketSocket,
    /// The other process, where the kernel can name it.
    pub(crate) process: Option<OwnedFd>,
    /// Who it is.
    pub(crate) credentials: Credentials,
    /// Which endpoint of that process it is.
    pub(crate) identity: Identity,
    /// The name under which it can be reached, empty for a link. Of one that was called, the name
    /// that was called; of a caller, the name that it says it listens on.
    pub(crate) name: String,
    /// What the kernel says of the name, if this side has called.
    pub(crate) listening: Option<Listening>,
    /// What this side can do with its memory, as was tried out.
    pub(crate) reach: Reach,
    /// The windows that it exposes.
    pub(crate) board: BoardView,
}

/// Which users may connect: this one, and those that were allowed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Allowed {
    /// Further users.
    pub(crate) uids: Vec<u32>,
}

impl Allowed {
    /// Whether a user may connect.
    pub(crate) fn permits(&self, uid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid)
    }
}

/// A socket that is connected to a name. Nothing has been said yet, but who listens is known.
#[derive(Debug)]
pub(crate) struct Dialed {
    socket: PacketSocket,
    name: SocketName,
    pub(crate) listening: Listening,
}

impl Dialed {
    /// Connects. Where many others do the same it takes a while.
    pub(crate) fn dial(
        name: &SocketName,
        allowed: &Allowed,
        patience: Duration,
    ) -> Result<Self, ConnectError> {
        let socket = dial(name, patience)?;
        let credentials = check_user(&socket, allowed)?;
        let listening = Listening::at(&socket, credentials);
        Ok(Self { socket, name: name.clone(), listening })
    }
}

/// A connection on its way: the hello is sent, the answer has not come.
#[derive(Debug)]
pub(crate) struct Connecting {
    socket: PacketSocket,
    memory: Memory,
    name: SocketName,
    listening: Listening,
    began: Instant,
    patience: Duration,
    /// The answer has come, and the access to the memory of the other side is being tried.
    trial: Option<Box<(Welcome, BoardView, Trial)>>,
}

/// What became of it so far.
#[derive(Debug)]
pub(crate) enum Answer {
    /// It is connected.
    Here(Box<Acquaintance>),
    /// The other side's connection counts: there is one already, or both connected at once.
    Crossed(EndpointId),
    /// No answer yet.
    NotYet,
}

impl Connecting {
    /// Sends the hello.
    pub(crate) fn start(
        dialed: Dialed,
        identity: Identity,
        own_name: &str,
        board: BorrowedFd<'_>,
        patience: Duration,
    ) -> Result<Self, ConnectError> {
        let Dialed { socket, name, listening } = dialed;
        let system = ConnectError::system;
        let (memory, descriptor) =
            Memory::create(End::Connecting).map_err(system("making shared memory"))?;
        let own_probe = ProbeWords::of_process();
        let hello = Hello { identity, probe: own_probe.describe(), name: own_name.to_owned() };
        match socket.send(&hello.encode(), &[descriptor.as_fd(), board]) {
            // It has hung up already, and its answer says why.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(system("sending a hello"))?,
        }
        let (began, trial) = (Instant::now(), None);
        Ok(Self { socket, memory, name, listening, began, patience, trial })
    }

    /// The same, but the other side may take as long as it likes to answer.
    pub(crate) fn with_endless_patience(self) -> Self {
        Self { patience: Duration::MAX, ..self }
    }

    /// Waits for the answer, at most so long.
    pub(crate) fn wait_readable(&self, timeout: Duration) {
        use memferry_sys::fault::{Call, call};
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        let mut watched = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = call(Call::Poll, || poll(&mut watched, Some(&timeout)));
    }

    /// How long it may still take.
    pub(crate) fn time_left(&self) -> Duration {
        self.patience.saturating_sub(self.began.elapsed())
    }

    /// Looks for the answer. Takes the connection out of `waiting` when there is one, and the access to the
    /// other side's memory was tried, if it may be used.
    pub(crate) fn look(
        waiting: &mut Option<Self>,
        cross_memory: bool,
    ) -> Result<Answer, ConnectError> {
        let Some(this) = waiting else { return Ok(Answer::NotYet) };
        if this.trial.is_some() {
            return Self::look_at_trial(waiting);
        }
        let name = this.name.to_string();
        let mut packet = [0; hello::MOST_BYTES];
        let received = match this.socket.receive_whole(&mut packet) {
            // Told once, when the other side hangs up before it has read everything; what it has
            // answered before that comes next.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                this.socket.receive_whole(&mut packet)
            }
            received => received,
        };
        let (length, descriptors) = match received {
            Ok((0, _)) => return Err(ConnectError::Refused(name, "it closed the socket")),
            Ok(received) => received,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if this.time_left().is_zero() {
                    let seconds = this.patience.as_secs();
                    return Err(ConnectError::NoAnswer { name, seconds });
                }
                return Ok(Answer::NotYet);
            }
            Err(error) => return Err(ConnectError::system("receiving the answer")(error)),
        };
        let welcome = Welcome::decode(&packet[..length])
            .ok_or(ConnectError::Refused(name.clone(), "it does not speak this protocol"))?;
        match welcome.refusal {
            None => {}
            Some(Refusal::Crossed) => {
                let credentials = this.listening.credentials;
                return Ok(Answer::Crossed(EndpointId { identity: welcome.identity, credentials }));
            }
            Some(Refusal::Version(theirs)) => {
                return Err(ConnectError::Version { name, theirs, ours: hello::VERSION });
            }
            Some(refusal) => return Err(ConnectError::Refused(name, refusal.text())),
        }
        let board =
            BoardView::from_descriptors(descriptors).map_err(|error| match Refusal::for_memory(
                &error,
            ) {
                want if want.is_want() => ConnectError::system("mapping its windows")(error),
                _ => ConnectError::Refused(name.clone(), "it sent no list of its windows"),
            })?;
        let trial = Trial::start(this.listening.credentials, welcome.probe, cross_memory);
        let trial = trial.map_err(|Stuck| ConnectError::Refused(name, ABSENT))?;
        this.trial = Some(Box::new((welcome, board, trial)));
        Self::look_at_trial(waiting)
    }

    /// The answer has come: whether the trial of the access to the other side's memory is over.
    fn look_at_trial(waiting: &mut Option<Self>) -> Result<Answer, ConnectError> {
        let outcome = waiting.as_ref().and_then(|this| match this.trial.as_ref()?.2.poll() {
            None => this.time_left().is_zero().then_some(Err(Stuck)),
            outcome => outcome,
        });
        let Some(reach) = outcome else { return Ok(Answer::NotYet) };
        let mut this = waiting.take().expect("it was there above");
        let (welcome, board, _) = *this.trial.take().expect("it was there above");
        let name = this.name.to_string();
        let reach = reach.map_err(|Stuck| ConnectError::Refused(name.clone(), ABSENT))?;
        Ok(Answer::Here(Box::new(Acquaintance {
            process: peer_process::process_of(this.socket.as_fd()),
            memory: this.memory,
            socket: this.socket,
            credentials: this.listening.credentials,
            identity: welcome.identity,
            name,
            listening: Some(this.listening),
            reach,
            board,
        })))
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects a socket. Where many others do the same it takes a while until it is this one's turn.
fn dial(name: &SocketName, patience: Duration) -> Result<PacketSocket, ConnectError> {
    let began = Instant::now();
    loop {
        let error = match PacketSocket::connect(name) {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => {
                return Err(ConnectError::NobodyListens(name.to_string()));
            }
            std::io::ErrorKind::WouldBlock if began.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::io::ErrorKind::WouldBlock => {
                let seconds = patience.as_secs();
                return Err(ConnectError::NoAnswer { name: name.to_string(), seconds });
            }
            _ => return Err(ConnectError::system("connecting")(error)),
        }
    }
}

fn check_user(socket: &PacketSocket, allowed: &Allowed) -> Result<Credentials, ConnectError> {
    let credentials = peer_process::credentials(socket.as_fd())
        .map_err(ConnectError::system("asking who is at the other end"))?;
    if allowed.permits(credentials.uid) {
        Ok(credentials)
    } else {
        Err(ConnectError::UserNotAllowed(credentials.uid))
    }
}

/// The socket that a name stands for.
pub(crate) fn parse_name(name: &str) -> Result<SocketName, ValidationError> {
    if name.is_empty() { Err(ValidationError::EmptyName) } else { Ok(SocketName::parse(name)) }
}
