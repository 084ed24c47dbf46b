//! The accepting side: accepts sockets, reads connect requests as they arrive, and replies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::cross_memory::CrossMemoryDenied;
use memferry_sys::epoll::EpollSet;
use memferry_sys::peer_process;
use memferry_sys::seqpacket::{SeqPacketListener, SeqPacketSocket, SocketName};

use super::accept_thread::AcceptState;
use super::access_probe::{AccessProbe, OwnProbe, PeerAccess};
use super::handshake::{
    self, BadRequest, ConnectReply, ConnectRequest, EndpointUuid, RejectReason,
};
use super::{AllowedUsers, ConnectionParts, EndpointId, is_listening_on};
use crate::error::{ConnectError, SystemError};
use crate::ring::layout::{ConnectionEnd, ConnectionMemory};
use crate::window::window_table::PeerWindowTable;

/// The maximum number of sockets whose request has not arrived or whose access probe is not
/// complete, and the timeout for each of the two.
const MAX_PENDING: usize = 64;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout when all pending slots are in use.
const BUSY_REQUEST_TIMEOUT: Duration = Duration::from_millis(200);

/// A listening socket and its pending connections.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: SeqPacketListener,
    allowed: AllowedUsers,
    pending: Vec<(SeqPacketSocket, Instant)>,
    /// Connections whose request has arrived, and whose access probe is not complete.
    probing: Vec<(IncomingConnection, AccessProbe)>,
    /// Readable when a probe is complete. It exists while any probe is pending.
    probe_done: Option<Arc<EventFd>>,
    /// The last `accept` failed for lack of a resource.
    accept_failing: bool,
    /// Readable when a peer connects, and when a request of a pending socket arrives. Created on
    /// first use.
    epoll: Option<Arc<EpollSet>>,
}

/// A connect request that needs a reply.
#[derive(Debug)]
pub(crate) struct IncomingConnection {
    socket: SeqPacketSocket,
    request: ConnectRequest,
    memory: ConnectionMemory,
    window_table: PeerWindowTable,
    credentials: peer_process::Credentials,
    /// This side's access to the peer's memory.
    access: PeerAccess,
}

impl Listener {
    /// Binds a name.
    pub(crate) fn bind(name: &SocketName, allowed: AllowedUsers) -> Result<Self, ConnectError> {
        let socket = SeqPacketListener::bind(name).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse if name.is_non_socket_file() => {
                ConnectError::NotASocket(name.to_string())
            }
            std::io::ErrorKind::AddrInUse => ConnectError::NameInUse(name.to_string()),
            _ => ConnectError::ListenFailed {
                name: name.to_string(),
                error: SystemError(Arc::new(error)),
            },
        })?;
        let (pending, probing) = (Vec::new(), Vec::new());
        let (probe_done, epoll) = (None, None);
        Ok(Self { socket, allowed, pending, probing, probe_done, epoll, accept_failing: false })
    }

    /// Returns the epoll set that becomes readable when [`Listener::poll`] has work.
    pub(crate) fn watch(&mut self) -> io::Result<Arc<EpollSet>> {
        if let Some(epoll) = &self.epoll {
            return Ok(epoll.clone());
        }
        let epoll = Arc::new(EpollSet::new()?);
        epoll.add(self.socket.as_fd(), false)?;
        for (socket, _) in &self.pending {
            epoll.add(socket.as_fd(), false)?;
        }
        if let Some(event) = &self.probe_done {
            epoll.add(event.as_fd(), false)?;
        }
        self.epoll = Some(epoll.clone());
        Ok(epoll)
    }

    fn add_pending(&mut self, socket: SeqPacketSocket) {
        if let Some(epoll) = &self.epoll {
            let _ = epoll.add(socket.as_fd(), false);
        }
        self.pending.push((socket, Instant::now()));
    }

    fn take_pending(&mut self, index: usize) -> SeqPacketSocket {
        let (socket, _) = self.pending.swap_remove(index);
        if let Some(epoll) = &self.epoll {
            epoll.remove(socket.as_fd());
        }
        socket
    }

    /// Returns whether connections are pending.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.probing.is_empty() || self.accept_failing
    }

    /// What the thread that accepts connections has to wait for.
    pub(crate) fn accept_state(&self) -> AcceptState {
        let is_full = self.pending.len() + self.probing.len() >= MAX_PENDING;
        match (self.accept_failing || is_full, self.has_pending()) {
            (true, _) => AcceptState::Stalled,
            (false, true) => AcceptState::Pending,
            (false, false) => AcceptState::Idle,
        }
    }

    /// Returns whether one more connection can be pending. At the limit, a connection that has been
    /// silent for [`BUSY_REQUEST_TIMEOUT`] is dropped; newer ones are kept, and further ones wait
    /// in the queue of the socket.
    fn has_slot(&mut self) -> bool {
        if self.pending.len() + self.probing.len() >= MAX_PENDING {
            let silent =
                self.pending.iter().position(|(_, since)| since.elapsed() > BUSY_REQUEST_TIMEOUT);
            let slow =
                self.probing.iter().position(|(_, probe)| probe.elapsed() > BUSY_REQUEST_TIMEOUT);
            if let Some(slow) = slow {
                drop(self.probing.swap_remove(slow));
                if self.probing.is_empty() {
                    self.close_probe_done();
                }
            } else if let Some(silent) = silent {
                drop(self.take_pending(silent));
            }
        }
        self.pending.len() + self.probing.len() < MAX_PENDING
    }

    /// Probes the access to the memory of a connecting process. Returns the connection if the probe
    /// completes at once.
    fn probe_access(
        &mut self,
        incoming: IncomingConnection,
        own: EndpointUuid,
        cross_memory: bool,
    ) -> Option<IncomingConnection> {
        let Ok(probe) =
            AccessProbe::start(incoming.credentials, incoming.request.probe, cross_memory)
        else {
            incoming.reject(own, RejectReason::ProbeStuck);
            return None;
        };
        if let Some(Ok(access)) = probe.poll() {
            return Some(IncomingConnection { access, ..incoming });
        }
        if self.probe_done.is_none() {
            self.probe_done = EventFd::new().ok().map(Arc::new);
            if let (Some(event), Some(epoll)) = (&self.probe_done, &self.epoll) {
                let _ = epoll.add(event.as_fd(), false);
            }
        }
        // Without an eventfd, waiters poll at intervals.
        if let Some(event) = &self.probe_done {
            probe.signal_on_completion(event);
        }
        self.probing.push((incoming, probe));
        None
    }

    /// Returns a connection whose access probe is complete.
    fn take_probed(&mut self, own: EndpointUuid) -> Option<IncomingConnection> {
        if let Some(event) = &self.probe_done {
            event.drain();
        }
        let incoming = self.find_probed(own);
        if self.probing.is_empty() {
            self.close_probe_done();
        } else if self.probing.iter().any(|(_, probe)| probe.poll().is_some()) {
            self.probe_done.iter().for_each(|event| event.signal());
        }
        incoming
    }

    fn find_probed(&mut self, own: EndpointUuid) -> Option<IncomingConnection> {
        let mut index = 0;
        while let Some((_, probe)) = self.probing.get(index) {
            match probe.poll() {
                None => index += 1,
                Some(Ok(access)) => {
                    let (incoming, _) = self.probing.swap_remove(index);
                    return Some(IncomingConnection { access, ..incoming });
                }
                Some(Err(_)) => {
                    self.probing.swap_remove(index).0.reject(own, RejectReason::ProbeStuck);
                }
            }
        }
        None
    }

    /// Closes the eventfd of the probes, when none is pending.
    fn close_probe_done(&mut self) {
        if let (Some(event), Some(epoll)) = (self.probe_done.take(), &self.epoll) {
            epoll.remove(event.as_fd());
        }
    }

    /// Returns the next connection whose request has arrived and whose access probe is complete.
    /// Waits for a few milliseconds at most.
    pub(crate) fn poll(
        &mut self,
        own: EndpointUuid,
        cross_memory: bool,
    ) -> Option<IncomingConnection> {
        if let Some(incoming) = self.take_probed(own) {
            return Some(incoming);
        }
        for _ in 0..MAX_PENDING {
            if !self.has_slot() {
                break;
            }
            let socket = match self.socket.accept() {
                Ok(socket) => socket,
                Err(error) => {
                    // For example out of descriptors: tried again at the next interval.
                    let failed = error.kind() != io::ErrorKind::WouldBlock;
                    if failed && !self.accept_failing {
                        let name = self.socket.name();
                        tracing::warn!(%name, %error, "cannot accept a connection now");
                    }
                    self.accept_failing = failed;
                    break;
                }
            };
            let user = peer_process::credentials(socket.as_fd()).map(|found| found.uid);
            if !user.is_ok_and(|uid| self.allowed.permits(uid)) {
                reject(&socket, own, Some(RejectReason::User));
                continue;
            }
            self.add_pending(socket);
        }
        let mut index = 0;
        while index < self.pending.len() {
            let (socket, since) = &self.pending[index];
            let mut packet = [0; handshake::MAX_PACKET_BYTES];
            match socket.receive_whole(&mut packet) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if since.elapsed() < REQUEST_TIMEOUT {
                        index += 1;
                        continue;
                    }
                    drop(self.take_pending(index));
                }
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                    reject(&self.take_pending(index), own, Some(RejectReason::Descriptors));
                }
                Ok((length, descriptors)) if length > 0 => {
                    let socket = self.take_pending(index);
                    match read_request(&packet[..length], descriptors, &socket, &self.allowed) {
                        Ok((request, memory, window_table, credentials)) => {
                            let access = PeerAccess::none(CrossMemoryDenied::Unknown);
                            let incoming = IncomingConnection {
                                socket,
                                request,
                                memory,
                                window_table,
                                credentials,
                                access,
                            };
                            let incoming = self.probe_access(incoming, own, cross_memory);
                            if incoming.is_some() {
                                return incoming;
                            }
                        }
                        Err(rejection) => reject(&socket, own, rejection),
                    }
                }
                _ => drop(self.take_pending(index)),
            }
        }
        None
    }
}

fn read_request(
    packet: &[u8],
    mut descriptors: Vec<std::os::fd::OwnedFd>,
    socket: &SeqPacketSocket,
    allowed: &AllowedUsers,
) -> Result<
    (ConnectRequest, ConnectionMemory, PeerWindowTable, peer_process::Credentials),
    Option<RejectReason>,
> {
    let credentials = peer_process::credentials(socket.as_fd()).map_err(|_| None)?;
    if !allowed.permits(credentials.uid) {
        return Err(Some(RejectReason::User));
    }
    let request = ConnectRequest::decode(packet).map_err(|bad| match bad {
        BadRequest::UnknownProtocol => None,
        BadRequest::Version(_) => Some(RejectReason::Version(handshake::VERSION)),
    })?;
    let reason = |error| Some(RejectReason::for_memory(&error));
    let table_fds = descriptors.split_off(descriptors.len().min(1));
    let descriptor = descriptors.pop().ok_or(Some(RejectReason::Memory))?;
    let memory =
        ConnectionMemory::from_untrusted_fd(descriptor, ConnectionEnd::Acceptor).map_err(reason)?;
    let window_table = PeerWindowTable::from_descriptors(table_fds).map_err(reason)?;
    Ok((request, memory, window_table, credentials))
}

fn reject(socket: &SeqPacketSocket, identity: EndpointUuid, rejection: Option<RejectReason>) {
    if let Some(reason) = rejection.filter(|rejection| rejection.is_resource_shortage()) {
        // The peer gets the reason too, but cannot fix it.
        tracing::warn!("rejecting a connection for lack of a resource: {}", reason.text());
    }
    if rejection.is_some() {
        let _ = socket.send(&ConnectReply { rejection, identity, probe: (0, 0) }.encode(), &[]);
    }
}

impl IncomingConnection {
    /// The connecting endpoint.
    pub(crate) fn id(&self) -> EndpointId {
        EndpointId { identity: self.request.identity, credentials: self.credentials }
    }

    /// The name on which the connecting endpoint says it listens. For a process of this user it is
    /// trusted, because that process could take the name itself. A process of another user must be
    /// the one that listens there; otherwise the name is cleared.
    pub(crate) fn check_name(&mut self) -> &str {
        let name = &mut self.request.name;
        let is_own = self.credentials.uid == rustix::process::geteuid().as_raw();
        if !name.is_empty() && !is_own && !is_listening_on(name, self.credentials) {
            let (uid, pid) = (self.credentials.uid, self.credentials.pid);
            tracing::warn!(
                uid,
                pid,
                name,
                "connecting process names an address that it does not listen on"
            );
            name.clear();
        }
        name
    }

    /// The pid of the connecting process, from the kernel.
    pub(crate) fn pid(&self) -> u32 {
        self.credentials.pid
    }

    /// Rejects the connection.
    pub(crate) fn reject(self, own: EndpointUuid, rejection: RejectReason) {
        reject(&self.socket, own, Some(rejection));
    }

    /// Accepts the connection. Returns `None` if the peer has disconnected.
    pub(crate) fn accept(
        self,
        own: EndpointUuid,
        window_table: BorrowedFd<'_>,
    ) -> Option<ConnectionParts> {
        let own_probe = OwnProbe::new();
        let reply = ConnectReply { rejection: None, identity: own, probe: own_probe.addresses() };
        self.socket.send(&reply.encode(), &[window_table]).ok()?;
        Some(ConnectionParts {
            process: peer_process::peer_pidfd(self.socket.as_fd()),
            memory: self.memory,
            socket: self.socket,
            credentials: self.credentials,
            identity: self.request.identity,
            name: self.request.name,
            listener: None,
            access: self.access,
            own_probe,
            window_table: self.window_table,
        })
    }
}
