//! The handshake of two processes.
//!
//! The connecting side creates the shared memory and sends it in one packet with everything that
//! the peer needs; the accepting side replies with one packet. No thread blocks in a handshake for
//! a peer that does not reply: the handshake is polled again later.
//!
//! Process and user of the peer come from the kernel. The other contents of a packet (which
//! endpoint of the process it is, and the name on which it listens) are valid only together with
//! these: an identity belongs to one process, see [`EndpointId`]; a name leads to the process that
//! listens on it, see [`ListenerAddress`], and not to one that merely names it. A connecting
//! process of another user has no name unless it is the process that listens on it.

pub(crate) mod accept_thread;
pub(crate) mod access_probe;
pub(crate) mod handshake;
pub(crate) mod listener;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use memferry_sys::peer_process::{self, Credentials};
use memferry_sys::seqpacket::{SeqPacketSocket, SocketName};

use crate::error::{ConnectError, ValidationError};
use crate::ring::layout::{ConnectionEnd, ConnectionMemory};
use crate::window::window_table::PeerWindowTable;
use access_probe::{AccessProbe, OwnProbe, PeerAccess, ProbeStuck};
use handshake::{ConnectReply, ConnectRequest, EndpointUuid, RejectReason};

/// The reason for rejecting a process whose probe words cannot be read: no correct process has such
/// words.
const PROBE_STUCK: &str = "the access probe of its memory does not complete";

/// How a connect ends that the listener dropped without a reply.
pub(crate) const CLOSED_SOCKET: &str = "it closed the socket";

/// An endpoint: its process, from the kernel, and its identity within the process, from the
/// process. Two processes that send the same identity are still two endpoints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndpointId {
    pub(crate) identity: EndpointUuid,
    pub(crate) credentials: Credentials,
}

impl PartialEq for EndpointId {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && is_same_process(self.credentials, other.credentials)
    }
}

impl Eq for EndpointId {}

/// Returns whether two credentials belong to one process. Credentials of a socket are from when it
/// was connected or started to listen; the process may have changed its user since.
fn is_same_process(one: Credentials, other: Credentials) -> bool {
    if one.pid == 0 { one == other } else { one.pid == other.pid }
}

/// A listening process, as the kernel reports it on a connected socket: its credentials, and the
/// name that it bound, whatever name was used to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenerAddress {
    pub(crate) name: String,
    pub(crate) credentials: Credentials,
}

impl ListenerAddress {
    fn of_socket(socket: &SeqPacketSocket, credentials: Credentials) -> Self {
        // A name that cannot be read matches none.
        let name = socket.peer_name().map_or_else(String::new, |name| name.to_string());
        Self { name, credentials }
    }

    /// Returns whether this is the process with these credentials, and listens on `name`.
    pub(crate) fn matches(&self, name: &str, credentials: Credentials) -> bool {
        !name.is_empty() && self.name == name && is_same_process(self.credentials, credentials)
    }
}

/// Returns whether a process is the one that listens on a name. Never blocks: returns `false` if
/// that cannot be determined now.
pub(crate) fn is_listening_on(name: &str, credentials: Credentials) -> bool {
    let socket = parse_name(name).ok().and_then(|name| SeqPacketSocket::connect(&name).ok());
    let listener = socket.and_then(|socket| peer_process::credentials(socket.as_fd()).ok());
    listener.is_some_and(|listener| is_same_process(listener, credentials))
}

/// The parts of a new connection.
#[derive(Debug)]
pub(crate) struct ConnectionParts {
    /// The shared memory.
    pub(crate) memory: ConnectionMemory,
    /// The socket of the handshake, kept for descriptors, wake packets and liveness checks.
    pub(crate) socket: SeqPacketSocket,
    /// The peer's pidfd, if the kernel provides one.
    pub(crate) process: Option<OwnedFd>,
    /// The peer's credentials.
    pub(crate) credentials: Credentials,
    /// The identity of the endpoint in that process.
    pub(crate) identity: EndpointUuid,
    /// The name on which the peer listens, empty for a link. On the connecting side it is the name
    /// that was used, on the accepting side the name in the request.
    pub(crate) name: String,
    /// The kernel's report of the name, on the connecting side.
    pub(crate) listener: Option<ListenerAddress>,
    /// This side's access to the peer's memory, from the probe.
    pub(crate) access: PeerAccess,
    /// What the peer probes.
    pub(crate) own_probe: OwnProbe,
    /// The peer's window table.
    pub(crate) window_table: PeerWindowTable,
}

/// The users that may connect: this one, and those that were allowed.
#[derive(Debug, Clone, Default)]
pub(crate) struct AllowedUsers {
    /// Further users.
    pub(crate) uids: Vec<u32>,
}

impl AllowedUsers {
    /// Returns whether a user may connect.
    pub(crate) fn permits(&self, uid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid)
    }
}

/// A socket that is connected to a name. The listener is known; nothing is sent.
#[derive(Debug)]
pub(crate) struct ConnectedSocket {
    socket: SeqPacketSocket,
    name: SocketName,
    pub(crate) listener: ListenerAddress,
}

impl ConnectedSocket {
    /// Connects. A full queue of the listener delays it.
    pub(crate) fn connect(
        name: &SocketName,
        allowed: &AllowedUsers,
        timeout: Duration,
    ) -> Result<Self, ConnectError> {
        let socket = connect_socket(name, timeout)?;
        let credentials = check_user(&socket, allowed)?;
        let listener = ListenerAddress::of_socket(&socket, credentials);
        Ok(Self { socket, name: name.clone(), listener })
    }
}

/// A pending connection: the request is sent, the reply has not arrived.
#[derive(Debug)]
pub(crate) struct PendingConnect {
    socket: SeqPacketSocket,
    memory: ConnectionMemory,
    name: SocketName,
    listener: ListenerAddress,
    started: Instant,
    timeout: Duration,
    own_probe: OwnProbe,
    /// The reply has arrived, and the access probe is not complete.
    access_probe: Option<Box<(ConnectReply, PeerWindowTable, AccessProbe)>>,
}

/// The status of a pending connection.
#[derive(Debug)]
pub(crate) enum ConnectStatus {
    /// The connection is established.
    Connected(Box<ConnectionParts>),
    /// The peer's connection is used instead: it exists already, or both sides connected at the
    /// same time.
    Crossed(EndpointId),
    /// The reply has not arrived.
    Pending,
}

impl PendingConnect {
    /// Sends the connect request.
    pub(crate) fn start(
        connected: ConnectedSocket,
        identity: EndpointUuid,
        own_name: &str,
        window_table: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Self, ConnectError> {
        let ConnectedSocket { socket, name, listener } = connected;
        let system = ConnectError::system;
        let (memory, descriptor) = ConnectionMemory::create(ConnectionEnd::Connector)
            .map_err(system("making shared memory"))?;
        let own_probe = OwnProbe::new();
        let request =
            ConnectRequest { identity, probe: own_probe.addresses(), name: own_name.to_owned() };
        match socket.send(&request.encode(), &[descriptor.as_fd(), window_table]) {
            // The peer has closed the socket, and its reply contains the reason.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(system("sending a connect request"))?,
        }
        let (started, access_probe) = (Instant::now(), None);
        Ok(Self { socket, memory, name, listener, started, timeout, own_probe, access_probe })
    }

    /// Removes the timeout of the reply.
    pub(crate) fn without_timeout(self) -> Self {
        Self { timeout: Duration::MAX, ..self }
    }

    /// Waits for the reply until the timeout.
    pub(crate) fn wait_readable(&self, timeout: Duration) {
        use memferry_sys::fault::{Call, call};
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        let mut watched = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = call(Call::Poll, || poll(&mut watched, Some(&timeout)));
    }

    /// The remaining time until the timeout.
    pub(crate) fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }

    /// Polls for the reply. Takes the connection out of `waiting` once the reply has arrived and
    /// the access probe is complete.
    pub(crate) fn poll(
        waiting: &mut Option<Self>,
        cross_memory: bool,
    ) -> Result<ConnectStatus, ConnectError> {
        let Some(this) = waiting else { return Ok(ConnectStatus::Pending) };
        if this.access_probe.is_some() {
            return Self::poll_probe(waiting);
        }
        let name = this.name.to_string();
        let mut packet = [0; handshake::MAX_PACKET_BYTES];
        let received = match this.socket.receive_whole(&mut packet) {
            // Reported once, when the peer closes before it has read everything; the reply that it
            // sent before comes next.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                this.socket.receive_whole(&mut packet)
            }
            received => received,
        };
        let (length, descriptors) = match received {
            Ok((0, _)) => return Err(ConnectError::Rejected(name, CLOSED_SOCKET)),
            Ok(received) => received,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if this.time_left().is_zero() {
                    let seconds = this.timeout.as_secs();
                    return Err(ConnectError::NoReply { name, seconds });
                }
                return Ok(ConnectStatus::Pending);
            }
            Err(error) => return Err(ConnectError::system("receiving a connect reply")(error)),
        };
        let reply = ConnectReply::decode(&packet[..length])
            .ok_or(ConnectError::Rejected(name.clone(), "it has another protocol"))?;
        match reply.rejection {
            None => {}
            Some(RejectReason::Crossed) => {
                let credentials = this.listener.credentials;
                return Ok(ConnectStatus::Crossed(EndpointId {
                    identity: reply.identity,
                    credentials,
                }));
            }
            Some(RejectReason::Version(theirs)) => {
                return Err(ConnectError::Version { name, theirs, ours: handshake::VERSION });
            }
            Some(reason) => return Err(ConnectError::Rejected(name, reason.text())),
        }
        let window_table = PeerWindowTable::from_descriptors(descriptors).map_err(|error| {
            match RejectReason::for_memory(&error) {
                reason if reason.is_resource_shortage() => {
                    ConnectError::system("mapping its window table")(error)
                }
                _ => ConnectError::Rejected(name.clone(), "it sent no window table"),
            }
        })?;
        let probe = AccessProbe::start(this.listener.credentials, reply.probe, cross_memory);
        let probe = probe.map_err(|ProbeStuck| ConnectError::Rejected(name, PROBE_STUCK))?;
        this.access_probe = Some(Box::new((reply, window_table, probe)));
        Self::poll_probe(waiting)
    }

    /// Polls the access probe, after the reply.
    fn poll_probe(waiting: &mut Option<Self>) -> Result<ConnectStatus, ConnectError> {
        let outcome =
            waiting.as_ref().and_then(|this| match this.access_probe.as_ref()?.2.poll() {
                None => this.time_left().is_zero().then_some(Err(ProbeStuck)),
                outcome => outcome,
            });
        let Some(access) = outcome else { return Ok(ConnectStatus::Pending) };
        let mut this = waiting.take().expect("checked above");
        let (reply, window_table, _) = *this.access_probe.take().expect("checked above");
        let name = this.name.to_string();
        let access =
            access.map_err(|ProbeStuck| ConnectError::Rejected(name.clone(), PROBE_STUCK))?;
        Ok(ConnectStatus::Connected(Box::new(ConnectionParts {
            process: peer_process::peer_pidfd(this.socket.as_fd()),
            memory: this.memory,
            socket: this.socket,
            credentials: this.listener.credentials,
            identity: reply.identity,
            name,
            listener: Some(this.listener),
            access,
            own_probe: this.own_probe,
            window_table,
        })))
    }
}

impl AsFd for PendingConnect {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects a socket. Retries while the listener's queue is full.
fn connect_socket(name: &SocketName, timeout: Duration) -> Result<SeqPacketSocket, ConnectError> {
    let started = Instant::now();
    loop {
        let error = match SeqPacketSocket::connect(name) {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => {
                return Err(ConnectError::NoListener(name.to_string()));
            }
            std::io::ErrorKind::WouldBlock if started.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::io::ErrorKind::WouldBlock => {
                let seconds = timeout.as_secs();
                return Err(ConnectError::NoReply { name: name.to_string(), seconds });
            }
            _ => return Err(ConnectError::system("connecting")(error)),
        }
    }
}

fn check_user(
    socket: &SeqPacketSocket,
    allowed: &AllowedUsers,
) -> Result<Credentials, ConnectError> {
    let credentials = peer_process::credentials(socket.as_fd())
        .map_err(ConnectError::system("reading the credentials of the peer"))?;
    if allowed.permits(credentials.uid) {
        Ok(credentials)
    } else {
        Err(ConnectError::UserNotAllowed(credentials.uid))
    }
}

/// Parses the name of a socket.
pub(crate) fn parse_name(name: &str) -> Result<SocketName, ValidationError> {
    if name.is_empty() { Err(ValidationError::EmptyName) } else { Ok(SocketName::parse(name)) }
}
