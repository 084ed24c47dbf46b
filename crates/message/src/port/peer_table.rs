//! The peers of a port: one slot each, the listener, pending connects, and the transport to other hosts. What
//! the table needs of other parts is a parameter; the table itself does not act on messages.

use std::collections::VecDeque;
use std::io;
use std::ops::{Index, IndexMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use memferry_sys::epoll::Readiness;

use super::config::PortConfig;
use super::named_peers::NamedPeer;
use super::planner::CoreBudget;
use super::poll_set::HintState;
use super::protocol::Protocol;
use super::remote::RemoteState;
use super::sender_help::SenderHelp;
use super::service::PartialService;
use super::{MessageStatus, Peer, SEGMENTS_PER_WEIGHT};
use crate::connect::handshake::EndpointUuid;
use crate::connect::listener::Listener;
use crate::connect::{EndpointId, ListenerAddress};
use crate::connection::Connection;
use crate::control::OperationId;
use crate::envelope::MatchSpec;
use crate::error::{ConnectError, Disconnect, DisconnectReason, Error, ValidationError};
use crate::matching::{MatchKey, UnexpectedRef};
use crate::path::ActiveCopy;
use crate::ring::backpressure::{NO_EAGER, NO_RTS};
use crate::ring::cells::ProtocolError;
use crate::ring::layout::{BOUNCE_BYTES, MAX_UNREAD_CELLS};
use crate::segments::MAX_SEGMENTS;

/// Maximum weight of one message.
const MAX_WEIGHT: usize = 1 + MAX_SEGMENTS / SEGMENTS_PER_WEIGHT;

/// Destination of the next unsolicited fragments of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reassembly {
    None,
    /// The memory of a receive.
    Receive(OperationId),
    /// A buffered message.
    Unexpected(UnexpectedRef),
    /// A request to the layer above the port.
    Service,
}

/// A connection and the operations that use it.
#[derive(Debug)]
pub(super) struct ConnectedPeer {
    pub(super) wire: Connection,
    /// Sends that are not yet entirely in the ring, in order.
    pub(super) send_queue: VecDeque<OperationId>,
    /// Messages of this side that wait for the peer to fetch them.
    pub(super) pending_rts: usize,
    /// The peer had no space for unexpected messages, and small messages that were announced for that reason
    /// are still in flight.
    pub(super) eager_blocked: bool,
    /// Receives that have all their bytes and must notify their sender before they complete.
    pub(super) pending_fins: usize,
    /// Operations with steps to do: claims to make, fragments to send.
    pub(super) active: VecDeque<OperationId>,
    /// Some active operations are new, or the last pass made progress with them and left some incomplete.
    pub(super) has_runnable: bool,
    pub(super) reassembly: Reassembly,
    /// The request of which fragments arrive.
    pub(super) partial_service: Option<Box<PartialService>>,
    /// A message was lost: the connection ends before a later message can overtake it.
    pub(super) disconnect_pending: bool,
    /// Copy, by a thread of its own, of a message of the peer whose memory may never become resident.
    pub(super) slow_copy: Option<Arc<ActiveCopy>>,
    /// A message to the peer that a thread of its own copies into memory that may never become resident.
    pub(super) slow_sender_copy: Option<OperationId>,
    /// The connection is in [`PeerTable::polled`], and has had no work for this many passes.
    pub(super) is_polled: bool,
    pub(super) quiet_polls: u32,
    pub(super) hint_state: HintState,
    pub(super) sender_help: SenderHelp,
}

impl ConnectedPeer {
    pub(super) fn new(wire: Connection) -> Self {
        Self {
            wire,
            send_queue: VecDeque::new(),
            pending_rts: 0,
            active: VecDeque::new(),
            has_runnable: false,
            eager_blocked: false,
            pending_fins: 0,
            reassembly: Reassembly::None,
            partial_service: None,
            disconnect_pending: false,
            slow_copy: None,
            slow_sender_copy: None,
            is_polled: false,
            quiet_polls: 0,
            hint_state: HintState::None,
            sender_help: SenderHelp::new(),
        }
    }

    /// Whether payloads may be sent without a request. A message that is sent so completes at once. Earlier
    /// messages that had to be announced must be complete too: a receiver that waits for the last of many
    /// small messages expects to have them all.
    #[inline]
    pub(super) fn accepts_eager(&mut self) -> bool {
        if self.eager_blocked && self.pending_rts == 0 && self.send_queue.is_empty() {
            self.eager_blocked = false;
        }
        self.eager_blocked |= !self.wire.accepts_eager();
        !self.eager_blocked
    }

    /// Whether the peer has written to its ring, or has freed space that this side waits for.
    pub(super) fn is_ready(&self) -> bool {
        let wants_space =
            !self.send_queue.is_empty() || self.wire.has_pending_control() || self.pending_fins > 0;
        self.wire.consumer.is_ready() || (wants_space && self.wire.has_new_credit())
    }
}

/// The slot of a peer.
#[derive(Debug, Default)]
pub(crate) struct PeerSlot {
    pub(super) generation: u32,
    pub(super) connection: Option<Box<ConnectedPeer>>,
    /// Why the last connection of this slot ended, and the endpoint that it led to.
    pub(super) disconnect_reason: Option<DisconnectReason>,
    pub(super) last_peer: Option<(EndpointId, String)>,
    /// The first arrival that was lost before the disconnect was detected.
    pub(super) lost_arrival: Option<u64>,
    /// Payload bytes and number of buffered messages from the peer. Both may outlive the connection.
    pub(super) unexpected_bytes: usize,
    pub(super) unexpected_count: usize,
    /// The name by which the application added the peer, which reserves the slot.
    pub(super) named: Option<Box<NamedPeer>>,
    /// The remote transport's number for a peer on another host, and the number of references to the peer by
    /// that number.
    pub(super) remote_id: Option<u64>,
    pub(super) remote_uses: usize,
    /// A receive or probe has named this peer since the remote transport was last notified of awaited peers.
    pub(super) is_awaited: bool,
    /// Requests that the layer above the port has not ended: of this connection, and of earlier ones.
    pub(super) service_count: usize,
    pub(super) old_service_count: usize,
    /// Number of connections of this slot that have ended.
    pub(super) ended_connections: u64,
}

impl PeerSlot {
    /// The socket and the pidfd of the connection.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.connection.iter().flat_map(|connection| connection.wire.descriptors())
    }

    /// Adds the descriptors of the connection that tell of its end, by `add`.
    pub(super) fn watch_end(
        &self,
        add: impl Fn(BorrowedFd<'_>, Readiness) -> io::Result<()>,
    ) -> io::Result<()> {
        // The socket has packets in it while the peer is alive, the pidfd is readable after its end.
        let ways = [Readiness::HungUp, Readiness::Readable];
        self.descriptors()
            .zip(ways)
            .try_for_each(|(descriptor, readiness)| add(descriptor, readiness))
    }

    /// Whether the slot is reserved for a peer that was added by name or by a remote transport's number.
    pub(super) fn is_expected(&self) -> bool {
        self.named.is_some() || self.remote_id.is_some()
    }
}

/// All peers of a port.
#[derive(Debug)]
pub(crate) struct PeerTable {
    pub(super) slots: Vec<PeerSlot>,
    /// Slots of the connections whose rings are polled, in order.
    pub(super) polled: Vec<usize>,
    /// Number of connections.
    pub(super) connected: usize,
    pub(super) port_id: u64,
    /// The port is closed: handles of peers are no longer valid.
    pub(super) closed: bool,
    /// Limits of the configuration: peers, and buffered messages of one peer.
    pub(super) max_peers: usize,
    pub(super) max_unexpected_bytes: usize,
    pub(super) max_unexpected_messages: usize,
    pub(super) identity: EndpointUuid,
    pub(super) name: String,
    pub(super) listener: Option<Listener>,
    /// Listeners that blocking connects of this side are connecting to.
    pub(super) connecting_to: Vec<ListenerAddress>,
    /// Number of connects to named peers in flight.
    pub(super) connects_in_flight: usize,
    /// Number of named peers without a connection.
    pub(super) unconnected: usize,
    pub(super) last_accept_poll_ns: u64,
    pub(super) last_liveness_check_ns: u64,
    pub(super) remote: RemoteState,
    /// Number of cores that this process may run on.
    pub(super) allowed_cores: usize,
    /// Number of processes on this host: this one and its peers.
    pub(super) processes: usize,
    /// They are more than cores.
    pub(super) is_oversubscribed: bool,
}

impl Index<usize> for PeerTable {
    type Output = PeerSlot;

    #[inline]
    fn index(&self, peer: usize) -> &PeerSlot {
        &self.slots[peer]
    }
}

impl IndexMut<usize> for PeerTable {
    #[inline]
    fn index_mut(&mut self, peer: usize) -> &mut PeerSlot {
        &mut self.slots[peer]
    }
}

impl PeerTable {
    pub(super) fn new(
        port_id: u64,
        config: &PortConfig,
        name: String,
        listener: Option<Listener>,
    ) -> Self {
        Self {
            slots: Vec::new(),
            polled: Vec::new(),
            connected: 0,
            port_id,
            closed: false,
            max_peers: config.max_peers,
            max_unexpected_bytes: config.max_unexpected_bytes,
            max_unexpected_messages: config.max_unexpected_messages,
            identity: EndpointUuid::random(),
            name,
            listener,
            connecting_to: Vec::new(),
            connects_in_flight: 0,
            unconnected: 0,
            last_accept_poll_ns: 0,
            last_liveness_check_ns: 0,
            remote: RemoteState::default(),
            allowed_cores: memferry_sys::affinity::allowed_cores().len(),
            processes: 1,
            is_oversubscribed: false,
        }
    }

    /// Number of slots, used and unused.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(super) fn iter(&self) -> std::slice::Iter<'_, PeerSlot> {
        self.slots.iter()
    }

    #[inline]
    pub(super) fn iter_mut(&mut self) -> std::slice::IterMut<'_, PeerSlot> {
        self.slots.iter_mut()
    }

    /// The live connections.
    pub(super) fn connections(&self) -> impl Iterator<Item = &ConnectedPeer> {
        self.slots.iter().filter_map(|slot| slot.connection.as_deref())
    }

    pub(super) fn connections_mut(&mut self) -> impl Iterator<Item = &mut ConnectedPeer> {
        self.slots.iter_mut().filter_map(|slot| slot.connection.as_deref_mut())
    }

    /// The slot of a peer, if the peer belongs to this port and still has the slot.
    #[inline]
    pub(crate) fn index_of(&self, peer: Peer) -> Result<usize, Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        let slot = self.slots.get(peer.index).filter(|_| peer.port_id == self.port_id);
        let slot = slot.ok_or(ValidationError::UnknownPeer)?;
        if slot.generation != peer.generation {
            // Another peer has the slot by now.
            return Err(Error::PeerDisconnected(DisconnectReason::Exited.into()));
        }
        Ok(peer.index)
    }

    /// The matching criteria of a receive, with the peer's slot.
    #[inline]
    pub(super) fn match_key(&self, wanted: &MatchSpec) -> Result<MatchKey, Error> {
        let source = wanted.from.peer().map(|peer| self.index_of(peer)).transpose()?;
        if self.closed {
            return Err(Error::Closed);
        }
        Ok(MatchKey { space: wanted.space, source, tag: wanted.tag, mask: wanted.mask })
    }

    /// Returns an error if the peer that a receive names can send no more messages.
    pub(super) fn check_source(&self, want: &MatchKey) -> Result<(), Error> {
        match want.source {
            Some(peer) if !self.is_reachable(peer) => Err(self.disconnect_error(peer)),
            _ => Ok(()),
        }
    }

    /// The connection of a peer that the caller knows to be connected.
    #[inline]
    pub(super) fn connection(&mut self, peer: usize) -> &mut ConnectedPeer {
        self.slots[peer].connection.as_mut().expect("the peer is connected")
    }

    #[inline]
    pub(super) fn wire(&mut self, peer: usize) -> &mut Connection {
        &mut self.connection(peer).wire
    }

    /// The handle of the peer in a slot.
    pub(super) fn peer(&self, index: usize) -> Peer {
        Peer { index, generation: self.slots[index].generation, port_id: self.port_id }
    }

    #[inline]
    pub(super) fn message_status(&self, peer: usize, tag: u64, length: u64) -> MessageStatus {
        MessageStatus { source: self.peer(peer), tag, length }
    }

    /// Counts the processes on this host: this one and its peers.
    fn count_processes(&self) -> usize {
        1 + self.slots.iter().filter(|slot| slot.is_on_this_host(&self.name)).count()
    }

    /// Whether a peer is connected, or may still be.
    pub(crate) fn is_reachable(&self, peer: usize) -> bool {
        let slot = &self.slots[peer];
        slot.connection.is_some() || (slot.is_expected() && slot.disconnect_reason.is_none())
    }

    /// The error of operations with a disconnected peer.
    pub(super) fn disconnect_error(&self, peer: usize) -> Error {
        let reason = self.slots[peer].disconnect_reason.clone().unwrap_or(DisconnectReason::Exited);
        Error::PeerDisconnected(Disconnect::new(self.peer_name(peer), reason))
    }

    /// Accounts for a message of a peer that is about to be buffered. Accepts, beyond the limit, only what
    /// the peer can have sent before it could see the backpressure.
    pub(super) fn reserve_unexpected(
        &mut self,
        peer: usize,
        weight: usize,
        bytes: usize,
    ) -> Result<(), ProtocolError> {
        let slot = &mut self.slots[peer];
        let (count, bytes) = (slot.unexpected_count + weight, slot.unexpected_bytes + bytes);
        // The remote transport bounds its messages by the credit that it has.
        let is_bounded = slot.remote_id.is_none();
        if is_bounded
            && (count
                > self.max_unexpected_messages.saturating_add(2 * MAX_UNREAD_CELLS * MAX_WEIGHT)
                || bytes > self.max_unexpected_bytes.saturating_add(2 * BOUNCE_BYTES))
        {
            return Err(ProtocolError("messages beyond what there is room for"));
        }
        (slot.unexpected_count, slot.unexpected_bytes) = (count, bytes);
        self.update_backpressure(peer);
        Ok(())
    }

    /// Frees the space of buffered messages of a peer.
    pub(super) fn release_unexpected(&mut self, peer: usize, count: usize, bytes: usize) {
        self.slots[peer].unexpected_count -= count;
        self.slots[peer].unexpected_bytes -= bytes;
        self.update_backpressure(peer);
    }

    /// Publishes backpressure to a peer. A limit counts as reached until use falls below three quarters of
    /// it.
    pub(super) fn update_backpressure(&mut self, peer: usize) {
        let PeerSlot { unexpected_bytes, unexpected_count, connection, .. } = &mut self.slots[peer];
        let Some(connection) = connection else { return };
        let said = connection.wire.backpressure();
        let level = |used: usize, most: usize, what: u32| match used {
            _ if used >= most.max(1) => what,
            _ if used > most / 4 * 3 => said & what,
            _ => 0,
        };
        let now = level(*unexpected_bytes, self.max_unexpected_bytes, NO_EAGER)
            | level(*unexpected_count, self.max_unexpected_messages, NO_RTS);
        if now != said {
            connection.wire.set_backpressure(now);
        }
    }

    /// Records a lost message of a peer that is still connected: no later message may overtake it.
    pub(super) fn mark_lost(&mut self, peer: usize, arrival: u64) {
        let lost = &mut self.slots[peer].lost_arrival;
        *lost = Some(lost.map_or(arrival, |before| before.min(arrival)));
    }

    /// Updates whether this process and its peers share cores. A process that is bound to a single core is
    /// assumed to own it: its peers are then bound to other cores.
    pub(super) fn update_oversubscription(&mut self) {
        self.unconnected = self.slots.iter().filter(|slot| slot.is_unconnected()).count();
        let processes = self.count_processes();
        self.processes = processes;
        let confined = self.allowed_cores > 1 && processes > self.allowed_cores;
        self.is_oversubscribed = confined || processes > super::config::online_cores();
    }

    /// Whether any operation has steps to do on this side.
    pub(super) fn has_active(&self) -> bool {
        self.polled_connections().any(|connection| !connection.active.is_empty())
    }

    /// Whether operations can make progress: some are new, or the last pass left some incomplete.
    pub(super) fn has_runnable(&self) -> bool {
        self.polled_connections().any(|connection| connection.has_runnable)
    }

    /// Whether a thread that unlocks the port to copy one message leaves others that can make progress.
    pub(super) fn leaves_runnable(&self) -> bool {
        let (mut stepping, mut active) = (false, 0);
        self.polled_connections().for_each(|connection| {
            stepping |= connection.has_runnable;
            active += connection.active.len();
        });
        stepping && active > 1
    }

    /// Whether this is a link whose peer is disconnected.
    pub(super) fn is_peer_disconnected(&self) -> bool {
        self.listener.is_none() && !self.slots.is_empty() && self.connected == 0
    }

    pub(super) fn core_budget(&self) -> CoreBudget {
        let online = super::config::online_cores().saturating_sub(self.processes);
        // Worker threads of the copy engines run on the cores of this process.
        let spare = online.min(self.allowed_cores.saturating_sub(1));
        CoreBudget { spare, oversubscribed: self.is_oversubscribed }
    }

    /// Number of cores that neither this process nor its peers need.
    pub(super) fn spare_cores(&self) -> usize {
        self.core_budget().spare
    }

    /// Whether other processes can connect to this port.
    pub(crate) fn accepts_connections(&self) -> bool {
        self.listener.is_some()
    }

    /// The error of a wait for any peer, if no other process is connected.
    pub(crate) fn last_disconnect(&self) -> Option<Error> {
        if self.connections().any(|connection| !connection.wire.is_self()) {
            return None;
        }
        let last = self.slots.iter().position(|slot| slot.disconnect_reason.is_some());
        let unknown = || Error::PeerDisconnected(DisconnectReason::Exited.into());
        Some(last.map_or_else(unknown, |peer| self.disconnect_error(peer)))
    }
}

impl Protocol {
    /// A slot for one more peer: an unused one, or the next.
    pub(super) fn free_slot(&self) -> Option<usize> {
        let is_free = |slot: &PeerSlot| {
            slot.connection.is_none() && slot.unexpected_count == 0 && !slot.is_expected()
        };
        // Completion entries name slots.
        let is_told_of =
            |index| self.operations.completions.iter().any(|report| report.peer_index == index);
        let mut places = self.peers.iter().enumerate();
        let used = places.find(|(index, slot)| is_free(slot) && !is_told_of(*index));
        let used = used.map(|(index, _)| index);
        used.or_else(|| (self.peers.len() < self.peers.max_peers).then_some(self.peers.len()))
    }

    /// Allocates a slot for a peer without a connection.
    pub(super) fn allocate_slot(&mut self) -> Result<usize, ConnectError> {
        let mut index = self.free_slot();
        if index.is_none_or(|index| index == self.peers.len()) && self.free_unused_remote() {
            index = self.free_slot();
        }
        let index = index.ok_or(ConnectError::TooManyPeers(self.peers.len()))?;
        if index == self.peers.len() {
            self.peers.slots.push(PeerSlot::default());
        }
        let slot = &mut self.peers[index];
        slot.generation = slot.generation.wrapping_add(1);
        (slot.disconnect_reason, slot.last_peer, slot.lost_arrival) = (None, None, None);
        (slot.service_count, slot.old_service_count) = (0, 0);
        Ok(index)
    }
}
