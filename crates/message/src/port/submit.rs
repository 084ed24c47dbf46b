//! Posting operations: sends, receives and probes, and cancelling them.

use memferry_sys::{clock, probes};

use super::operations::OperationKind;
use super::peer_table::Reassembly;
use super::posted_buffer::PostedReceive;
use super::progress::{Drain, ProgressScope};
use super::protocol::{MatchEvent, Protocol};
use super::{MessageStatus, Peer, PortState, UnexpectedPayload, service, step_context};
use crate::completion::CompletionOptions;
use crate::control::{ControlMessage, OperationId, inline_limit};
use crate::envelope::{Envelope, MatchSpace, MatchSpec};
use crate::error::{DisconnectReason, Error, ValidationError};
use crate::matching::{MatchKey, Unexpected};
use crate::path::{self, ReceiveStage, Receiving, SendStage, Sending, StepResult};
use crate::plan::{self, PathKind};
use crate::ring::cells::ProtocolError;
use crate::segments::{MAX_SEGMENTS, Segment, Segments, scatter, total};

/// Maximum size of an eager message in one fragment.
const MAX_SINGLE_FRAGMENT: u64 = 8 << 10;

/// Result of starting an operation.
#[derive(Debug)]
pub(crate) enum Started {
    /// It has completed.
    Completed(Result<MessageStatus, Error>),
    /// It is in flight.
    Pending(OperationId),
}

impl PortState {
    /// Starts a send. With options, a send that does not complete at once ends in a completion entry.
    ///
    /// # Safety
    /// The segments must stay valid for reads, unchanged, until the operation completes.
    #[inline]
    pub(crate) unsafe fn send(
        &mut self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Segment],
        ending: Option<CompletionOptions>,
    ) -> Result<Started, Error> {
        let peer = self.protocol.peers.index_of(to)?;
        let length = check_segments(pieces)?;
        if self.protocol.peers[peer].connection.is_none() {
            return self.send_unconnected(peer, envelope, pieces, length, ending);
        }
        // SAFETY: the caller guarantees it.
        match unsafe { self.protocol.try_send(peer, envelope, pieces, length, ending) } {
            Ok(SendOutcome::Completed) => {
                let status = self.protocol.peers.message_status(peer, envelope.tag, length);
                Ok(Started::Completed(Ok(status)))
            }
            Ok(SendOutcome::Queued { number, is_first }) => {
                if is_first {
                    self.progress_peer(peer, ProgressScope::ControlOnly, Drain::Wanted);
                }
                Ok(Started::Pending(number))
            }
            Ok(SendOutcome::PeerDisconnected) => {
                self.drain_and_disconnect(peer);
                Err(self.protocol.peers.disconnect_error(peer))
            }
            Ok(SendOutcome::NoCapacity) => {
                let count = self.protocol.operations.count();
                Err(ValidationError::TooManyOperations(count).into())
            }
            Err(ProtocolError(what)) => {
                self.disconnect(peer, DisconnectReason::ProtocolViolation(what));
                Err(self.protocol.peers.disconnect_error(peer))
            }
        }
    }

    /// Starts a receive. With options it ends in a completion entry, even if it completes at once.
    ///
    /// # Safety
    /// The segments must stay valid for writes until the operation completes, and no other code may access
    /// them.
    pub(crate) unsafe fn receive(
        &mut self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        ending: Option<CompletionOptions>,
    ) -> Result<Started, Error> {
        let want = self.protocol.peers.match_key(wanted)?;
        if ending.is_none() {
            // SAFETY: the caller guarantees it.
            if let Some(outcome) = unsafe { self.protocol.receive_buffered(&want, pieces) }? {
                return Ok(Started::Completed(outcome));
            }
        }
        // SAFETY: as above.
        let (number, event) = unsafe { self.protocol.receive(&want, pieces, ending) }?;
        self.after_match(event, &want);
        Ok(match self.protocol.operations.take_outcome(number) {
            Some(outcome) => Started::Completed(outcome),
            None => Started::Pending(number),
        })
    }

    /// Acts on the event of a receive. Whether the receive has completed is known only after this call.
    pub(super) fn after_match(&mut self, event: MatchEvent, want: &MatchKey) {
        match event {
            MatchEvent::Handled => {}
            MatchEvent::Posted => self.connect_source(want),
            MatchEvent::Rendezvous { peer, outcome } => self.start_rendezvous(peer, outcome),
        }
    }

    /// Processes control messages of a sender whose announced message has matched a receive.
    pub(super) fn start_rendezvous(&mut self, peer: usize, outcome: Result<(), ProtocolError>) {
        if let Err(ProtocolError(what)) = outcome {
            self.disconnect(peer, DisconnectReason::ProtocolViolation(what));
        }
        self.progress_peer(peer, ProgressScope::ControlOnly, Drain::Wanted);
    }
}

/// Result of a send to a connected peer.
enum SendOutcome {
    /// The message is in the ring.
    Completed,
    /// The send is an operation; nothing is queued before it if it is the first.
    Queued {
        number: OperationId,
        is_first: bool,
    },
    /// The peer is disconnected.
    PeerDisconnected,
    NoCapacity,
}

impl Protocol {
    /// Sends a message to a connected peer: at once where possible, else it is queued.
    ///
    /// # Safety
    /// As for [`PortState::send`].
    #[inline]
    unsafe fn try_send(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Segment],
        length: u64,
        ending: Option<CompletionOptions>,
    ) -> Result<SendOutcome, ProtocolError> {
        // The FIN of an announced message reports that the receiver has it.
        probes::message_begin(0, length);
        let is_asked_for = ending.is_some_and(|ending| ending.delivery_complete);
        let eager_limit = self.eager_limit(peer);
        let at_once = eager_limit.min(MAX_SINGLE_FRAGMENT);
        // SAFETY: the caller guarantees it.
        if !is_asked_for && unsafe { self.send_now(peer, &envelope, pieces, length, at_once) }? {
            return Ok(SendOutcome::Completed);
        }
        if self.peers.connection(peer).wire.has_peer_disconnected() {
            return Ok(SendOutcome::PeerDisconnected);
        }
        let connection = self.peers.connection(peer);
        let first = connection.send_queue.is_empty();
        let path = match length {
            // A request is never announced: no receive matches it.
            _ if envelope.space == MatchSpace::Service => service::path_of(&envelope, length),
            // A receiver without space requests the payload later.
            _ if is_asked_for || !connection.accepts_eager() => PathKind::Single,
            _ if length <= inline_limit(&envelope) as u64 => PathKind::Inline,
            _ if length <= eager_limit => PathKind::Eager,
            _ => PathKind::Single,
        };
        let mut sending = self.new_sending(peer, envelope, pieces, length, path);
        if first && path == PathKind::Eager && self.send_eager_now(peer, &mut sending)? {
            return Ok(SendOutcome::Completed);
        }
        if !self.operations.has_capacity() && matches!(sending.stage, SendStage::Queued) {
            return Ok(SendOutcome::NoCapacity);
        }
        let number = self.operations.insert(OperationKind::Send(sending), ending);
        self.peers.activate(peer);
        let connection = self.peers.connection(peer);
        connection.wire.counters.waits.add(u64::from(path != PathKind::Single));
        connection.send_queue.push_back(number);
        Ok(SendOutcome::Queued { number, is_first: first })
    }

    /// Maximum size in bytes of a message that is sent to a peer without a request.
    #[inline]
    fn eager_limit(&mut self, peer: usize) -> u64 {
        let wire = self.peers.wire(peer);
        let reachable = wire.peer_access_to_us.0 || wire.is_self();
        self.planner.eager_limit(reachable)
    }

    /// Sends a message of at most `limit` bytes if no send is queued before it and the ring has space for all
    /// of it. The message is complete then. Returns whether it was sent.
    ///
    /// # Safety
    /// `pieces` must be valid for reads of `length` bytes.
    #[inline]
    pub(super) unsafe fn send_now(
        &mut self,
        peer: usize,
        envelope: &Envelope,
        pieces: &[Segment],
        length: u64,
        limit: u64,
    ) -> Result<bool, ProtocolError> {
        let connection = self.peers.connection(peer);
        if !connection.send_queue.is_empty()
            || !connection.accepts_eager() && envelope.space != MatchSpace::Service
            || !connection.wire.may_send()
        {
            return Ok(false);
        }
        let wire = &mut connection.wire;
        // SAFETY: the caller guarantees the segments, for both calls.
        unsafe {
            if length <= inline_limit(envelope) as u64 {
                if path::write_inline(wire, envelope, pieces, length as usize)? {
                    wire.count_sent(envelope, PathKind::Inline, length);
                    wire.ring_doorbell();
                    return Ok(true);
                }
            } else if length <= limit && path::write_eager(wire, envelope, pieces, length as usize)?
            {
                wire.count_sent(envelope, PathKind::Eager, length);
                wire.ring_doorbell();
                wire.prefetch_bounce(length as usize);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Creates a send of which nothing is in the ring.
    pub(super) fn new_sending(
        &mut self,
        peer: usize,
        envelope: Envelope,
        pieces: &[Segment],
        length: u64,
        path: PathKind,
    ) -> Sending {
        // The peer reads the memory only of an announced message.
        let absent = path == PathKind::Single && self.planner.residency.may_be_nonresident(pieces);
        Sending {
            peer,
            envelope,
            nonresident: absent,
            active_copy: None,
            segments: Segments::new(pieces),
            length,
            path,
            chunk_bytes: plan::fragment_bytes(length),
            has_receives: self.matches.has_posted(),
            // Only messages that are announced are timed: small ones do not read the clock.
            started_ns: if path == PathKind::Single { clock::now_ns() } else { 0 },
            stage: SendStage::Queued,
        }
    }

    /// Sends an eager message as far as there is space. Returns whether all of it is in the ring.
    fn send_eager_now(
        &mut self,
        peer: usize,
        sending: &mut Sending,
    ) -> Result<bool, ProtocolError> {
        let wire = self.peers.wire(peer);
        loop {
            match path::of(sending.path)
                .send(sending, &mut step_context(OperationId::default(), wire))?
            {
                StepResult::Done => {
                    wire.count_sent(&sending.envelope, sending.path, sending.length);
                    wire.ring_doorbell();
                    return Ok(true);
                }
                StepResult::Progressed => {}
                _ => return Ok(false),
            }
        }
    }

    #[inline(always)]
    pub(super) fn insert_receive(
        &mut self,
        pieces: &[Segment],
        capacity: u64,
        ending: Option<CompletionOptions>,
        part_of: Option<OperationId>,
    ) -> OperationId {
        let (pieces, stage) = (Segments::new(pieces), ReceiveStage::Posted);
        let (peer, arrival, envelope, length) = (usize::MAX, 0, Envelope::default(), 0);
        let receiving = Receiving {
            segments: pieces,
            capacity,
            peer,
            arrival,
            envelope,
            length,
            multi_receive: part_of,
            stage,
        };
        self.operations.insert(OperationKind::Receive(receiving), ending)
    }

    /// Receives a buffered message that is complete, without an operation.
    ///
    /// # Safety
    /// The segments must be valid for writes.
    #[inline]
    unsafe fn receive_buffered(
        &mut self,
        want: &MatchKey,
        pieces: &[Segment],
    ) -> Result<Option<Result<MessageStatus, Error>>, Error> {
        let capacity = check_segments(pieces)?;
        let kept = self.matches.take_unexpected_if(want, UnexpectedPayload::is_complete);
        let Some(Unexpected { source: peer, envelope, message, .. }) = kept else {
            return Ok(None);
        };
        let UnexpectedPayload::Buffered { bytes, .. } = &message else {
            unreachable!("only a buffered message is complete");
        };
        let length = bytes.len() as u64;
        // SAFETY: the caller guarantees the segments; no more is written than they hold.
        unsafe { scatter(pieces, 0, bytes.as_ptr(), length.min(capacity) as usize) };
        self.peers.release_unexpected(peer, message.weight(), message.bytes());
        self.peers.return_remote_credit(peer, length);
        Ok(Some(if length > capacity {
            Err(Error::Truncated { message_bytes: length, buffer_bytes: capacity })
        } else {
            Ok(self.peers.message_status(peer, envelope.tag, length))
        }))
    }

    /// Receives a buffered message.
    ///
    /// # Safety
    /// The segments of the receive must be valid for writes.
    pub(super) unsafe fn receive_unexpected(
        &mut self,
        kept: Unexpected<UnexpectedPayload>,
        number: OperationId,
    ) -> MatchEvent {
        let Unexpected { arrival, source: peer, envelope, message, .. } = kept;
        self.peers.release_unexpected(peer, message.weight(), message.bytes());
        match message {
            UnexpectedPayload::Buffered { bytes, length } => {
                let (arrived, length) = (bytes.len() as u64, length as u64);
                let Some(receiving) = self.operations.receiving(number) else {
                    return MatchEvent::Handled;
                };
                receiving.set_matched(peer, envelope, length);
                let fits = receiving.accepted().min(arrived) as usize;
                // SAFETY: the caller guarantees the segments; no more is written than they hold.
                unsafe { scatter(receiving.segments.as_slice(), 0, bytes.as_ptr(), fits) };
                if arrived == length {
                    self.peers.return_remote_credit(peer, length);
                    self.complete_receive(number);
                    return MatchEvent::Handled;
                }
                // Fragments that have not arrived yet go to the receive.
                receiving.arrival = arrival;
                receiving.stage = ReceiveStage::Arriving { arrived, requested: None };
                let connection = self.peers.connection(peer);
                debug_assert!(matches!(connection.reassembly, Reassembly::Unexpected(_)));
                connection.reassembly = Reassembly::Receive(number);
            }
            UnexpectedPayload::AtSender { length, request } => {
                let outcome =
                    self.on_rts_matched(number, (peer, arrival), envelope, length, request);
                return MatchEvent::Rendezvous { peer, outcome };
            }
            UnexpectedPayload::AtRemoteHost { length, ticket } => {
                self.on_remote_matched(number, (peer, arrival), envelope, length, ticket);
            }
            UnexpectedPayload::Lost => {
                let error = self.peers.disconnect_error(peer);
                self.operations.finish(number, Err(error));
            }
        }
        MatchEvent::Handled
    }

    /// Matches a receive with a buffered message, or posts it.
    ///
    /// # Safety
    /// As for [`PortState::receive`].
    #[inline]
    unsafe fn receive(
        &mut self,
        want: &MatchKey,
        pieces: &[Segment],
        ending: Option<CompletionOptions>,
    ) -> Result<(OperationId, MatchEvent), Error> {
        let capacity = check_segments(pieces)?;
        let kept = self.matches.peek_unexpected(want).map(|found| found.message.is_complete());
        // A complete message needs no capacity: its receive completes and frees the slot at once.
        if kept != Some(true) && !self.operations.has_capacity() {
            return Err(ValidationError::TooManyOperations(self.operations.count()).into());
        }
        if kept.is_none() {
            self.peers.check_source(want)?;
        }
        let number = self.insert_receive(pieces, capacity, ending, None);
        let event = match self.matches.take_unexpected(want) {
            // SAFETY: the receive has the segments that the caller guarantees.
            Some(unexpected) => unsafe { self.receive_unexpected(unexpected, number) },
            None => {
                self.matches.post(*want, PostedReceive::Operation(number), false);
                MatchEvent::Posted
            }
        };
        Ok((number, event))
    }

    /// The first message that a receive would match, if there is one.
    pub(crate) fn probe(&mut self, wanted: &MatchSpec) -> Result<Option<MessageStatus>, Error> {
        let want = self.peers.match_key(wanted)?;
        if let Some(found) = self.matches.peek_unexpected(&want) {
            let (source, tag) = (found.source, found.envelope.tag);
            let length = found.message.length();
            return Ok(Some(self.peers.message_status(source, tag, length)));
        }
        self.probe_source(&want)?;
        Ok(None)
    }

    /// Cancels an operation that is not matched. For an announced send, the receiver is requested to drop the
    /// announcement; its reply determines how the send completes.
    pub(crate) fn cancel(&mut self, number: OperationId) {
        if self.operations.peek(number).is_none() {
            return;
        }
        let cancelled = Error::Cancelled(self.operation_name(number));
        if self.matches.unpost(&PostedReceive::Operation(number)) {
            return self.operations.finish(number, Err(cancelled));
        }
        let Self { operations, peers, .. } = self;
        let Some(sending) = operations.sending(number) else { return };
        let Some(connection) = peers[sending.peer].connection.as_mut() else {
            if peers[sending.peer].remove_queued_send(number) {
                operations.finish(number, Err(cancelled));
            }
            return;
        };
        match sending.stage {
            // The send is queued, or is the first and waits for space.
            SendStage::Queued | SendStage::Streaming { sent: 0, receiver: None, .. } => {
                connection.send_queue.retain(|waiting| *waiting != number);
                connection.wire.clear_blocked();
                operations.finish(number, Err(cancelled));
            }
            SendStage::RtsSent => {
                sending.stage = SendStage::CancelPending;
                connection.wire.send_control(ControlMessage::CancelRts { sender: number });
                connection.wire.ring_doorbell();
            }
            _ => {}
        }
    }
}

#[inline]
pub(super) fn check_segments(pieces: &[Segment]) -> Result<u64, Error> {
    if let [piece] = pieces
        && !piece.address.is_null()
        && piece.length <= isize::MAX as usize
    {
        return Ok(piece.length as u64);
    }
    if pieces.len() > MAX_SEGMENTS {
        return Err(ValidationError::TooManySegments(pieces.len()).into());
    }
    if let Some(piece) = pieces.iter().find(|p| p.address.is_null() && p.length > 0) {
        return Err(ValidationError::NullPointer(piece.length).into());
    }
    match total(pieces) {
        Some(total) if total <= isize::MAX as u64 => Ok(total),
        _ => Err(ValidationError::TooLong.into()),
    }
}
