//! Peers that the application added by name. A peer is connected when the first message to it needs that,
//! without blocking: sends are queued in order meanwhile.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use memferry_sys::clock;

use super::operations::OperationKind;
use super::peer_table::{PeerSlot, PeerTable};
use super::progress::{Drain, ProgressScope};
use super::submit::Started;
use super::wait::PortGuard;
use super::{Peer, Port, PortState};
use crate::completion::CompletionOptions;
use crate::connect::{ConnectStatus, ConnectedSocket, ListenerAddress, PendingConnect, parse_name};
use crate::connection::{Connection, PeerInfo};
use crate::control::{OperationId, inline_limit};
use crate::envelope::Envelope;
use crate::error::{ConnectError, Disconnect, DisconnectReason, Error, ValidationError};
use crate::matching::MatchKey;
use crate::plan::PathKind;
use crate::segments::Segment;

/// Interval between attempts to connect.
const CONNECT_RECHECK_NS: u64 = 1_000_000;
/// Timeout for the peer's connect after both sides have connected at once.
const CROSSED_TIMEOUT_NS: u64 = 1_000_000_000;

/// A peer that was added by name.
#[derive(Debug)]
pub(super) struct NamedPeer {
    name: String,
    /// Number of times it was added.
    refcount: usize,
    phase: ConnectPhase,
    /// The listener that the last attempt led to.
    listening: Option<ListenerAddress>,
    /// Sends that wait for the connection, in order.
    queued_sends: VecDeque<OperationId>,
    /// Time of the first failed attempt, other than for a full queue of the listener.
    failing_since_ns: Option<u64>,
}

/// State of the connect of this side.
#[derive(Debug)]
enum ConnectPhase {
    /// No message needs the connection yet.
    Idle,
    /// The attempt failed, and is repeated after [`CONNECT_RECHECK_NS`].
    Backoff { since_ns: u64 },
    /// The hello is sent.
    InProgress(PendingConnect),
    /// Both sides have connected at once, and the connect of the peer counts.
    Crossed { since_ns: u64 },
}

impl ConnectPhase {
    fn is_active(&self) -> bool {
        !matches!(self, Self::Idle)
    }
}

impl PeerSlot {
    pub(super) fn added_name(&self) -> Option<&String> {
        self.named.as_ref().map(|known| &known.name)
    }

    /// Removes a send that waits for the connection. Returns whether it was queued.
    pub(super) fn remove_queued_send(&mut self, number: OperationId) -> bool {
        let Some(known) = &mut self.named else { return false };
        let before = known.queued_sends.len();
        known.queued_sends.retain(|waiting| *waiting != number);
        known.queued_sends.len() != before
    }

    /// Whether it is a named peer that is not connected yet.
    pub(super) fn is_unconnected(&self) -> bool {
        self.named.is_some() && self.connection.is_none() && self.disconnect_reason.is_none()
    }

    /// Whether the peer is, or may become, a process of this host other than the one with the name `own`.
    pub(super) fn is_on_this_host(&self, own: &str) -> bool {
        match (&self.connection, &self.named) {
            (Some(connection), _) => !connection.wire.is_self(),
            (None, Some(known)) => self.disconnect_reason.is_none() && known.name != own,
            (None, None) => false,
        }
    }
}

impl PeerTable {
    /// The slot of a named peer.
    pub(super) fn slot_of_name(&self, name: &str) -> Option<usize> {
        let has_name = |slot: &PeerSlot| slot.named.as_ref().is_some_and(|k| k.name == name);
        self.slots.iter().position(has_name)
    }

    /// The slot of a named peer that this side is connecting to, and that has connected to this side under
    /// another name of its socket.
    pub(super) fn slot_connecting_to(&self, caller: &PeerInfo) -> Option<usize> {
        let is_it = |slot: &PeerSlot| {
            let known = slot.named.as_ref().filter(|known| known.phase.is_active());
            let listening = known.and_then(|known| known.listening.as_ref());
            listening
                .is_some_and(|dialed| dialed.matches(&caller.bound_name, caller.id.credentials))
        };
        self.slots.iter().position(is_it)
    }

    /// The sockets of pending connects.
    pub(super) fn connect_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let known = self.slots.iter().filter_map(|slot| slot.named.as_ref());
        known.filter_map(|known| match &known.phase {
            ConnectPhase::InProgress(connecting) => Some(connecting.as_fd()),
            _ => None,
        })
    }
}

impl Port {
    /// Waits until a peer that was added by name is connected, for the connect timeout at most. Returns the
    /// lock. Other peers are connected already, or have been.
    pub(crate) fn connect_named(&self, peer: Peer) -> Result<PortGuard<'_>, Error> {
        let mut state = self.lock();
        let index = state.protocol.peers.index_of(peer)?;
        if state.protocol.peers[index].is_unconnected() && !state.ensure_connected(peer)? {
            let timeout = state.config.connect_timeout;
            let deadline = Instant::now().checked_add(timeout);
            drop(state);
            let connected =
                self.block(true, deadline, |state| match state.ensure_connected(peer) {
                    Ok(false) => None,
                    outcome => Some(outcome),
                });
            state = self.lock();
            let Some(outcome) = connected else {
                let (name, seconds) = (state.protocol.peers.name_of(peer)?, timeout.as_secs());
                return Err(ConnectError::NoReply { name, seconds }.into());
            };
            outcome?;
        }
        Ok(state)
    }
}

impl PortState {
    /// Adds a peer by name, with a slot of its own.
    pub(crate) fn add_peer(&mut self, name: &str) -> Result<Peer, Error> {
        if self.protocol.peers.closed {
            return Err(Error::Closed);
        }
        parse_name(name)?;
        if let Some(index) = self.protocol.peers.slot_of_name(name) {
            self.protocol.peers[index].named.as_mut().expect("it is known").refcount += 1;
            return Ok(self.protocol.peers.peer(index));
        }
        let index = match self.protocol.peers.find_name_or_last(name) {
            Some(peer) => peer.index,
            None => self.protocol.allocate_slot()?,
        };
        let (name, uses) = (name.to_owned(), 1);
        let (call, waiting) = (ConnectPhase::Idle, VecDeque::new());
        let (listening, troubled_since_ns) = (None, None);
        let known = NamedPeer {
            name,
            refcount: uses,
            phase: call,
            listening,
            queued_sends: waiting,
            failing_since_ns: troubled_since_ns,
        };
        self.protocol.peers[index].named = Some(Box::new(known));
        self.protocol.peers.update_oversubscription();
        Ok(self.protocol.peers.peer(index))
    }

    /// Drops one reference to a named peer. The last one removes the name: a connection stays, and queued
    /// sends without a connection fail.
    pub(crate) fn remove_peer(&mut self, peer: Peer) {
        let Ok(index) = self.protocol.peers.index_of(peer) else { return };
        let Some(known) = &mut self.protocol.peers[index].named else {
            return self.protocol.release_remote(index);
        };
        known.refcount -= 1;
        if known.refcount == 0 {
            let name = self.protocol.peers.peer_name(index);
            let error = Error::PeerDisconnected(Disconnect::new(name, DisconnectReason::Closed));
            self.fail_queued_sends(index, &error);
            self.protocol.peers[index].named = None;
            // The slot may be reused.
            if self.protocol.peers[index].connection.is_none() {
                for posted in self.protocol.matches.unpost_source(index) {
                    self.protocol.fail_posted(posted, error.clone());
                }
            }
            self.protocol.peers.update_oversubscription();
        }
    }

    /// Sends to a peer without a connection: by the remote transport, or after a connect.
    #[cold]
    pub(super) fn send_unconnected(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Segment],
        length: u64,
        ending: Option<CompletionOptions>,
    ) -> Result<Started, Error> {
        if !self.protocol.peers.is_reachable(peer) {
            return Err(self.protocol.peers.disconnect_error(peer));
        }
        if !self.protocol.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.protocol.operations.count()).into());
        }
        if let Some(number) = self.protocol.peers[peer].remote_id {
            return Ok(self.protocol.send_remote(peer, number, envelope, pieces, length, ending));
        }
        let path = match length {
            _ if ending.is_some_and(|ending| ending.delivery_complete) => PathKind::Single,
            _ if length <= inline_limit(&envelope) as u64 => PathKind::Inline,
            _ if length <= self.protocol.planner.eager_limit(false) => PathKind::Eager,
            _ => PathKind::Single,
        };
        let sending = self.protocol.new_sending(peer, envelope, pieces, length, path);
        let number = self.protocol.operations.insert(OperationKind::Send(sending), ending);
        self.protocol.peers[peer]
            .named
            .as_mut()
            .expect("it is known")
            .queued_sends
            .push_back(number);
        self.start_connect(peer);
        Ok(Started::Pending(number))
    }

    /// Connects to the named source of a receive, so that its disconnect is detected.
    pub(super) fn connect_source(&mut self, want: &MatchKey) {
        if let Some(peer) = want.source
            && self.protocol.peers[peer].is_unconnected()
        {
            self.start_connect(peer);
        }
    }

    /// Whether a peer is connected; starts a connect if it is not.
    pub(crate) fn ensure_connected(&mut self, peer: Peer) -> Result<bool, Error> {
        let index = self.protocol.peers.index_of(peer)?;
        if self.protocol.peers[index].connection.is_some() {
            return Ok(true);
        }
        if !self.protocol.peers.is_reachable(index)
            || self.protocol.peers[index].remote_id.is_some()
        {
            return Err(self.protocol.peers.disconnect_error(index));
        }
        self.start_connect(index);
        Ok(self.protocol.peers[index].connection.is_some())
    }

    /// Starts a connect to a named peer, if none is in flight.
    fn start_connect(&mut self, peer: usize) {
        let known = self.protocol.peers[peer].named.as_ref().expect("the caller knows it");
        if known.phase.is_active() {
            return;
        }
        let name = known.name.clone();
        if name == self.protocol.peers.name {
            match Connection::to_self(self.protocol.peers.identity, name) {
                Ok(wire) => drop(self.add_connection(wire)),
                Err(error) => {
                    let error = ConnectError::system("making shared memory")(error);
                    self.fail_queued_sends(peer, &error.into());
                }
            }
            return;
        }
        self.protocol.peers.connects_in_flight += 1;
        self.protocol.peers[peer].named.as_mut().expect("it is known").phase =
            ConnectPhase::Backoff { since_ns: 0 };
        self.try_connect(peer);
    }

    fn try_connect(&mut self, peer: usize) {
        self.stop_connecting_peer(peer);
        let started = self.send_connect_request(peer);
        let known = self.protocol.peers[peer].named.as_mut().expect("it was there above");
        match started {
            Ok(connecting) => {
                self.wakeup.watch(connecting.as_fd());
                known.phase = ConnectPhase::InProgress(connecting.without_timeout());
            }
            Err(error) => self.schedule_reconnect(peer, &error),
        }
    }

    fn send_connect_request(&mut self, peer: usize) -> Result<PendingConnect, Error> {
        let known = self.protocol.peers[peer].named.as_ref().expect("the caller knows it");
        let (name, socket_name) = (known.name.clone(), parse_name(&known.name)?);
        let dialed = ConnectedSocket::connect(&socket_name, &self.config.allowed, Duration::ZERO)?;
        if self.find_by_listener(&dialed.listener, &name)?.is_some() {
            return Err(ConnectError::DuplicatePeer(name).into());
        }
        // A connect of this peer to this side is recognised as crossed from now on.
        self.protocol.peers.connecting_to.push(dialed.listener.clone());
        let known = self.protocol.peers[peer].named.as_mut().expect("it was there above");
        known.listening = Some(dialed.listener.clone());
        let board = self.windows.table().map_err(ConnectError::system("making shared memory"))?;
        let (own, identity) = (&self.protocol.peers.name, self.protocol.peers.identity);
        Ok(PendingConnect::start(dialed, identity, own, board.as_fd(), Duration::ZERO)?)
    }

    /// Ends the attempt to connect to a named peer.
    fn stop_connecting_peer(&mut self, peer: usize) {
        let known = self.protocol.peers[peer].named.as_mut();
        if let Some(listening) = known.and_then(|known| known.listening.take()) {
            self.protocol.peers.stop_connecting(&listening);
        }
    }

    /// Repeats a failed attempt later, unless there is no listener or the failure is final.
    fn schedule_reconnect(&mut self, peer: usize, error: &Error) {
        use ConnectError::{NoReply, Rejected, System};
        let known = self.protocol.peers[peer].named.as_mut().expect("it was called");
        let now = clock::now_ns();
        let is_troubled = matches!(error, Error::Connect(Rejected(..) | System { .. }));
        let since = *known.failing_since_ns.get_or_insert(now);
        let patience = self.config.connect_timeout.as_nanos() as u64;
        if matches!(error, Error::Connect(NoReply { .. })) {
            known.failing_since_ns = None;
        } else if !is_troubled || now - since > patience {
            return self.connect_failed(peer, error);
        }
        known.phase = ConnectPhase::Backoff { since_ns: now };
    }

    /// Polls connects in flight. Returns whether any ended.
    #[cold]
    pub(super) fn poll_connects(&mut self) -> bool {
        let before = self.protocol.peers.connects_in_flight;
        for peer in 0..self.protocol.peers.len() {
            let Some(known) = &mut self.protocol.peers[peer].named else { continue };
            match std::mem::replace(&mut known.phase, ConnectPhase::Backoff { since_ns: 0 }) {
                ConnectPhase::Idle => known.phase = ConnectPhase::Idle,
                ConnectPhase::Backoff { since_ns }
                    if clock::now_ns() - since_ns < CONNECT_RECHECK_NS =>
                {
                    known.phase = ConnectPhase::Backoff { since_ns };
                }
                ConnectPhase::Backoff { .. } => self.try_connect(peer),
                ConnectPhase::Crossed { since_ns }
                    if clock::now_ns() - since_ns < CROSSED_TIMEOUT_NS =>
                {
                    known.phase = ConnectPhase::Crossed { since_ns };
                }
                // The peer's connect did not arrive within the timeout. The peer may have exited, which
                // another connect detects.
                ConnectPhase::Crossed { .. } => self.try_connect(peer),
                ConnectPhase::InProgress(connecting) => {
                    let mut waiting = Some(connecting);
                    match PendingConnect::poll(&mut waiting, self.config.cross_memory) {
                        Ok(ConnectStatus::Connected(met)) => drop(self.add_parts(*met)),
                        // The peer's own connect arrives in this slot, unless it has arrived in another one
                        // before.
                        Ok(ConnectStatus::Crossed(id))
                            if self.protocol.peers.find_id(id).is_none() =>
                        {
                            let known =
                                self.protocol.peers[peer].named.as_mut().expect("it was called");
                            known.phase = ConnectPhase::Crossed { since_ns: clock::now_ns() };
                        }
                        Ok(ConnectStatus::Crossed(_)) => {
                            let name =
                                self.protocol.peers[peer].added_name().cloned().unwrap_or_default();
                            self.connect_failed(peer, &ConnectError::DuplicatePeer(name).into());
                        }
                        Ok(ConnectStatus::Pending) => {
                            let known =
                                self.protocol.peers[peer].named.as_mut().expect("it was called");
                            known.phase = ConnectPhase::InProgress(waiting.expect("it waits"));
                        }
                        Err(error) => self.schedule_reconnect(peer, &error.into()),
                    }
                }
            }
        }
        self.protocol.peers.connects_in_flight != before
    }

    /// Handles a named peer that cannot be reached: its queued sends and posted receives fail.
    fn connect_failed(&mut self, peer: usize, error: &Error) {
        tracing::debug!(peer, %error, "a peer cannot be reached");
        let error = match error {
            Error::Connect(ConnectError::NoListener(_)) => {
                let name = self.protocol.peers.peer_name(peer);
                Error::PeerDisconnected(Disconnect::new(name, DisconnectReason::Exited))
            }
            error => error.clone(),
        };
        self.end_connect(peer);
        self.protocol.peers[peer].disconnect_reason = Some(DisconnectReason::Exited);
        self.mark_changed();
        self.fail_queued_sends(peer, &error);
        for posted in self.protocol.matches.unpost_source(peer) {
            self.protocol.fail_posted(posted, error.clone());
        }
        self.protocol.peers.update_oversubscription();
    }

    /// Fails all sends that wait for a connection.
    fn fail_queued_sends(&mut self, peer: usize, error: &Error) {
        self.end_connect(peer);
        let Some(known) = &mut self.protocol.peers[peer].named else { return };
        for number in std::mem::take(&mut known.queued_sends) {
            self.protocol.operations.finish(number, Err(error.clone()));
        }
    }

    /// Ends a connect, successful or not.
    fn end_connect(&mut self, peer: usize) {
        let Some(known) = &mut self.protocol.peers[peer].named else { return };
        let phase = std::mem::replace(&mut known.phase, ConnectPhase::Idle);
        if let ConnectPhase::InProgress(connecting) = &phase {
            self.wakeup.unwatch(connecting.as_fd());
        }
        if phase.is_active() {
            self.protocol.peers.connects_in_flight -= 1;
            self.stop_connecting_peer(peer);
        }
    }

    /// Starts the queued sends of a named peer that is now connected.
    pub(super) fn start_queued_sends(&mut self, peer: usize) {
        self.end_connect(peer);
        let Some(known) = &mut self.protocol.peers[peer].named else { return };
        let waiting = std::mem::take(&mut known.queued_sends);
        if !waiting.is_empty() {
            self.protocol.peers.connection(peer).send_queue = waiting;
            self.progress_peer(peer, ProgressScope::ControlOnly, Drain::All);
        }
    }
}
