//! The disconnect of a peer: its messages are delivered in order, up to the first one that is not complete.
//!
//! All messages of a peer form one stream, in order of arrival, whatever their tags. The first one that is
//! not complete at the disconnect cuts the stream: it is lost, and so are all later ones that have not been
//! received. `docs/design/message-ends.md` has the contract.

use super::operations::{DeferredAction, OperationKind};
use super::peer_table::ConnectedPeer;
use super::progress::Drain;
use super::protocol::Protocol;
use super::{PortState, UnexpectedPayload};
use crate::connection::Connection;
use crate::control::ControlMessage;
use crate::error::{DisconnectReason, Error};
use crate::path::{ReceiveStage, Receiving};
use crate::ring::cells::ProtocolError;

/// The arrival number of a stream that is not cut.
const NOTHING_LOST: u64 = u64::MAX;

impl PortState {
    /// Disconnects a peer that has exited or aborts its messages, after processing what it wrote before. All
    /// of that is in the ring already, and one pass processes as much as a ring holds.
    #[cold]
    pub(super) fn drain_and_disconnect(&mut self, peer: usize) {
        if self.protocol.peers[peer].connection.is_none() {
            return;
        }
        let gone = match self.drain_ring(peer, Drain::All) {
            Ok((_, true)) => DisconnectReason::Closed,
            Ok((_, false)) if self.protocol.peers.wire(peer).memory.is_peer_closed() => {
                DisconnectReason::Closed
            }
            Ok((_, false)) => DisconnectReason::Exited,
            Err(ProtocolError(what)) => DisconnectReason::ProtocolViolation(what),
        };
        self.disconnect(peer, gone);
    }

    /// Disconnects a peer, of this host or of another one. All operations that need it complete. Only this
    /// function ends connections; a port that closes calls it for every peer.
    pub(super) fn disconnect(&mut self, peer: usize, reason: DisconnectReason) {
        let Self { protocol, windows, wakeup, .. } = self;
        let is_closing = protocol.peers.closed;
        let slot = &protocol.peers[peer];
        if slot.connection.is_none() && slot.remote_id.is_none() {
            return;
        }
        if !is_closing {
            tracing::debug!(peer, ?reason, "lost a peer");
            self.counters.lost_peers.add(1);
            // Probes and waits for windows end because of this change, and no completion reports it.
            wakeup.progress_count += 1;
            protocol.changed = true;
        }
        if let Some(mut connection) = protocol.disconnect(peer, &reason) {
            let wire = &mut connection.wire;
            // After this side has closed, an access reports the peer as exited and not as closed.
            let seen = if is_closing { DisconnectReason::Exited } else { reason.clone() };
            protocol.operations.deferred.extend(windows.detach(wire, seen));
            if is_closing {
                wire.send_control(ControlMessage::Close);
                wire.ring_doorbell();
            }
            wire.shutdown();
            wakeup.unwatch_connection(wire, protocol.peers.connected);
            let stale = wire.stale_socket(&reason).map(DeferredAction::RemoveSocketFile);
            protocol.operations.deferred.extend(stale);
        }
        // A port that closes has no more waits to tune.
        if !is_closing {
            protocol.peers.update_oversubscription();
        }
        self.publish_gauges();
    }
}

impl Protocol {
    /// Disconnects a peer and completes the operations that need it. Returns the connection, which is marked
    /// as closed, for the other parts of the port.
    fn disconnect(&mut self, peer: usize, reason: &DisconnectReason) -> Option<Box<ConnectedPeer>> {
        let is_closing = self.peers.closed;
        let slot = &mut self.peers[peer];
        slot.disconnect_reason = Some(reason.clone());
        slot.ended_connections += 1;
        slot.old_service_count += std::mem::take(&mut slot.service_count);
        let mut connection = slot.connection.take();
        if connection.is_some() {
            self.peers.connected -= 1;
            self.peers.remove_polled(peer);
        }
        let slot = &mut self.peers[peer];
        if let Some(ConnectedPeer { wire, .. }) = connection.as_deref_mut() {
            wire.memory.mark_closed();
            if !is_closing {
                slot.last_peer = Some((wire.peer.id, wire.peer.name.clone()));
            }
        }
        let wire = connection.as_deref_mut().map(|connection| &mut connection.wire);
        if is_closing {
            // The other operations complete when the port has disconnected all its peers.
            self.abort_operations(peer, wire, &Error::Closed, uses_memory);
            return connection;
        }
        let error = self.peers.disconnect_error(peer);
        let first_lost = self.first_lost(peer);
        self.fail_receives_after(peer, first_lost, &error);
        self.abort_operations(peer, wire, &error, |_| true);
        for posted in self.matches.unpost_source(peer) {
            self.fail_posted(posted, error.clone());
        }
        self.drop_lost_unexpected(peer, first_lost);
        let slot = &self.peers[peer];
        if slot.remote_id.is_some() && slot.remote_uses == 0 {
            self.free_unused_remote();
        }
        connection
    }

    /// Completes operations with a peer that `choose` selects. Posted receives are not among them.
    fn abort_operations(
        &mut self,
        peer: usize,
        mut wire: Option<&mut Connection>,
        error: &Error,
        choose: impl Fn(&OperationKind) -> bool,
    ) {
        let belongs = |kind: &OperationKind| match kind {
            OperationKind::Send(sending) => sending.peer == peer,
            OperationKind::Receive(receiving) => {
                receiving.peer == peer && !matches!(receiving.stage, ReceiveStage::Posted)
            }
            OperationKind::RemoteRma { peer: to, .. } => *to == peer,
            OperationKind::Rma(_) | OperationKind::MultiReceive(_) => false,
        };
        for number in self.operations.pending_ids(|kind| belongs(kind) && choose(kind)) {
            self.abort_operation(number, wire.as_deref_mut(), error);
        }
    }

    /// The arrival number at which the stream of a peer would be cut by a disconnect now.
    pub(super) fn first_lost(&mut self, peer: usize) -> u64 {
        let is_incomplete = |deed: &OperationKind| matches!(deed, OperationKind::Receive(receiving) if receiving.peer == peer && receiving.is_incomplete());
        let receives = self.operations.pending_ids(is_incomplete);
        let receives = receives.into_iter().filter_map(|number| {
            self.operations.receiving(number).map(|receiving| receiving.arrival)
        });
        let first = receives.min().unwrap_or(NOTHING_LOST);
        // A lost message belongs to an earlier peer of this slot.
        let is_cut = |kept: &UnexpectedPayload| {
            !kept.is_complete() && !matches!(kept, UnexpectedPayload::Lost)
        };
        let mut kept = self.matches.iter().filter(|kept| kept.source == peer);
        let kept =
            kept.find(|kept| is_cut(&kept.message)).map_or(NOTHING_LOST, |kept| kept.arrival);
        let noted = self.peers[peer].lost_arrival.unwrap_or(NOTHING_LOST);
        first.min(kept).min(noted)
    }

    /// Fails receives that have all their bytes, but whose message is later than a lost one. The caller
    /// handles receives that lack bytes.
    pub(super) fn fail_receives_after(&mut self, peer: usize, first_lost: u64, error: &Error) {
        let is_behind = |deed: &OperationKind| {
            matches!(deed, OperationKind::Receive(receiving) if receiving.peer == peer
                && receiving.arrival > first_lost
                && matches!(receiving.stage, ReceiveStage::FinPending { .. }))
        };
        for number in self.operations.pending_ids(is_behind) {
            self.operations.finish(number, Err(error.clone()));
        }
    }

    /// Drops buffered messages of a disconnected peer from the first lost one on. Earlier ones are complete
    /// and can still be received. A claimed message is replaced by a mark: its receive fails.
    pub(super) fn drop_lost_unexpected(&mut self, peer: usize, first_lost: u64) {
        let slot = &mut self.peers[peer];
        slot.lost_arrival = None;
        self.matches.retain(|unexpected| {
            if unexpected.source != peer || unexpected.arrival < first_lost {
                return true;
            }
            slot.unexpected_count -= unexpected.message.weight();
            slot.unexpected_bytes -= unexpected.message.bytes();
            *unexpected.message = UnexpectedPayload::Lost;
            unexpected.is_claimed
        });
    }
}

/// Whether a peer or a thread of this process may be accessing the memory of a matched operation.
fn uses_memory(kind: &OperationKind) -> bool {
    match kind {
        OperationKind::Receive(_) => true,
        OperationKind::Send(sending) => sending.active_copy.is_some(),
        _ => false,
    }
}

impl Receiving {
    /// Whether the receive is matched and bytes of its message have not arrived.
    fn is_incomplete(&self) -> bool {
        use ReceiveStage::{FinPending, Posted, Quiescing};
        !matches!(self.stage, Posted | FinPending { .. } | Quiescing(_))
    }
}
