//! Connecting to peers, accepting peers, and the connection of an endpoint to itself.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::peer_table::ConnectedPeer;
use super::{Peer, Port, PortState};
use crate::connect::accept_thread::{AcceptState, AcceptThread};
use crate::connect::handshake::RejectReason;
use crate::connect::listener::Listener;
use crate::connect::{
    CLOSED_SOCKET, ConnectStatus, ConnectedSocket, ConnectionParts, EndpointId, ListenerAddress,
    PendingConnect, parse_name,
};
use crate::connection::Connection;
use crate::error::{ConnectError, Error};
use crate::quarantine;
use crate::window::window_table::WindowTable;

impl Port {
    /// Starts the thread that accepts connections. If it cannot be started, calls of the owner accept them.
    pub(crate) fn start_accept_thread(self: &Arc<Self>) {
        let readiness = match &mut self.lock().protocol.peers.listener {
            Some(listener) => listener.watch(),
            None => return,
        };
        let port = Arc::downgrade(self);
        let accept =
            move || port.upgrade().map_or(AcceptState::Closed, |port| port.accept_connections());
        match readiness.and_then(|readiness| AcceptThread::start(readiness, accept)) {
            Ok(thread) => *lock(&self.accept_thread) = Some(thread),
            Err(error) => {
                tracing::warn!(%error, "connections are accepted only by calls of the owner");
            }
        }
    }

    /// Accepts all pending connects, on the accept thread. Threads and event loops of this process are
    /// woken for a new peer: they sleep on the connections that they know.
    fn accept_connections(&self) -> AcceptState {
        let mut state = self.lock();
        if state.accept_pending() {
            state.wakeup.new_peer_calls = 2;
            state.mark_changed();
        }
        let listener = state.protocol.peers.listener.as_ref();
        listener.map_or(AcceptState::Closed, Listener::accept_state)
    }

    /// Connects to a name. Returns the peer if it is connected already. A listener with too many callers drops
    /// those that are slow, as all are on a machine that is overloaded: these try again.
    pub(crate) fn connect(&self, name: &str) -> Result<Peer, Error> {
        const TRIES: u32 = 5;
        let mut outcome = self.connect_once(name);
        for _ in 1..TRIES {
            match outcome {
                Err(Error::Connect(ConnectError::Rejected(_, CLOSED_SOCKET))) => {
                    outcome = self.connect_once(name);
                }
                _ => break,
            }
        }
        outcome
    }

    fn connect_once(&self, name: &str) -> Result<Peer, Error> {
        self.check_fork()?;
        let socket_name = parse_name(name)?;
        let mut state = self.lock();
        if state.protocol.peers.closed {
            return Err(Error::Closed);
        }
        let before = state.protocol.peers.find_name_or_last(name);
        // Detects disconnects first: another process may have the name of a disconnected peer.
        state.check_peers(true);
        if let Some(peer) = state.protocol.peers.find_verified(name) {
            return Ok(peer);
        }
        if name == state.protocol.peers.name {
            return Ok(state.peer_to_self()?);
        }
        let (allowed, patience) = (state.config.allowed.clone(), state.config.connect_timeout);
        let cross_memory = state.config.cross_memory;
        drop(state);
        // Without the lock: a connect may take long where many processes connect at once.
        let dialed = ConnectedSocket::connect(&socket_name, &allowed, patience);
        let mut state = self.lock();
        if state.protocol.peers.closed {
            return Err(Error::Closed);
        }
        let dialed = match dialed {
            Ok(dialed) => dialed,
            // Without a listener, no other process can have taken the name: a connected peer of that name is
            // valid.
            Err(error) => {
                let is_nobody = matches!(error, ConnectError::NoListener(_));
                let connected = state.protocol.peers.find_name(name).filter(|_| is_nobody);
                let came = || state.protocol.peers.find_incoming(name, None, before);
                return connected.or_else(came).ok_or(error.into());
            }
        };
        if let Some(peer) = state.find_by_listener(&dialed.listener, name)? {
            return Ok(peer);
        }
        // The lock has been held since the search above: a connect of this peer is recognised as crossed from
        // now on.
        let listening = dialed.listener.clone();
        state.protocol.peers.connecting_to.push(listening.clone());
        let (own_name, identity, board) = (
            state.protocol.peers.name.clone(),
            state.protocol.peers.identity,
            state.windows.table(),
        );
        drop(state);
        let start = |board: Arc<WindowTable>| {
            PendingConnect::start(dialed, identity, &own_name, board.as_fd(), patience)
        };
        let waiting = board.map_err(ConnectError::system("making shared memory")).and_then(start);
        let outcome = match waiting {
            Ok(waiting) => self.wait_connect_reply(waiting, &listening, name, cross_memory),
            Err(error) => Err(error.into()),
        };
        let mut state = self.lock();
        state.protocol.peers.stop_connecting(&listening);
        if state.protocol.peers.closed {
            return Err(Error::Closed);
        }
        match outcome {
            Ok(ConnectOutcome::Connected(met)) => Ok(state.add_parts(*met)?),
            Ok(ConnectOutcome::AlreadyConnected(peer)) => Ok(peer),
            Ok(ConnectOutcome::Crossed(id)) => {
                drop(state);
                self.wait_for_id(id, name)
            }
            // The peer did not reply, but its own connect may have arrived meanwhile.
            Err(error) => {
                state.protocol.peers.find_incoming(name, Some(&listening), before).ok_or(error)
            }
        }
    }

    /// Waits for the reply to a hello, and accepts other peers meanwhile.
    fn wait_connect_reply(
        &self,
        waiting: PendingConnect,
        listening: &ListenerAddress,
        name: &str,
        cross_memory: bool,
    ) -> Result<ConnectOutcome, Error> {
        const REPLY_POLL_TIMEOUT: Duration = Duration::from_millis(1);
        let mut waiting = Some(waiting);
        loop {
            let answer = PendingConnect::poll(&mut waiting, cross_memory)?;
            match answer {
                ConnectStatus::Connected(met) => return Ok(ConnectOutcome::Connected(met)),
                ConnectStatus::Crossed(id) => return Ok(ConnectOutcome::Crossed(id)),
                ConnectStatus::Pending => {}
            }
            let mut state = self.lock();
            // The peer may have connected to this side too. That connection counts then, and the peer may
            // never reply to this hello.
            state.accept_pending();
            if let Some(peer) = state.find_by_listener(listening, name)? {
                return Ok(ConnectOutcome::AlreadyConnected(peer));
            }
            state.progress();
            drop(state);
            if let Some(waiting) = &waiting {
                waiting.wait_readable(REPLY_POLL_TIMEOUT);
            }
        }
    }

    /// Waits for the connect of the peer, which counts when both sides connect at once.
    fn wait_for_id(&self, id: EndpointId, name: &str) -> Result<Peer, Error> {
        let timeout = self.lock().config.connect_timeout;
        let began = Instant::now();
        loop {
            let mut state = self.lock();
            state.accept_pending();
            state.progress();
            // The peer may even have connected, sent all its messages and disconnected.
            if let Some(peer) = state.protocol.peers.find_id_or_last(id) {
                return Ok(peer);
            }
            let seconds = state.config.connect_timeout.as_secs();
            drop(state);
            if began.elapsed() >= timeout {
                return Err(ConnectError::NoReply { name: name.to_owned(), seconds }.into());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

enum ConnectOutcome {
    Connected(Box<ConnectionParts>),
    Crossed(EndpointId),
    /// The peer has connected to this side meanwhile.
    AlreadyConnected(Peer),
}

impl PortState {
    /// Accepts or rejects all pending connects. Returns whether any peer was added.
    pub(crate) fn accept_pending(&mut self) -> bool {
        let mut any = false;
        while let Some(listener) = &mut self.protocol.peers.listener {
            let cross_memory = self.config.cross_memory;
            let Some(mut caller) = listener.poll(self.protocol.peers.identity, cross_memory) else {
                break;
            };
            let (id, name) = (caller.id(), caller.check_name());
            let is_dialed = self
                .protocol
                .peers
                .connecting_to
                .iter()
                .any(|dialed| dialed.matches(name, id.credentials));
            self.disconnect_if_exited(id);
            let crossed = self.protocol.peers.find_id(id).is_some()
                || (is_dialed && self.protocol.peers.identity < id.identity);
            if crossed {
                caller.reject(self.protocol.peers.identity, RejectReason::Crossed);
            } else if self.protocol.free_slot().is_none()
                || quarantine::has_many_ended(caller.pid())
            {
                caller.reject(self.protocol.peers.identity, RejectReason::Full);
            } else if let Ok(board) = self.windows.table()
                && let Some(met) = caller.accept(self.protocol.peers.identity, board.as_fd())
            {
                any |= self.add_parts(met).is_ok();
            }
        }
        any
    }

    /// Disconnects the old connection of a peer that connects again: the peer has lost it.
    pub(super) fn disconnect_if_exited(&mut self, id: EndpointId) {
        if let Some(peer) = self.protocol.peers.find_id(id)
            && self.protocol.peers[peer.index]
                .connection
                .as_ref()
                .is_some_and(|c| !c.wire.is_alive())
        {
            self.drain_and_disconnect(peer.index);
        }
    }

    /// Adds a connection from the parts of a handshake.
    pub(crate) fn add_parts(&mut self, met: ConnectionParts) -> Result<Peer, ConnectError> {
        self.add_connection(Connection::new(met))
    }

    pub(super) fn add_connection(&mut self, mut wire: Connection) -> Result<Peer, ConnectError> {
        let known = self
            .protocol
            .peers
            .slot_of_name(&wire.peer.name)
            .or_else(|| self.protocol.peers.slot_connecting_to(&wire.peer));
        let known = known.filter(|index| self.protocol.peers[*index].connection.is_none());
        let index = match known {
            Some(index) => index,
            None => self.protocol.allocate_slot()?,
        };
        self.windows.share_all(&mut wire);
        wire.ring_doorbell();
        let slot = &mut self.protocol.peers[index];
        slot.disconnect_reason = None;
        slot.connection = Some(Box::new(ConnectedPeer::new(wire)));
        self.protocol.peers.connected += 1;
        self.protocol.peers.activate(index);
        self.wakeup.watch_connection(index, &mut self.protocol.peers);
        self.protocol.peers.update_oversubscription();
        self.publish_gauges();
        if known.is_some() {
            self.start_queued_sends(index);
        }
        Ok(self.protocol.peers.peer(index))
    }

    /// The connection of this endpoint to itself, made at the first call.
    pub(crate) fn peer_to_self(&mut self) -> Result<Peer, ConnectError> {
        if let Some(peer) = self.protocol.peers.find_self() {
            return Ok(peer);
        }
        let wire =
            Connection::to_self(self.protocol.peers.identity, self.protocol.peers.name.clone())
                .map_err(ConnectError::system("making shared memory"))?;
        self.add_connection(wire)
    }

    /// The connected peer with the listener that a name has led to. It may be this endpoint itself.
    pub(super) fn find_by_listener(
        &mut self,
        listening: &ListenerAddress,
        name: &str,
    ) -> Result<Option<Peer>, ConnectError> {
        if !self.protocol.peers.name.is_empty()
            && self.protocol.peers.name == listening.name
            && listening.credentials.pid == std::process::id()
        {
            return self.peer_to_self().map(Some);
        }
        let found = self
            .protocol
            .peers
            .find_peer(|facts| listening.matches(&facts.bound_name, facts.id.credentials));
        if let Some(peer) = found {
            let connection = self.protocol.peers[peer.index].connection.as_mut();
            let facts = &mut connection.expect("it was found by it").wire.peer;
            facts.is_name_verified |= facts.name == name;
        }
        Ok(found)
    }
}
