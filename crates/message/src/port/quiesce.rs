//! Operations that have ended while a peer may still write to their memory, or a thread of this process still
//! copies. They complete when the memory is no longer in use. An owned buffer can outlive its operation: its
//! owner gets the result at once.

use std::any::Any;
use std::sync::Arc;

use memferry_sys::clock;

use super::operations::OperationKind;
use super::protocol::Protocol;
use super::{MessageStatus, Port, StepContext, step_context};
use crate::connection::Connection;
use crate::control::OperationId;
use crate::error::Error;
use crate::path::{self, ActiveCopy, QuiesceState, ReceiveStage, SendStage, StepResult};
use crate::quarantine::{self, Claim};

/// Time for copies of this process to end before their buffer goes into quarantine.
const LOCAL_COPY_TIMEOUT_NS: u64 = 10_000_000;

impl Port {
    /// Completes operations whose memory is free. Returns whether any is left.
    pub(crate) fn finish_quiesced(&self) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.lock();
        state.protocol.finish_quiesced();
        !state.protocol.operations.quiescing.is_empty()
    }
}

impl Protocol {
    /// Completes an operation whose peer is disconnected. A receive that has all its bytes succeeds; an
    /// operation whose memory is in use completes after that use. A peer on another host has no connection,
    /// and copies nothing on this host.
    pub(super) fn abort_operation(
        &mut self,
        number: OperationId,
        wire: Option<&mut Connection>,
        error: &Error,
    ) {
        if let Some(sending) = self.operations.sending(number) {
            if let SendStage::Quiescing(_) = sending.stage {
                return;
            }
            let claims = match (sending.active_copy.take(), wire) {
                (Some(copying), Some(wire)) => vec![cancel_copy(copying, wire)],
                _ => Vec::new(),
            };
            return self.finish_when_quiesced(number, claims, Err(error.clone()));
        }
        let Some(receiving) = self.operations.receiving(number) else {
            return self.operations.finish(number, Err(error.clone()));
        };
        let mut claims = Vec::new();
        match (&mut receiving.stage, wire) {
            (ReceiveStage::FinPending { .. }, _) => return self.complete_receive(number),
            (ReceiveStage::Quiescing(_), _) => return,
            (ReceiveStage::Fetching(fetch), Some(wire)) => {
                if let Some(copying) = fetch.active_copy.take() {
                    claims.push(cancel_copy(copying, wire));
                }
                let path = path::of(fetch.plan.path);
                let claimed = path.revoke(receiving, wire);
                claims.extend(claimed.map(|claimed| Claim::new(wire.writer(), claimed)));
            }
            _ => {}
        }
        self.finish_when_quiesced(number, claims, Err(error.clone()));
    }

    /// Completes a send, once no thread of this process reads its memory.
    pub(super) fn finish_send(
        &mut self,
        number: OperationId,
        outcome: Result<MessageStatus, Error>,
    ) {
        let Self { operations, peers, .. } = self;
        let Some(sending) = operations.sending(number) else { return };
        if outcome.is_ok()
            && let Some(connection) = &peers[sending.peer].connection
        {
            connection.wire.count_send(sending);
        }
        match sending.active_copy.take().filter(|copying| copying.is_in_flight()) {
            None => operations.finish(number, outcome),
            Some(copying) => {
                let connection = peers[sending.peer].connection.as_mut();
                let wire =
                    &mut connection.expect("the end of a connection makes a claim of a copy").wire;
                let claims = vec![cancel_copy(copying, wire)];
                self.finish_when_quiesced(number, claims, outcome);
            }
        }
    }

    /// Completes an operation when no claim on its memory is left.
    fn finish_when_quiesced(
        &mut self,
        number: OperationId,
        mut claims: Vec<Claim>,
        outcome: Result<MessageStatus, Error>,
    ) {
        claims.retain(Claim::is_active);
        if claims.is_empty() {
            return self.operations.finish(number, outcome);
        }
        tracing::debug!("a peer may still access the memory of a message that has ended");
        // The buffer of a dropped handle belongs to this library.
        if let Some(buffer) = self.operations.take_detached(number) {
            quarantine::hold(claims.clone(), buffer);
        }
        let is_peers = !claims.iter().all(Claim::is_local);
        let held = Box::new(QuiesceState { claims, outcome, since_ns: clock::now_ns() });
        match self.operations.get(number).map(|operation| &mut operation.kind) {
            Some(OperationKind::Receive(receiving)) => {
                receiving.stage = ReceiveStage::Quiescing(held);
            }
            Some(OperationKind::Send(sending)) => sending.stage = SendStage::Quiescing(held),
            _ => return,
        }
        self.operations.quiescing.push(number);
        // A future is polled again: it may leave its buffer in quarantine.
        self.operations.wake_now(number);
        // A sleeper must poll for this completion: the peer wakes no thread.
        self.changed = true;
        // The peer wakes no future and no event loop either. The watch thread of this process does.
        if is_peers {
            quarantine::watch(&self.operations.weak_port);
        }
    }

    /// The claims that an ended operation waits for.
    fn quiesce_state(&mut self, number: OperationId) -> Option<&QuiesceState> {
        let operation = self.operations.get(number).filter(|found| found.outcome.is_none())?;
        match &operation.kind {
            OperationKind::Receive(receiving) => match &receiving.stage {
                ReceiveStage::Quiescing(held) => Some(held),
                _ => None,
            },
            OperationKind::Send(sending) => match &sending.stage {
                SendStage::Quiescing(held) => Some(held),
                _ => None,
            },
            _ => None,
        }
    }

    /// Completes operations whose memory is free. Returns whether there were any.
    #[cold]
    pub(super) fn finish_quiesced(&mut self) -> bool {
        let mut numbers = std::mem::take(&mut self.operations.quiescing);
        let before = numbers.len();
        numbers.retain(|&number| {
            let Some(held) = self.quiesce_state(number) else { return false };
            if held.claims.iter().any(Claim::is_active) {
                return true;
            }
            let outcome = held.outcome.clone();
            self.operations.finish(number, outcome);
            false
        });
        self.operations.quiescing = numbers;
        self.operations.quiescing.len() < before
    }

    /// Whether an operation has ended and waits for its memory.
    pub(crate) fn is_quiescing(&mut self, number: OperationId) -> bool {
        !self.operations.quiescing.is_empty() && self.quiesce_state(number).is_some()
    }

    /// The error of an operation whose memory stays in use. Not reported while only threads of this process
    /// use the memory, for up to [`LOCAL_COPY_TIMEOUT_NS`].
    pub(crate) fn quiesce_error(&mut self, number: OperationId) -> Option<Error> {
        if self.operations.quiescing.is_empty() {
            return None;
        }
        let held = self.quiesce_state(number)?;
        let is_soon_free = held.claims.iter().all(Claim::is_local)
            && clock::now_ns().saturating_sub(held.since_ns) < LOCAL_COPY_TIMEOUT_NS;
        held.outcome.as_ref().err().filter(|_| !is_soon_free).cloned()
    }

    /// Moves the buffer of a failed operation into quarantine, and completes the operation. Returns the
    /// buffer if its memory is not in use.
    pub(crate) fn quarantine_buffer(
        &mut self,
        number: OperationId,
        buffer: Box<dyn Any + Send>,
    ) -> Result<Error, Box<dyn Any + Send>> {
        let Some(held) = self.quiesce_state(number) else { return Err(buffer) };
        let Err(error) = held.outcome.clone() else { return Err(buffer) };
        quarantine::hold(held.claims.clone(), buffer);
        self.operations.quiescing.retain(|held| *held != number);
        self.operations.finish(number, Err(error.clone()));
        Ok(error)
    }

    /// Starts a thread that copies a message whose source may never become resident, unless another message
    /// of the peer has one: each peer has one thread. Returns `false` if no thread can be started.
    pub(super) fn start_slow_copy(&mut self, peer: usize, number: OperationId) -> bool {
        let Self { operations, peers, .. } = self;
        let port = operations.weak_port.clone();
        let Some(connection) = peers[peer].connection.as_mut() else { return true };
        if connection.slow_copy.as_ref().is_some_and(|copying| copying.is_in_flight()) {
            return true;
        }
        let Some(receiving) = operations.receiving(number) else { return true };
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return true };
        // SAFETY: the operation is in flight, so its owner guarantees the segments, and it completes only
        // after the copy: `cancel_copy` makes a claim of it.
        let copying = unsafe { path::start_blocking_copy(fetch, accepted) };
        let is_started = copying.run_on_thread(port);
        if is_started {
            connection.slow_copy = Some(copying.clone());
            fetch.active_copy = Some(copying);
        }
        is_started
    }

    /// Starts a thread that copies for a receiver whose memory may never become resident, unless another
    /// message to the peer has one: then the receiver copies alone.
    pub(super) fn start_slow_sender_copy(&mut self, peer: usize, number: OperationId) {
        let generation = self.peers[peer].generation;
        let Some(connection) = self.peers[peer].connection.as_mut() else { return };
        if connection.slow_sender_copy.is_some() {
            return;
        }
        let port = self.operations.weak_port.clone();
        let help = move || {
            // Holds a reference to the port while this thread copies: the port may own the buffer of the
            // message.
            while let Some(port) = port.upgrade() {
                let next = port.lock().protocol.next_slow_sender_chunk((peer, generation), number);
                let Some(copying) = next else { break };
                copying.run();
            }
            if let Some(port) = port.upgrade() {
                port.lock().progress_steps();
            }
        };
        let thread = memferry_sys::thread::spawn("memferry-slow", help);
        connection.slow_sender_copy = thread.is_ok().then_some(number);
    }

    /// The next chunk for the thread that copies for the sender. `None` if there is none.
    fn next_slow_sender_chunk(
        &mut self,
        (peer, generation): (usize, u32),
        number: OperationId,
    ) -> Option<Arc<ActiveCopy>> {
        let Self { operations, peers, .. } = self;
        let slot = peers.slots.get_mut(peer).filter(|slot| slot.generation == generation)?;
        let connection = slot.connection.as_mut()?;
        if connection.slow_sender_copy != Some(number) {
            return None;
        }
        let is_alive = connection.wire.is_recently_alive();
        let sending = operations.sending(number).filter(|sending| sending.sender_may_block());
        let copying = sending.filter(|_| is_alive).and_then(|sending| {
            let mut turn =
                StepContext { may_copy: true, ..step_context(number, &mut connection.wire) };
            // The error is dropped here: the next pass over the claims reports the violation.
            let step = path::of(sending.path).send(sending, &mut turn).ok()?;
            sending.active_copy.clone().filter(|_| step == StepResult::CopyPending)
        });
        connection.wire.ring_doorbell();
        if copying.is_none() {
            connection.slow_sender_copy = None;
        }
        copying
    }

    /// Whether any operation is in flight and uses its memory. The port may be closed.
    pub(crate) fn has_pending_operations(&self) -> bool {
        !self.operations.pending_ids(|_| true).is_empty()
    }

    /// Whether an operation has ended and waits for its memory.
    pub(super) fn is_kind_quiescing(deed: &OperationKind) -> bool {
        match deed {
            OperationKind::Receive(receiving) => {
                matches!(receiving.stage, ReceiveStage::Quiescing(_))
            }
            OperationKind::Send(sending) => matches!(sending.stage, SendStage::Quiescing(_)),
            _ => false,
        }
    }
}

/// Cancels a copy, and returns the claim of its thread.
fn cancel_copy(copying: Arc<ActiveCopy>, wire: &mut Connection) -> Claim {
    copying.cancel();
    Claim::Copy { active_copy: copying, _writer: wire.writer() }
}
