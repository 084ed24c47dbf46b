//! Peers on other hosts. Messages of the remote transport are matched like those of local peers.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use memferry_sys::stats::Block;
use memferry_sys::stats::kinds::{PeerCounters, REMOTE_PATH};

use super::operations::OperationKind;
use super::peer_table::{PeerSlot, PeerTable};
use super::protocol::Protocol;
use super::submit::Started;
use super::{Peer, PortState, UnexpectedPayload};
use crate::completion::{CompletionKind, CompletionOptions};
use crate::control::OperationId;
use crate::envelope::{Envelope, MatchSpace};
use crate::error::{Disconnect, DisconnectReason, Error, ValidationError};
use crate::matching::MatchKey;
use crate::path::{ReceiveStage, SendStage};
use crate::plan::PathKind;
use crate::remote_transport::{RemoteEvent, RemoteRma, RemoteRmaOp, RemoteTransport};
use crate::ring::cells::ProtocolError;
use crate::segments::{Segment, scatter};

/// Passes between two polls of the transport, which are system calls and take as long as hundreds of passes.
const POLLS_BETWEEN: u32 = 32;
/// Consecutive polls of the transport after its last event.
const POLLS_AFTER_EVENT: u32 = 64;

/// The remote transport of a port.
#[derive(Debug, Default)]
pub(super) struct RemoteState {
    transport: Option<Box<dyn RemoteTransport>>,
    /// No peer on another host is expected.
    is_unexpected: bool,
    /// Slots of its peers.
    slots: HashMap<u64, usize>,
    events: Vec<RemoteEvent>,
    /// Passes until the next poll of the transport, and polls that follow each other without a pause.
    skipped_polls: u32,
    eager_polls: u32,
    /// What was sent to and received from its peers.
    counters: HashMap<u64, Block<PeerCounters>>,
}

impl RemoteState {
    /// Whether the port has a transport with peers, or one that expects peers. A thread that sleeps watches
    /// such a transport. The liveness check finds the first message of a peer that is not expected.
    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.transport.is_some() && !(self.is_unexpected && self.slots.is_empty())
    }

    /// Whether the transport has peers.
    #[inline]
    pub(super) fn has_slots(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Whether a poll is due. A transport without peers is polled by the liveness check only.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        self.skipped_polls = self.skipped_polls.saturating_sub(1);
        self.eager_polls > 0 || self.skipped_polls == 0
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.transport.as_ref().and_then(|carrier| carrier.descriptor())
    }

    pub(super) fn drop_transport(&mut self) {
        self.transport = None;
    }
}

impl PeerTable {
    /// The transport's number for a peer.
    pub(crate) fn remote_id(&self, peer: Peer) -> Option<u64> {
        self.index_of(peer).ok().and_then(|index| self.slots[index].remote_id)
    }

    /// Returns the credit of a buffered message that was received.
    pub(super) fn return_remote_credit(&mut self, peer: usize, bytes: u64) {
        if let Some(from) = self.slots[peer].remote_id
            && let Some(carrier) = &mut self.remote.transport
        {
            carrier.return_credit(from, bytes);
        }
    }

    /// Whether the transport needs no poll before its descriptor is readable, or is not watched.
    pub(super) fn can_block_on_remote(&mut self) -> bool {
        !self.remote.is_set() || self.can_block_on_transport()
    }

    /// Whether the transport, if there is one, needs no poll before its descriptor is readable.
    pub(crate) fn can_block_on_transport(&mut self) -> bool {
        self.remote.transport.as_mut().is_none_or(|carrier| {
            let is_watched = carrier.descriptor().is_some();
            is_watched && carrier.can_block()
        })
    }
}

impl PortState {
    /// Sets the remote transport of the port.
    pub(crate) fn set_remote_transport(
        &mut self,
        carrier: Box<dyn RemoteTransport>,
    ) -> Result<(), Error> {
        if self.protocol.peers.closed {
            return Err(Error::Closed);
        }
        self.protocol.peers.remote.transport = Some(carrier);
        if let Some(descriptor) = self.protocol.peers.remote.descriptor() {
            self.wakeup.watch(descriptor);
        }
        Ok(())
    }

    /// Sets whether peers on other hosts are expected. They are, unless the caller says otherwise.
    pub(crate) fn expect_remote(&mut self, is_expected: bool) {
        self.protocol.peers.remote.is_unexpected = !is_expected;
    }

    /// Processes events of the remote transport. Returns whether there were any.
    pub(super) fn poll_remote(&mut self) -> bool {
        let mut events = self.protocol.take_remote_events();
        let moved = !events.is_empty();
        for event in events.drain(..) {
            let outcome = match event {
                // A disconnect of a peer without a slot is ignored: the transport reports it again when the
                // peer is awaited.
                RemoteEvent::Disconnected { peer, reason } => {
                    let slot = self.protocol.peers.remote.slots.get(&peer).copied();
                    slot.into_iter().for_each(|index| self.disconnect(index, reason.clone()));
                    Ok(())
                }
                event => self.protocol.on_remote_event(event),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "a message from another host was lost");
            }
        }
        self.protocol.peers.remote.events = events;
        moved
    }
}

impl Protocol {
    /// Polls the remote transport for its events.
    fn take_remote_events(&mut self) -> Vec<RemoteEvent> {
        let mut events = std::mem::take(&mut self.peers.remote.events);
        if let Some(transport) = &mut self.peers.remote.transport {
            transport.poll(&mut events);
            if transport.wants_awaited_peers() {
                self.update_awaited();
            }
        }
        let remote = &mut self.peers.remote;
        remote.skipped_polls = POLLS_BETWEEN;
        remote.eager_polls = if events.is_empty() {
            remote.eager_polls.saturating_sub(1)
        } else {
            POLLS_AFTER_EVENT
        };
        events
    }

    /// The peer with a number of the transport.
    pub(crate) fn remote_peer(&mut self, number: u64) -> Result<Peer, Error> {
        if self.peers.closed {
            return Err(Error::Closed);
        }
        let index = self.remote_slot(number)?;
        self.peers[index].remote_uses += 1;
        Ok(self.peers.peer(index))
    }

    /// Frees slots of peers on other hosts that nothing refers to: the application, operations, posted
    /// receives, buffered messages and requests. A peer that sends again gets another slot. Returns whether any slot
    /// was freed.
    pub(super) fn free_unused_remote(&mut self) -> bool {
        let is_unused = |slot: &PeerSlot| {
            slot.remote_id.is_some()
                && slot.remote_uses == 0
                && slot.unexpected_count == 0
                && slot.service_count + slot.old_service_count == 0
        };
        if !self.peers.iter().any(is_unused) {
            return false;
        }
        let mut is_named = vec![false; self.peers.len()];
        for peer in self.operations.peer_indices().chain(self.matches.posted_sources()) {
            is_named[peer] = true;
        }
        let mut any = false;
        let PeerTable { slots, remote, .. } = &mut self.peers;
        for (slot, is_named) in slots.iter_mut().zip(is_named) {
            if is_unused(slot) && !is_named {
                any = true;
                slot.disconnect_reason.get_or_insert(DisconnectReason::Closed);
                if let Some(number) = slot.remote_id.take() {
                    remote.slots.remove(&number);
                    remote.counters.remove(&number);
                }
            }
        }
        any
    }

    /// Checks the source of a probe, and marks it as awaited.
    pub(super) fn probe_source(&mut self, want: &MatchKey) -> Result<(), Error> {
        if let Some(peer) = want.source {
            self.peers[peer].is_awaited = true;
        }
        self.peers.check_source(want)
    }

    /// Reports to the transport which peers are awaited.
    fn update_awaited(&mut self) {
        for peer in self.matches.posted_sources() {
            self.peers[peer].is_awaited = true;
        }
        let awaited = self.peers.iter_mut().filter_map(|slot| {
            let is_awaited =
                std::mem::take(&mut slot.is_awaited) && slot.disconnect_reason.is_none();
            slot.remote_id.filter(|_| is_awaited)
        });
        let awaited: Vec<_> = awaited.collect();
        if let Some(carrier) = &mut self.peers.remote.transport {
            carrier.set_awaited_peers(&awaited);
        }
    }

    fn remote_slot(&mut self, number: u64) -> Result<usize, Error> {
        if let Some(index) = self.peers.remote.slots.get(&number) {
            return Ok(*index);
        }
        let index = self.allocate_slot()?;
        let slot = &mut self.peers[index];
        (slot.remote_id, slot.remote_uses, slot.is_awaited) = (Some(number), 0, false);
        self.peers.remote.slots.insert(number, index);
        let counters = || Block::open(number, "on another host");
        self.peers.remote.counters.entry(number).or_insert_with(counters);
        Ok(index)
    }

    /// The counters of a peer on another host.
    fn remote_counters(&self, peer: usize) -> Option<&PeerCounters> {
        self.peers.remote.counters.get(&self.peers[peer].remote_id?).map(|counters| &**counters)
    }

    pub(super) fn send_remote(
        &mut self,
        peer: usize,
        to: u64,
        envelope: Envelope,
        pieces: &[Segment],
        length: u64,
        ending: Option<CompletionOptions>,
    ) -> Started {
        let mut sending = self.new_sending(peer, envelope, pieces, length, PathKind::Single);
        sending.stage = SendStage::Remote;
        let number = self.operations.insert(OperationKind::Send(sending), ending);
        let delivered = ending.is_some_and(|ending| ending.delivery_complete);
        match &mut self.peers.remote.transport {
            Some(carrier) => carrier.send(to, number.0, &envelope, pieces, delivered),
            None => self.operations.finish(number, Err(self.peers.disconnect_error(peer))),
        }
        Started::Pending(number)
    }

    /// Fetches an announced message that has matched a receive.
    pub(super) fn on_remote_matched(
        &mut self,
        number: OperationId,
        (peer, arrival): (usize, u64),
        envelope: Envelope,
        length: u64,
        ticket: u64,
    ) {
        let Some(receiving) = self.operations.receiving(number) else { return };
        receiving.set_matched(peer, envelope, length);
        receiving.arrival = arrival;
        receiving.stage = ReceiveStage::Remote;
        let (from, wanted) = (self.peers[peer].remote_id, receiving.accepted());
        if let (Some(carrier), Some(from)) = (&mut self.peers.remote.transport, from) {
            carrier.fetch(from, ticket, number.0, receiving.segments.as_slice(), wanted);
        }
    }

    /// Starts an access to memory of a peer on another host.
    ///
    /// # Safety
    /// Until the access completes, the memory of this side must stay valid: for a put unchanged, for a get
    /// for writes, without other accesses.
    pub(crate) unsafe fn start_remote_rma(
        &mut self,
        peer: Peer,
        access: &RemoteRma,
        ending: CompletionOptions,
    ) -> Result<(), Error> {
        let index = self.peers.index_of(peer)?;
        let (Some(to), Some(carrier)) =
            (self.peers[index].remote_id, &mut self.peers.remote.transport)
        else {
            return Err(self.peers.disconnect_error(index));
        };
        let length = access.local.length;
        if access.local.address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        if !self.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        let kind = match access.op {
            RemoteRmaOp::Put => CompletionKind::Put,
            RemoteRmaOp::Get => CompletionKind::Get,
        };
        let number =
            self.operations.insert(OperationKind::RemoteRma { kind, peer: index }, Some(ending));
        carrier.start_rma(to, number.0, access);
        Ok(())
    }

    fn on_remote_event(&mut self, event: RemoteEvent) -> Result<(), Error> {
        match event {
            RemoteEvent::Arrived { peer, envelope, bytes } => {
                let index = self.remote_slot(peer)?;
                if envelope.space == MatchSpace::Service {
                    let delivered = self.deliver_service(index, envelope, bytes);
                    return delivered.map_err(|ProtocolError(what)| {
                        let reason = DisconnectReason::ProtocolViolation(what);
                        Error::PeerDisconnected(Disconnect::new(
                            self.peers.peer_name(index),
                            reason,
                        ))
                    });
                }
                self.deliver_remote_eager(index, envelope, bytes);
            }
            RemoteEvent::Rts { peer, envelope, length, ticket } => {
                let index = self.remote_slot(peer)?;
                match self.match_arrival(index, &envelope, length) {
                    Some(number) => {
                        let arrival = self.matches.next_arrival();
                        self.on_remote_matched(number, (index, arrival), envelope, length, ticket);
                    }
                    None => {
                        let _ = self.buffer_unexpected(
                            index,
                            envelope,
                            UnexpectedPayload::AtRemoteHost { length, ticket },
                        );
                    }
                }
            }
            RemoteEvent::Sent { number, outcome } => {
                let number = OperationId(number);
                let Some(sending) = self.operations.sending(number) else { return Ok(()) };
                let (peer, tag, length) = (sending.peer, sending.envelope.tag, sending.length);
                let outcome = outcome.map(|()| self.peers.message_status(peer, tag, length));
                let outcome = outcome.map_err(|error| self.peers.with_peer_name(peer, error));
                if let (Ok(_), Some(counters)) = (&outcome, self.remote_counters(peer)) {
                    counters.count_sent(REMOTE_PATH, length);
                }
                self.operations.finish(number, outcome);
            }
            RemoteEvent::Fetched { number, outcome } => match outcome {
                Ok(()) => {
                    if let Some(receiving) = self.operations.receiving(OperationId(number)) {
                        let (peer, length) = (receiving.peer, receiving.length);
                        let counters = self.remote_counters(peer);
                        counters.into_iter().for_each(|c| c.count_received(REMOTE_PATH, length));
                    }
                    self.complete_receive(OperationId(number));
                }
                Err(error) => {
                    let number = OperationId(number);
                    let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
                    let (peer, arrival) = (receiving.peer, receiving.arrival);
                    if let Error::PeerDisconnected(_) = &error {
                        self.peers.mark_lost(peer, arrival);
                    }
                    let error = self.peers.with_peer_name(peer, error);
                    self.operations.finish(number, Err(error));
                }
            },
            RemoteEvent::RmaCompleted { number, outcome } => {
                let number = OperationId(number);
                let deed = self.operations.get(number).map(|operation| &operation.kind);
                let Some(OperationKind::RemoteRma { peer, .. }) = deed else { return Ok(()) };
                let peer = *peer;
                let outcome = outcome.map(|()| self.peers.message_status(peer, 0, 0));
                let outcome = outcome.map_err(|error| self.peers.with_peer_name(peer, error));
                self.operations.finish(number, outcome);
            }
            // Needs no action: a transport whose peers have slots is polled in every pass.
            RemoteEvent::Progress { peer } => {
                self.remote_slot(peer)?;
            }
            RemoteEvent::Disconnected { .. } => unreachable!("the port ends peers"),
        }
        Ok(())
    }

    fn deliver_remote_eager(&mut self, peer: usize, envelope: Envelope, bytes: Vec<u8>) {
        let length = bytes.len();
        if let Some(counters) = self.remote_counters(peer) {
            counters.count_received(REMOTE_PATH, length as u64);
        }
        let Some(number) = self.match_arrival(peer, &envelope, length as u64) else {
            let _ = self.buffer_unexpected(
                peer,
                envelope,
                UnexpectedPayload::Buffered { length, bytes },
            );
            return;
        };
        if let Some(receiving) = self.operations.receiving(number) {
            receiving.set_matched(peer, envelope, length as u64);
            let fits = receiving.accepted() as usize;
            // SAFETY: the operation is in flight, so its owner guarantees the segments, and no more is
            // written than they hold; the bytes belong to this side.
            unsafe { scatter(receiving.segments.as_slice(), 0, bytes.as_ptr(), fits) };
            self.complete_receive(number);
        }
        self.peers.return_remote_credit(peer, length as u64);
    }

    /// Drops one reference to a peer on another host. Operations in flight continue, and keep its slot.
    pub(super) fn release_remote(&mut self, peer: usize) {
        let slot = &mut self.peers[peer];
        slot.remote_uses = slot.remote_uses.saturating_sub(1);
        if slot.remote_id.is_some() && slot.remote_uses == 0 {
            self.free_unused_remote();
        }
    }
}
