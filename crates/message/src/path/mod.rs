//! The paths of messages, one file for each, behind one trait.
//!
//! A path performs the next step of a message, for the sender or the receiver, and never blocks: a
//! step that is not possible now is repeated later. The state of a message is in [`Sending`] and
//! [`Receiving`]; a path has no state.

mod active_copy;
mod cooperative;
mod eager;
mod inline;
mod offload;
mod pinning;
mod pipeline;
mod residency;
mod single;
mod stream;

use std::sync::Arc;

use memferry_copy::Ferry;
use memferry_sys::copy::stream::Streaming;

use crate::connection::{Connection, CopyError, RemoteSegments};
use crate::control::OperationId;
use crate::envelope::Envelope;
use crate::error::{Error, MemorySide};
use crate::plan::{MessagePlan, MessageReason, PathKind};
use crate::port::MessageStatus;
use crate::quarantine::{Claim, ClaimKind};
use crate::ring::cells::ProtocolError;
use crate::segments::Segments;
use offload::OffloadProgress;

/// The result of a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StepResult {
    /// No step was possible.
    Idle,
    /// A step was done, and another may be possible at once.
    Progressed,
    /// The message has a copy to make, which the caller makes after it has released the lock. The
    /// copy is described only if the step context permits copies.
    CopyPending,
    /// This side's part of the message is complete.
    Done,
    /// The message failed, and its operation with it.
    Failed(Error),
    /// The kernel refuses to copy: the peer has exited, or the message must change its path. No
    /// thread writes to its memory at this time.
    CopyRefused(CopyError),
}

/// The inputs of a step, besides the message.
pub(crate) struct StepContext<'a> {
    /// The number of the operation.
    pub(crate) operation: OperationId,
    /// The connection.
    pub(crate) connection: &'a mut Connection,
    /// The fastest method of non-temporal stores.
    pub(crate) streaming: Streaming,
    /// Whether the caller makes a copy that is due.
    pub(crate) may_copy: bool,
    /// Returns the copy core with the engines. It is built when it is first needed.
    pub(crate) ferry: fn() -> Option<&'static Ferry>,
}

/// An outgoing message.
#[derive(Debug)]
pub(crate) struct Sending {
    /// The index of the receiver.
    pub(crate) peer: usize,
    pub(crate) envelope: Envelope,
    pub(crate) segments: Segments,
    pub(crate) length: u64,
    pub(crate) path: PathKind,
    pub(crate) chunk_bytes: u32,
    /// Receives were pending when the message was posted.
    pub(crate) has_receives: bool,
    /// The memory of the message may not be resident: reading it may block for any time.
    pub(crate) nonresident: bool,
    /// The copy that this side makes for the receiver.
    pub(crate) active_copy: Option<Arc<ActiveCopy>>,
    /// When a message that is announced was posted; 0 for others.
    pub(crate) started_ns: u64,
    pub(crate) stage: SendStage,
}

/// The stage of an outgoing message.
#[derive(Debug)]
pub(crate) enum SendStage {
    /// Nothing is sent.
    Queued,
    /// `sent` bytes are in the bounce ring or were taken from there; `receiver` is the receiver's
    /// number if the receiver requested the message.
    Streaming { sent: u64, receiver: Option<OperationId>, until: u64 },
    /// The message is announced.
    RtsSent,
    /// This side copies chunks of the message together with the receiver.
    Copying(Box<CooperativeCopy>),
    /// The announcement is to be cancelled, and the receiver has not replied.
    CancelPending,
    /// The remote transport has the message.
    Remote,
    /// The message has ended, and completes when no thread of this process reads its memory.
    Quiescing(Box<QuiesceState>),
}

/// An incoming message.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) segments: Segments,
    /// The bytes of all segments.
    pub(crate) capacity: u64,
    /// The index of the sender, once the receive is matched.
    pub(crate) peer: usize,
    /// The arrival number of a message that was not complete when it was matched.
    pub(crate) arrival: u64,
    pub(crate) envelope: Envelope,
    /// The length of the message, once the receive is matched.
    pub(crate) length: u64,
    /// The receive of several messages that this one is a part of.
    pub(crate) multi_receive: Option<OperationId>,
    pub(crate) stage: ReceiveStage,
}

/// The stage of an incoming message.
#[derive(Debug)]
pub(crate) enum ReceiveStage {
    /// No message has matched.
    Posted,
    /// `arrived` bytes of the message have come through the bounce ring.
    Arriving { arrived: u64, requested: Option<PipelineRequest> },
    /// The message is announced and matched. The path is chosen when this side makes progress: if
    /// it has a message for the sender by then, each side copies one of the two.
    RtsMatched { sender: OperationId, source: RemoteSegments, core: u16, nonresident: bool },
    /// The message is complete, and the FIN waits for a free cell.
    FinPending { sender: OperationId },
    /// The payload is being fetched from the sender's memory.
    Fetching(Box<RendezvousFetch>),
    /// The remote transport delivers the message.
    Remote,
    /// The receive has ended, and completes when no peer or thread writes to its memory.
    Quiescing(Box<QuiesceState>),
}

/// A message that has ended while a peer or a thread still accessed its memory.
#[derive(Debug)]
pub(crate) struct QuiesceState {
    pub(crate) claims: Vec<Claim>,
    pub(crate) outcome: Result<MessageStatus, Error>,
    pub(crate) since_ns: u64,
}

/// A message that comes through the bounce ring at the request of this side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PipelineRequest {
    /// The sender's number of the message.
    pub(crate) sender: OperationId,
    /// The bytes of the target that are prefaulted, if the plan prefaults.
    pub(crate) prefaulted: Option<u64>,
}

/// A message that is fetched from the sender's memory.
#[derive(Debug)]
pub(crate) struct RendezvousFetch {
    /// The sender's number of the message.
    pub(crate) sender: OperationId,
    pub(crate) plan: MessagePlan,
    pub(crate) buffers: Arc<MessageBuffers>,
    /// The bytes that this side has copied.
    pub(crate) done: u64,
    pub(crate) cooperative: Option<CooperativeCopy>,
    pub(crate) offload: Option<OffloadProgress>,
    /// The copy that this side makes.
    pub(crate) active_copy: Option<Arc<ActiveCopy>>,
    /// Reading the source may block for any time.
    pub(crate) may_block: bool,
    /// The target is not resident; the sender must know this before it copies.
    pub(crate) target_nonresident: bool,
}

impl Sending {
    /// Returns whether this side copies into a target that may block for any time.
    pub(crate) fn sender_may_block(&self) -> bool {
        matches!(&self.stage, SendStage::Copying(copy) if copy.may_block)
    }
}

impl Receiving {
    /// Returns whether an engine of this process copies the message.
    pub(crate) fn is_offloaded(&self) -> bool {
        matches!(&self.stage, ReceiveStage::Fetching(fetch) if fetch.offload.is_some())
    }

    /// Returns whether one copy of the whole message is in flight.
    pub(crate) fn is_in_single_copy(&self) -> bool {
        let ReceiveStage::Fetching(fetch) = &self.stage else { return false };
        let is_short = self.accepted() <= fetch.plan.chunk_bytes.into();
        is_short && !fetch.may_block && fetch.active_copy.as_ref().is_some_and(|c| c.is_in_flight())
    }

    /// Returns whether the message is short and was left to the sender, which copies all of it or
    /// nothing, and is not complete.
    pub(crate) fn is_left_to_sender(&self) -> bool {
        matches!(&self.stage, ReceiveStage::Fetching(fetch) if fetch.plan.reason == MessageReason::ReceivedAhead)
    }

    /// The number of bytes of the message that fit.
    pub(crate) fn accepted(&self) -> u64 {
        self.length.min(self.capacity)
    }
}

/// A path of messages.
pub(crate) trait MessagePath: Sync {
    /// The sender's next step. By default it announces the message, and the receiver does the rest.
    fn send(
        &self,
        sending: &mut Sending,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        match sending.stage {
            SendStage::Queued => send_rts(sending, context),
            _ => Ok(StepResult::Idle),
        }
    }

    /// Starts the receiver's side after the match: informs the sender or the engines. Copies
    /// nothing.
    fn begin(
        &self,
        _receiving: &mut Receiving,
        _context: &mut StepContext<'_>,
    ) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// The receiver's next step after the match. By default there is nothing left to do.
    fn receive(
        &self,
        _: &mut Receiving,
        _: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        Ok(StepResult::Done)
    }

    /// Prepares the end of a receive: the peer can claim nothing more of its memory. Returns the
    /// peer's claims, if it may still write there.
    fn revoke(
        &self,
        _receiving: &mut Receiving,
        _connection: &mut Connection,
    ) -> Option<ClaimKind> {
        None
    }
}

/// The implementation of a path.
pub(crate) fn of(kind: PathKind) -> &'static dyn MessagePath {
    match kind {
        PathKind::Inline => &inline::Inline,
        PathKind::Eager => &eager::Eager,
        PathKind::Single => &single::Single,
        PathKind::Cooperative => &cooperative::Cooperative,
        PathKind::Offload => &offload::Offload,
        PathKind::Pipeline => &pipeline::Pipeline,
    }
}

pub(crate) use active_copy::{ActiveCopy, MessageBuffers};
pub(crate) use cooperative::{CooperativeCopy, start_sender_copy};
pub(crate) use eager::write_eager;
pub(crate) use inline::write_inline;
pub(crate) use pinning::copy_now;
pub(crate) use residency::ResidencyCache;
pub(crate) use single::start_blocking_copy;
pub(crate) use stream::receive_fragment;

/// The result of a step whose copy failed.
fn copy_failed(error: CopyError) -> StepResult {
    match error {
        CopyError::Fault(side) => StepResult::Failed(Error::BadMemory(side)),
        CopyError::Refused(_) => StepResult::CopyRefused(error),
    }
}

/// Announces a message that stays in this side's memory. Used by all rendezvous paths.
fn send_rts(
    sending: &mut Sending,
    context: &mut StepContext<'_>,
) -> Result<StepResult, ProtocolError> {
    let (connection, number) = (&mut *context.connection, context.operation);
    use crate::control::ControlMessage;
    use memferry_sys::shared_memory::Protection;
    if !connection.has_credit()? || !connection.accepts_rts() {
        return Ok(StepResult::Idle);
    }
    let Some(source) =
        connection.encode_buffer(sending.segments.as_slice(), Protection::ReadOnly)?
    else {
        return Ok(StepResult::Idle);
    };
    // Sharing a region may have taken the last credit.
    if !connection.has_credit()? {
        return Ok(StepResult::Idle);
    }
    let core = memferry_sys::affinity::current_core() as u16;
    let Sending { envelope, length, has_receives, nonresident, .. } = *sending;
    let sender = number;
    connection.write(
        &ControlMessage::Rts { envelope, length, sender, source, core, has_receives, nonresident }
            .encode(),
    );
    sending.stage = SendStage::RtsSent;
    Ok(StepResult::Progressed)
}

/// Decodes the error that the receiver reported.
pub(crate) fn error_from_code(error: u16) -> Option<Error> {
    match error {
        0 => None,
        1 => Some(Error::BadMemory(MemorySide::Local)),
        _ => Some(Error::BadMemory(MemorySide::Peer)),
    }
}

/// Encodes an error for the sender: the receiver's memory is the peer's memory there, and vice
/// versa.
pub(crate) fn error_code(error: &Error) -> u16 {
    match error {
        Error::BadMemory(MemorySide::Peer) => 1,
        _ => 2,
    }
}
