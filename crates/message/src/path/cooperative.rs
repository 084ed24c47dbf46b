//! `cooperative`: both sides make the copy. The receiver claims chunks from the front and reads
//! them, the sender claims chunks from the back and writes them; a side that is busy claims none,
//! and the other copies more.

use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Protection;

use super::active_copy::{ChunkReport, CopySpec, CopyStatus};
use super::{
    ActiveCopy, MessageBuffers, MessagePath, ReceiveStage, Receiving, RendezvousFetch, SendStage,
    Sending, StepContext, StepResult, copy_failed, send_rts,
};
use crate::connection::{Connection, CopyError, PeerBuffer};
use crate::control::{ControlMessage, RendezvousMode};
use crate::plan::{BufferEnds, PathKind};
use crate::quarantine::ClaimKind;
use crate::ring::cells::ProtocolError;
use crate::ring::claims::SenderProgress;
use crate::segments::{Segment, Segments};

pub(super) struct Cooperative;

/// One side's state of a message that both sides copy.
#[derive(Debug)]
pub(crate) struct CooperativeCopy {
    claim_slot: u16,
    generation: u16,
    chunk_bytes: u64,
    length: u64,
    /// The number of chunks that this side has copied.
    done: u64,
    /// The memory of both sides; set by the sender.
    buffers: Option<Arc<MessageBuffers>>,
    /// Whether copies of mapped memory use non-temporal stores.
    streams: bool,
    /// The ends that this side prefaults before it copies a chunk.
    prefault: BufferEnds,
    /// Writing to the receiver's memory may block for any time: the sender copies on a thread of
    /// its own.
    pub(crate) may_block: bool,
    /// The receiver has failed: it waits for the given number of chunks that the sender has
    /// claimed, and then reports the error.
    failing: Option<(u64, CopyError)>,
    /// The receiver has started to copy the chunk that the sender returned.
    copying_returned: bool,
}

impl CooperativeCopy {
    /// The bytes of all chunks.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Whether this side has copied a chunk.
    pub(crate) fn has_copied(&self) -> bool {
        self.done > 0
    }

    /// The target; set by the sender.
    pub(crate) fn target(&self) -> Option<&PeerBuffer> {
        self.buffers.as_ref().map(|buffers| &buffers.peer)
    }

    /// Sets the memory of both sides, on the sender.
    pub(crate) fn set_buffers(&mut self, local: &Segments, peer: PeerBuffer) {
        self.buffers = Some(MessageBuffers::new(peer, local));
    }

    /// Sets the ends that this side prefaults.
    pub(crate) fn set_prefault(&mut self, ends: BufferEnds) {
        self.prefault = ends;
    }

    fn chunks(&self) -> u64 {
        self.length.div_ceil(self.chunk_bytes)
    }

    /// Describes the copy of a chunk.
    fn copy_spec(&self, index: u64, access: Protection, streaming: Streaming) -> CopySpec {
        let offset = index * self.chunk_bytes;
        let range = offset..self.length.min(offset + self.chunk_bytes);
        let streaming = self.streams.then_some(streaming);
        CopySpec { range, access, streaming, prefault: self.prefault, report: None }
    }
}

/// Creates the sender's state after the receiver's reply. Returns `None` if this side cannot access
/// the target.
pub(crate) fn start_sender_copy(
    connection: &mut Connection,
    mode: &RendezvousMode,
    length: u64,
    stream_bytes: u64,
) -> Result<Option<(Box<CooperativeCopy>, PeerBuffer)>, ProtocolError> {
    let RendezvousMode::Cooperative { claim_slot, generation, chunk_bytes, target, nonresident } =
        *mode
    else {
        return Ok(None);
    };
    let described = connection.decode_buffer(target, length)?;
    let (target, _) = connection.peer_buffer(&described, Protection::ReadWrite);
    if matches!(target, PeerBuffer::Unreachable) {
        return Ok(None);
    }
    let copy = Box::new(CooperativeCopy {
        claim_slot,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        buffers: None,
        streams: length >= stream_bytes,
        prefault: BufferEnds::default(),
        may_block: nonresident && matches!(target, PeerBuffer::CrossMemory { .. }),
        failing: None,
        copying_returned: false,
    });
    Ok(Some((copy, target)))
}

impl MessagePath for Cooperative {
    fn send(
        &self,
        sending: &mut Sending,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        match &mut sending.stage {
            SendStage::Queued => send_rts(sending, context),
            SendStage::Copying(copy) => sender_step(copy, &mut sending.active_copy, context),
            _ => Ok(StepResult::Idle),
        }
    }

    fn begin(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<(), ProtocolError> {
        let length = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let segments = receiving.segments.as_slice();
        fetch.cooperative = open_claims(context, segments, length, fetch)?;
        if fetch.cooperative.is_none() {
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        let StepContext { connection, streaming, may_copy, .. } = context;
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else {
            return Ok(StepResult::Idle);
        };
        let Some(copy) = &mut fetch.cooperative else { return Ok(StepResult::Idle) };
        let slot = connection.memory.claims(true, copy.claim_slot.into());
        let (generation, chunks) = (copy.generation, copy.chunks());
        match ActiveCopy::poll_status(&mut fetch.active_copy, &mut fetch.done) {
            CopyStatus::InFlight => return Ok(StepResult::Idle),
            CopyStatus::NotStarted => {}
            CopyStatus::Done(Ok(())) => copy.done += 1,
            CopyStatus::Done(Err(error)) => {
                let claimed_back = slot.close(generation, chunks)?;
                copy.failing = Some((claimed_back, error));
            }
        }
        let finished = slot.load(generation, chunks)?;
        if let Some((claimed_back, error)) = &copy.failing {
            let released = finished.released() >= *claimed_back;
            let step = if released { copy_failed(*error) } else { StepResult::Idle };
            if released {
                connection.free_claim_slot(copy.claim_slot, generation);
            }
            return Ok(step);
        }
        if copy.done + finished.chunks > chunks {
            return Err(ProtocolError("more chunks finished than exist"));
        }
        if copy.done + finished.chunks == chunks {
            slot.close(generation, chunks)?;
            connection.free_claim_slot(copy.claim_slot, generation);
            return Ok(StepResult::Done);
        }
        // The receiver copies the chunk that the sender returned, once.
        let returned = finished.returned.filter(|_| !copy.copying_returned);
        let is_mapped = fetch.buffers.is_mapped();
        if !*may_copy && !is_mapped {
            let has_more = returned.is_some() || slot.has_unclaimed(generation, chunks);
            return Ok(if has_more { StepResult::CopyPending } else { StepResult::Idle });
        }
        let claimed = slot.claim_front(generation, chunks)?;
        let Some(chunk) = claimed.or(returned) else { return Ok(StepResult::Idle) };
        copy.copying_returned |= claimed.is_none();
        let part = copy.copy_spec(chunk, Protection::ReadOnly, *streaming);
        if is_mapped {
            // SAFETY: the operation is in flight, so its owner guarantees the segments; this side
            // alone has claimed the chunk.
            match unsafe { fetch.buffers.copy(&part) } {
                Ok(()) => copy.done += 1,
                Err(error) => {
                    let claimed_back = slot.close(generation, chunks)?;
                    copy.failing = Some((claimed_back, error));
                }
            }
            // The next step, which the caller makes at once, detects the end.
            return Ok(StepResult::Progressed);
        }
        // SAFETY: the operation is in flight, so its owner guarantees the segments, and it does not
        // complete before the copy; this side alone has claimed the chunk.
        fetch.active_copy = Some(unsafe { ActiveCopy::new(&fetch.buffers, part) });
        Ok(StepResult::CopyPending)
    }

    fn revoke(&self, receiving: &mut Receiving, connection: &mut Connection) -> Option<ClaimKind> {
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return None };
        let copy = fetch.cooperative.as_mut()?;
        let claim_slot = copy.claim_slot;
        let slot = connection.memory.claims(true, claim_slot.into());
        let (generation, chunks) = (copy.generation, copy.chunks());
        let claimed = match &copy.failing {
            Some((claimed, _)) => *claimed,
            None => slot.close(generation, chunks).unwrap_or(0),
        };
        (claimed > 0).then_some(ClaimKind::Chunks { claim_slot, generation, chunks, claimed })
    }
}

/// Opens a claim slot and sends the target to the sender. Returns `None` if all slots are in use.
fn open_claims(
    context: &mut StepContext<'_>,
    segments: &[Segment],
    length: u64,
    fetch: &RendezvousFetch,
) -> Result<Option<CooperativeCopy>, ProtocolError> {
    let RendezvousFetch { sender, plan, target_nonresident: nonresident, .. } = fetch;
    let (sender, nonresident) = (*sender, *nonresident);
    let (connection, receiver) = (&mut *context.connection, context.operation);
    let Some((claim_slot, generation)) = connection.alloc_claim_slot() else { return Ok(None) };
    connection.memory.claims(true, claim_slot.into()).open(generation);
    let chunk_bytes = plan.chunk_bytes;
    // Without space for the segment list the sender gets no reply, and this side copies all chunks.
    if let Some(target) = connection.encode_buffer(segments, Protection::ReadWrite)? {
        let mode = RendezvousMode::Cooperative {
            claim_slot,
            generation,
            chunk_bytes,
            target,
            nonresident,
        };
        connection.send_control(ControlMessage::Cts { sender, receiver, length, mode });
        connection.ring_doorbell();
    }
    Ok(Some(CooperativeCopy {
        claim_slot,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        buffers: None,
        streams: plan.streams,
        may_block: false,
        prefault: plan.prefault.ends,
        failing: None,
        copying_returned: false,
    }))
}

/// Copies one chunk on the sender, if one is left.
fn sender_step(
    copy: &mut CooperativeCopy,
    active_copy: &mut Option<Arc<ActiveCopy>>,
    context: &mut StepContext<'_>,
) -> Result<StepResult, ProtocolError> {
    let StepContext { connection, streaming, may_copy, .. } = context;
    let (generation, chunks) = (copy.generation, copy.chunks());
    let mut result = StepResult::Idle;
    match ActiveCopy::poll_status(active_copy, &mut 0) {
        CopyStatus::InFlight => return Ok(StepResult::Idle),
        CopyStatus::NotStarted => {}
        CopyStatus::Done(copied) => {
            sender_chunk_done(copy, connection, copied);
            result = StepResult::Progressed;
        }
    }
    let Some(buffers) = &copy.buffers else { return Ok(result) };
    let record = connection.memory.claims(false, copy.claim_slot.into());
    let is_mapped = buffers.is_mapped();
    if !*may_copy && !is_mapped {
        let has_more = record.has_unclaimed(generation, chunks);
        return Ok(if has_more { StepResult::CopyPending } else { result });
    }
    let Some(chunk) = record.claim_back(generation, chunks)? else {
        copy.buffers = None;
        return Ok(result);
    };
    let mut part = copy.copy_spec(chunk, Protection::ReadWrite, *streaming);
    if is_mapped {
        // SAFETY: the operation is in flight, so its owner guarantees the segments; the receiver
        // has sent the target for this copy, and this side alone has claimed the chunk.
        let copied = unsafe { buffers.copy(&part) };
        record.publish(generation, SenderProgress::after(copy.done, chunk, copied.is_ok()));
        sender_chunk_done(copy, connection, copied);
        return Ok(StepResult::Progressed);
    }
    let (memory, record, done) = (connection.memory.clone(), copy.claim_slot, copy.done);
    part.report = Some(ChunkReport { memory, claim_slot: record, generation, chunk, done });
    // SAFETY: as above, and the operation does not complete before the copy.
    *active_copy = Some(unsafe { ActiveCopy::new(buffers, part) });
    Ok(StepResult::CopyPending)
}

/// Records that the sender has copied a chunk or could not copy it.
fn sender_chunk_done(
    copy: &mut CooperativeCopy,
    connection: &mut Connection,
    copied: Result<(), CopyError>,
) {
    let slot = connection.memory.claims(false, copy.claim_slot.into());
    let has_more = slot.has_unclaimed(copy.generation, copy.chunks());
    match copied {
        Ok(()) => copy.done += 1,
        Err(error) => {
            // This side cannot copy the chunk, or not all of it: the receiver copies the rest.
            copy.buffers = None;
            connection.record_refusal(error, Protection::ReadWrite);
        }
    }
    if copied.is_err() || !has_more {
        connection.defer_doorbell();
    }
}
