//! Steps of operations: control messages that arrived, queued sends, and messages that are being copied.

use super::operations::OperationKind;
use super::peer_table::ConnectedPeer;
use super::progress::{Drain, ProgressScope};
use super::protocol::{ControlEvent, Protocol};
use super::{StepContext, step_context};
use crate::connection::CopyError;
use crate::control::{ControlMessage, OperationId, begins_buffered_message};
use crate::envelope::MatchSpace;
use crate::path::{self, ReceiveStage, SendStage, StepResult};
use crate::plan::{MessageReason, PathKind};
use crate::ring::cells::ProtocolError;

/// Maximum number of messages of a peer that wait for their copy in one pass over its operations. Thousands
/// may wait, and a pass copies one of them.
const MAX_PENDING_COPIES: usize = 32;

impl Protocol {
    /// Processes control messages of a peer, at most `cells`, up to one with an event. The count is reduced
    /// by the number of messages that were processed; a message that closes the connection stays in the ring.
    #[inline]
    pub(super) fn drain_ring(
        &mut self,
        peer: usize,
        drain: Drain,
        cells: &mut usize,
    ) -> Result<ControlEvent, ProtocolError> {
        let budget = *cells;
        while *cells > 0 {
            let Some(words) = self.peers.connection(peer).wire.consumer.peek() else { break };
            let is_unwanted = || !self.matches.has_posted() && begins_buffered_message(&words);
            if drain == Drain::Wanted && *cells < budget && is_unwanted() {
                break;
            }
            let event = self.deliver(peer, &words)?;
            if event == ControlEvent::PeerClosed {
                return Ok(event);
            }
            self.peers.connection(peer).wire.advance();
            *cells -= 1;
            if event != ControlEvent::Handled {
                return Ok(event);
            }
        }
        Ok(ControlEvent::Handled)
    }

    /// Sends what is queued for a peer, and steps its operations. Returns whether that made progress.
    #[inline]
    pub(super) fn progress_connection(
        &mut self,
        peer: usize,
        work: ProgressScope,
    ) -> Result<bool, ProtocolError> {
        let mut moved = false;
        let connection = self.peers.connection(peer);
        if connection.wire.has_pending_control() {
            moved |= connection.wire.flush()?;
        }
        // Before the copies: the peer can act on these messages while this side copies.
        if !self.peers.connection(peer).send_queue.is_empty() && self.flush_send_queue(peer)? {
            self.peers.wire(peer).ring_doorbell();
            moved = true;
        }
        if work != ProgressScope::ControlOnly && !self.peers.connection(peer).active.is_empty() {
            let (stepped, can_copy) = self.step_operations(peer, work)?;
            let connection = self.peers.connection(peer);
            connection.has_runnable = (stepped || can_copy) && !connection.active.is_empty();
            moved |= stepped;
        }
        Ok(moved)
    }

    /// Steps active operations of a peer once each, in order, up to [`MAX_PENDING_COPIES`] that wait for
    /// their copy. Takes no copy after an operation that is complete: the calling thread may have waited for
    /// that, and looks first. Returns whether any made progress, and whether any has a copy to make.
    fn step_operations(
        &mut self,
        peer: usize,
        mut work: ProgressScope,
    ) -> Result<(bool, bool), ProtocolError> {
        let (mut moved, mut is_due) = (false, false);
        let (mut index, mut waiting) = (0, 0);
        while waiting < MAX_PENDING_COPIES
            && let Some(&number) = self.peers.connection(peer).active.get(index)
        {
            let step = self.step(peer, number, work)?;
            #[cfg(test)]
            {
                self.steps += 1;
            }
            if self.peers.connection(peer).disconnect_pending {
                return Ok((true, false));
            }
            match step {
                Some(StepResult::Idle) => index += 1,
                Some(StepResult::CopyPending) => {
                    // The thread that makes the copy makes progress with the operation.
                    is_due |= work == ProgressScope::Steps;
                    moved |= work != ProgressScope::Steps;
                    waiting += 1;
                    index += 1;
                }
                Some(StepResult::Progressed) => {
                    moved = true;
                    index += 1;
                }
                // Complete, or without further steps on this side.
                _ => {
                    moved = true;
                    work = ProgressScope::Steps;
                    // In order: a thread that waits for the last of several small messages has them all.
                    self.peers.connection(peer).active.remove(index);
                }
            }
        }
        Ok((moved, is_due))
    }

    /// Whether another thread or the sender makes the only copy of an earlier message: a thread that waits for
    /// the last of several small messages expects to have them all.
    fn is_after_pending_copy(&mut self, peer: usize, number: OperationId) -> bool {
        let Self { operations, peers, .. } = self;
        let Some(connection) = &peers[peer].connection else { return false };
        let before = connection.active.iter().take_while(|active| **active != number);
        before.into_iter().any(|active| {
            operations.receiving(*active).is_some_and(|receiving| {
                receiving.is_in_single_copy() || receiving.is_left_to_sender()
            })
        })
    }

    /// Steps one operation. `None` if it has completed.
    fn step(
        &mut self,
        peer: usize,
        number: OperationId,
        work: ProgressScope,
    ) -> Result<Option<StepResult>, ProtocolError> {
        self.start_fetch(number)?;
        let Self { operations, peers, copies, .. } = self;
        let Some(operation) = operations.get(number) else { return Ok(None) };
        if operation.outcome.is_some() {
            return Ok(None);
        }
        let wire = &mut peers[peer].connection.as_mut().expect("it is connected").wire;
        if !wire.is_recently_alive() {
            // The peer has exited: another process may have its pid by now.
            return Ok(Some(StepResult::Idle));
        }
        match &mut operation.kind {
            OperationKind::Send(sending) if sending.sender_may_block() => {
                self.start_slow_sender_copy(peer, number);
                // The thread of the slow copy makes all steps.
                Ok(None)
            }
            OperationKind::Send(sending) => {
                let may_copy = work == ProgressScope::Copy && copies.next.is_none();
                let mut turn = StepContext { may_copy, ..step_context(number, wire) };
                let step = path::of(sending.path).send(sending, &mut turn)?;
                wire.ring_doorbell();
                if step == StepResult::CopyPending {
                    copies.is_due = true;
                    if may_copy {
                        copies.next = sending.active_copy.clone().map(|copying| (peer, copying));
                    }
                }
                Ok(Some(step))
            }
            OperationKind::Rma(_)
            | OperationKind::RemoteRma { .. }
            | OperationKind::MultiReceive(_) => Ok(None),
            OperationKind::Receive(receiving) => {
                if let ReceiveStage::FinPending { sender } = receiving.stage {
                    let told = !self.is_after_pending_copy(peer, number)
                        && self.send_fin(peer, number, sender)?;
                    return Ok(Some(if told { StepResult::Done } else { StepResult::Idle }));
                }
                let ReceiveStage::Fetching(fetch) = &receiving.stage else { return Ok(None) };
                let (kind, sender) = (fetch.plan.path, fetch.sender);
                if fetch.may_block && fetch.active_copy.is_none() && fetch.done == 0 {
                    if self.start_slow_copy(peer, number) {
                        return Ok(Some(StepResult::Idle));
                    }
                    // Without a thread for the copy, the sender copies its own memory into the bounce ring.
                    return self
                        .fall_back(peer, number, CopyError::Refused(libc::EAGAIN))
                        .map(Some);
                }
                let may_copy = work == ProgressScope::Copy && copies.next.is_none();
                let mut turn = StepContext { may_copy, ..step_context(number, wire) };
                let step = path::of(kind).receive(receiving, &mut turn)?;
                if step == StepResult::CopyPending {
                    copies.is_due = true;
                    if may_copy && let ReceiveStage::Fetching(fetch) = &receiving.stage {
                        copies.next = fetch.active_copy.clone().map(|copying| (peer, copying));
                    }
                    return Ok(Some(step));
                }
                self.after_fetch_step(peer, number, sender, step)
            }
        }
    }

    /// Notifies the sender of a message whose last byte was copied, or that failed.
    #[inline]
    fn after_fetch_step(
        &mut self,
        peer: usize,
        number: OperationId,
        sender: OperationId,
        mut step: StepResult,
    ) -> Result<Option<StepResult>, ProtocolError> {
        let ConnectedPeer { wire, sender_help, .. } = self.peers.connection(peer);
        let is_over = matches!(step, StepResult::Done | StepResult::Failed(_));
        if is_over && wire.memory.is_peer_closed() && !wire.is_self() {
            // The content of the copied bytes is undefined, and the rest may be unmapped by now. The
            // disconnect completes the receive, so that no later message matches instead.
            self.peers.connection(peer).disconnect_pending = true;
            return Ok(Some(StepResult::Idle));
        }
        if let StepResult::CopyRefused(error) = step {
            return self.fall_back(peer, number, error).map(Some);
        }
        if step == StepResult::Done
            && let Some(receiving) = self.operations.receiving(number)
            && let ReceiveStage::Fetching(fetch) = &receiving.stage
        {
            wire.counters.count_received(fetch.plan.path as usize, receiving.length);
            if fetch.plan.reason == MessageReason::ReceivedAhead
                && let Some(copy) = &fetch.cooperative
            {
                sender_help.record(!copy.has_copied());
            }
        }
        if let StepResult::Failed(error) = &step {
            wire.send_control(ControlMessage::Fin { sender, error: path::error_code(error) });
            self.operations.finish(number, Err(error.clone()));
        } else if step == StepResult::Done && self.is_after_pending_copy(peer, number) {
            let Some(receiving) = self.operations.receiving(number) else { return Ok(None) };
            receiving.stage = ReceiveStage::FinPending { sender };
            self.peers.connection(peer).pending_fins += 1;
            step = StepResult::Idle;
        } else if step == StepResult::Done && !self.send_fin(peer, number, sender)? {
            step = StepResult::Idle;
        }
        Ok(Some(step))
    }

    /// Sends queued messages, in order, while there is space.
    fn flush_send_queue(&mut self, peer: usize) -> Result<bool, ProtocolError> {
        let mut moved = false;
        self.peers.wire(peer).clear_blocked();
        while let Some(&number) = self.peers.connection(peer).send_queue.front() {
            let Self { operations, peers, planner, .. } = self;
            let connection = peers[peer].connection.as_mut().expect("it is connected");
            let Some(sending) = operations.sending(number) else {
                connection.send_queue.pop_front();
                continue;
            };
            if matches!(sending.stage, SendStage::Queued)
                && sending.path != PathKind::Single
                && sending.envelope.space != MatchSpace::Service
                && !connection.accepts_eager()
            {
                sending.path = PathKind::Single;
                sending.nonresident =
                    planner.residency.may_be_nonresident(sending.segments.as_slice());
            }
            match path::of(sending.path)
                .send(sending, &mut step_context(number, &mut connection.wire))?
            {
                StepResult::Idle => break,
                StepResult::Progressed if matches!(sending.stage, SendStage::RtsSent) => {
                    connection.pending_rts += 1;
                    connection.send_queue.pop_front();
                }
                StepResult::Progressed => {}
                StepResult::Done => {
                    connection.send_queue.pop_front();
                    let (tag, length) = (sending.envelope.tag, sending.length);
                    let received = self.peers.message_status(peer, tag, length);
                    self.finish_send(number, Ok(received));
                }
                StepResult::Failed(error) => {
                    connection.send_queue.pop_front();
                    operations.finish(number, Err(error));
                }
                StepResult::CopyRefused(_) | StepResult::CopyPending => {
                    unreachable!("what waits to be sent copies nothing")
                }
            }
            moved = true;
        }
        Ok(moved)
    }
}
