//! Rendezvous: messages in their sender's memory, from the match with a receive to the completion of both
//! sides.

use memferry_sys::probes;
use memferry_sys::shared_memory::Protection;

use super::planner::Fetch;
use super::protocol::Protocol;
use super::{RtsInfo, UnexpectedPayload, step_context};
use crate::connection::{CopyError, PeerBuffer};
use crate::control::{BufferRef, ControlMessage, OperationId, RendezvousMode};
use crate::envelope::Envelope;
use crate::error::Error;
use crate::path::{self, MessageBuffers, ReceiveStage, RendezvousFetch, SendStage, StepResult};
use crate::plan::{AccessMethod, MessagePlan, MessageReason, PathKind};
use crate::ring::cells::ProtocolError;
use crate::segments::Segment;

impl Protocol {
    /// Handles the match of an announced message with a receive. If the sender has posted receives, this side
    /// may be about to send to it: the fetch is then planned later.
    pub(super) fn on_rts_matched(
        &mut self,
        number: OperationId,
        (peer, arrival): (usize, u64),
        envelope: Envelope,
        length: u64,
        request: RtsInfo,
    ) -> Result<(), ProtocolError> {
        let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
        receiving.set_matched(peer, envelope, length);
        receiving.arrival = arrival;
        let RtsInfo { sender, source, core, has_receives: expects, nonresident: absent } = request;
        receiving.stage = ReceiveStage::RtsMatched { sender, source, core, nonresident: absent };
        if !expects {
            self.start_fetch(number)?;
        }
        let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
        if let ReceiveStage::RtsMatched { .. } | ReceiveStage::Fetching(_) = receiving.stage {
            self.peers.push_active(peer, number);
            self.peers.connection(peer).has_runnable = true;
        }
        Ok(())
    }

    /// Plans and starts the fetch of an announced message.
    pub(super) fn start_fetch(&mut self, number: OperationId) -> Result<(), ProtocolError> {
        let cores = match self.operations.receiving(number).map(|r| &r.stage) {
            Some(ReceiveStage::RtsMatched { .. }) => self.peers.core_budget(),
            _ => return Ok(()),
        };
        let Self { operations, peers, planner, posts_ahead, .. } = self;
        let Some(receiving) = operations.receiving(number) else { return Ok(()) };
        let ReceiveStage::RtsMatched { sender, source, core, nonresident: never_comes } =
            &receiving.stage
        else {
            return Ok(());
        };
        let connection = peers[receiving.peer].connection.as_mut().expect("it is connected");
        let (view, way) = connection.wire.peer_buffer(source, Protection::ReadOnly);
        let (bytes, pieces) = (receiving.accepted(), receiving.segments.as_slice());
        let fetch = Fetch {
            bytes,
            target: pieces,
            source: &view,
            method: way,
            sender_core: *core,
            cores,
            is_ahead: *posts_ahead,
        };
        let mut plan = planner.plan_fetch(connection, &fetch);
        if plan.reason == MessageReason::ReceivedAhead
            && (!connection.sender_help.is_expected()
                || !connection.wire.has_claim_slots_to_spare()
                || planner.residency.may_be_nonresident(pieces))
        {
            plan = planner.plan_fetch(connection, &Fetch { is_ahead: false, ..fetch });
        }
        if bytes == 0 || (plan.path == PathKind::Cooperative && !connection.wire.has_claim_slot()) {
            plan.path =
                if way == AccessMethod::None { PathKind::Pipeline } else { PathKind::Single };
        }
        // Memory that may never become resident is read by a thread of its own.
        let is_reached = way == AccessMethod::CrossMemory && plan.path != PathKind::Pipeline;
        let is_slow = *never_comes && is_reached && bytes > 0;
        if is_slow {
            plan.path = PathKind::Single;
        }
        let is_target_absent =
            plan.path == PathKind::Cooperative && planner.residency.may_be_nonresident(pieces);
        tracing::trace!(bytes, path = plan.path.name(), "a message met a receive");
        probes::message_begin(1, bytes);
        let path = path::of(plan.path);
        receiving.stage = ReceiveStage::Fetching(Box::new(RendezvousFetch {
            sender: *sender,
            plan,
            buffers: MessageBuffers::new(view, &receiving.segments),
            done: 0,
            cooperative: None,
            offload: None,
            active_copy: None,
            may_block: is_slow,
            target_nonresident: is_target_absent,
        }));
        path.begin(receiving, &mut step_context(number, &mut connection.wire))
    }

    /// Handles a refusal of the kernel to copy from the sender's memory. If the sender has exited, its
    /// disconnect fails the receive; else the whole message is sent through the bounce ring.
    #[cold]
    pub(super) fn fall_back(
        &mut self,
        peer: usize,
        number: OperationId,
        error: CopyError,
    ) -> Result<StepResult, ProtocolError> {
        let Self { operations, peers, .. } = self;
        let connection = peers[peer].connection.as_mut().expect("it is connected");
        if !connection.wire.is_alive() {
            connection.disconnect_pending = true;
            return Ok(StepResult::Idle);
        }
        connection.wire.record_refusal(error, Protection::ReadOnly);
        let Some(receiving) = operations.receiving(number) else { return Ok(StepResult::Done) };
        if let ReceiveStage::Fetching(fetch) = &mut receiving.stage {
            tracing::debug!(?error, "a message comes through the shared space instead");
            connection.wire.counters.fallbacks[0].add(1);
            fetch.plan.path = PathKind::Pipeline;
            (fetch.cooperative, fetch.offload, fetch.may_block) = (None, None, false);
        }
        let wire = &mut connection.wire;
        path::of(PathKind::Pipeline).begin(receiving, &mut step_context(number, wire))?;
        wire.ring_doorbell();
        // From now on the arrival of fragments makes progress with this receive.
        Ok(StepResult::Done)
    }

    /// The plan of a fast receive of an announced message, if the receiver alone is to copy it.
    pub(super) fn plan_fast_receive(
        &mut self,
        peer: usize,
        source: BufferRef,
        length: u64,
        core: u16,
        pieces: &[Segment],
    ) -> Option<(PeerBuffer, MessagePlan)> {
        let BufferRef::Contiguous { .. } = source else { return None };
        let cores = self.peers.core_budget();
        let Self { peers, planner, .. } = self;
        let connection = peers[peer].connection.as_mut()?;
        let source = connection.wire.decode_buffer(source, length).ok()?;
        let (view, way) = connection.wire.peer_buffer(&source, Protection::ReadOnly);
        let fetch = Fetch {
            bytes: length,
            target: pieces,
            source: &view,
            method: way,
            sender_core: core,
            cores,
            is_ahead: false,
        };
        let plan = planner.plan_fetch(connection, &fetch);
        let is_now = plan.path == PathKind::Single && connection.wire.is_recently_alive();
        is_now.then_some((view, plan))
    }

    /// Sends the FIN of a receive that has all its bytes, and then completes the receive. In this order: a
    /// process that exits after its last receive has notified all senders. Returns whether there was space in
    /// the ring; without space the FIN is sent later.
    pub(super) fn send_fin(
        &mut self,
        peer: usize,
        number: OperationId,
        sender: OperationId,
    ) -> Result<bool, ProtocolError> {
        let connection = self.peers.connection(peer);
        let (has_room, others) = (connection.wire.has_credit()?, connection.pending_fins);
        let Some(receiving) = self.operations.receiving(number) else { return Ok(true) };
        let waited = matches!(receiving.stage, ReceiveStage::FinPending { .. });
        // FINs that waited for space earlier are sent first.
        if !has_room || (others > 0 && !waited) {
            receiving.stage = ReceiveStage::FinPending { sender };
            self.peers.connection(peer).pending_fins += usize::from(!waited);
            return Ok(false);
        }
        let connection = self.peers.connection(peer);
        connection.pending_fins -= usize::from(waited);
        connection.wire.write(&ControlMessage::Fin { sender, error: 0 }.encode());
        self.complete_receive(number);
        Ok(true)
    }

    pub(super) fn on_cts(
        &mut self,
        peer: usize,
        sender: OperationId,
        receiver: OperationId,
        length: u64,
        manner: &RendezvousMode,
    ) -> Result<(), ProtocolError> {
        let stream_bytes = self.planner.context.stream_bytes;
        let Self { operations, peers, planner, .. } = self;
        let connection = peers[peer].connection.as_mut().expect("notes come from connections");
        // The segment list is taken out of the ring in any case.
        let helping = path::start_sender_copy(&mut connection.wire, manner, length, stream_bytes)?;
        let Some(sending) = operations.sending(sender).filter(|s| s.peer == peer) else {
            return Err(ProtocolError("an answer to no request"));
        };
        let is_first = matches!(sending.stage, SendStage::RtsSent | SendStage::CancelPending);
        // A receiver that could not copy requests fragments.
        let is_fallback = matches!(sending.stage, SendStage::Copying(_))
            && matches!(manner, RendezvousMode::Pipeline);
        if !is_first && !is_fallback {
            return Err(ProtocolError("a second answer to a request"));
        }
        if length > sending.length {
            return Err(ProtocolError("a request for more than was offered"));
        }
        match manner {
            RendezvousMode::Pipeline => {
                sending.path = PathKind::Pipeline;
                let receiver = Some(receiver);
                sending.stage = SendStage::Streaming { sent: 0, receiver, until: length };
            }
            RendezvousMode::Cooperative { .. } => {
                let Some((mut together, target)) = helping else { return Ok(()) };
                together.set_buffers(&sending.segments, target);
                let prefault = planner.sender_prefault(sending.segments.as_slice(), &together);
                together.set_prefault(prefault);
                sending.path = PathKind::Cooperative;
                sending.stage = SendStage::Copying(together);
            }
        }
        // A send with a thread of its own is not among the active ones.
        connection.has_runnable = true;
        if is_first || !connection.active.contains(&sender) {
            peers.push_active(peer, sender);
        }
        Ok(())
    }

    pub(super) fn on_fin(
        &mut self,
        peer: usize,
        sender: OperationId,
        error: u16,
    ) -> Result<(), ProtocolError> {
        let Some(sending) = self.operations.sending(sender).filter(|s| s.peer == peer) else {
            return Err(ProtocolError("the end of no message"));
        };
        if matches!(sending.stage, SendStage::Queued) {
            return Err(ProtocolError("the end of a message that did not begin"));
        }
        if matches!(sending.stage, SendStage::Quiescing(_)) {
            return Err(ProtocolError("a second end of a message"));
        }
        let (tag, length) = (sending.envelope.tag, sending.length);
        let outcome = match path::error_from_code(error) {
            None => Ok(self.peers.message_status(peer, tag, length)),
            Some(error) => Err(error),
        };
        self.finish_send(sender, outcome);
        let connection = self.peers.connection(peer);
        connection.pending_rts = connection.pending_rts.saturating_sub(1);
        Ok(())
    }

    pub(super) fn on_cancel_rts(&mut self, peer: usize, wanted: OperationId) {
        let (mut removed, mut weight, mut bytes) = (0, 0, 0);
        self.matches.retain(|unexpected| {
            // A claimed message counts as received.
            let is_it = unexpected.source == peer
                && !unexpected.is_claimed
                && matches!(&*unexpected.message, UnexpectedPayload::AtSender { request, .. } if request.sender == wanted);
            removed += usize::from(is_it);
            weight += if is_it { unexpected.message.weight() } else { 0 };
            bytes += if is_it { unexpected.message.bytes() } else { 0 };
            !is_it
        });
        self.peers.release_unexpected(peer, weight, bytes);
        let granted = removed > 0;
        self.peers.wire(peer).send_control(ControlMessage::CancelReply { sender: wanted, granted });
    }

    pub(super) fn on_cancel_reply(&mut self, peer: usize, sender: OperationId, granted: bool) {
        let sending = self.operations.sending(sender).filter(|s| s.peer == peer);
        let Some(sending) = sending else { return };
        if !matches!(sending.stage, SendStage::CancelPending) {
            return;
        }
        if granted {
            let connection = self.peers[peer].connection.as_mut().expect("notes come from one");
            connection.pending_rts = connection.pending_rts.saturating_sub(1);
            let cancelled = Error::Cancelled(self.operation_name(sender));
            self.operations.finish(sender, Err(cancelled));
        } else {
            sending.stage = SendStage::RtsSent;
        }
    }
}
