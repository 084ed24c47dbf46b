//! `cooperative`: one copy, by both sides. The receiver claims chunks from the front and reads
//! them, the sender claims from the back and writes them; a side that is busy elsewhere claims
//! none, and the other does its share.

use memferry_sys::shared_memory::Access;

use super::{
    Path, ReceiveStage, Receiving, SendStage, Sending, Step, Turn, announce, copy_failed, pinning,
};
use crate::connection::{CopyError, View, Wire};
use crate::pieces::Piece;
use crate::plan::{Ends, PathKind, Plan};
use crate::quarantine::Claimed;
use crate::ring::cells::Nonsense;
use crate::ring::record::Finished;
use crate::wire::{Manner, Note, Number};

pub(super) struct Cooperative;

/// One side's account of a message that both copy.
#[derive(Debug)]
pub(crate) struct Together {
    record: u16,
    generation: u16,
    chunk_bytes: u64,
    length: u64,
    /// Chunks that this side has copied.
    done: u64,
    /// The receiver's memory, for the sender.
    target: Option<View>,
    /// Whether plain copies go around the caches.
    streams: bool,
    /// What this side brings in of the chunks that it copies.
    populates: Ends,
    /// The receiver stops: what the sender has claimed is waited for, then this is the end.
    failing: Option<(u64, CopyError)>,
    /// The receiver has copied the chunk that the sender gave back.
    returned_done: bool,
}

impl Together {
    /// The bytes of all chunks.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The target, for the sender.
    pub(crate) fn target(&self) -> Option<&View> {
        self.target.as_ref()
    }

    /// Brings in these ends of the chunks that this side copies.
    pub(crate) fn populate(&mut self, ends: Ends) {
        self.populates = ends;
    }

    fn chunks(&self) -> u64 {
        self.length.div_ceil(self.chunk_bytes)
    }

    /// Where a chunk lies.
    fn chunk(&self, index: u64) -> (u64, u64) {
        let offset = index * self.chunk_bytes;
        (offset, (self.length - offset).min(self.chunk_bytes))
    }
}

/// The receiver lets the sender help: its view of that. `None` if it cannot get at the target.
pub(crate) fn begin_helping(
    wire: &mut Wire,
    manner: &Manner,
    length: u64,
    stream_bytes: u64,
) -> Result<Option<Box<Together>>, Nonsense> {
    let Manner::Together { record, generation, chunk_bytes, target } = *manner else {
        return Ok(None);
    };
    let described = wire.read_place(target, length)?;
    let (target, _) = wire.view(&described, Access::Write);
    if matches!(target, View::Nowhere) {
        return Ok(None);
    }
    Ok(Some(Box::new(Together {
        record,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        target: Some(target),
        streams: length >= stream_bytes,
        populates: Ends::default(),
        failing: None,
        returned_done: false,
    })))
}

impl Path for Cooperative {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let pieces = sending.pieces.as_slice();
        match &mut sending.stage {
            SendStage::Queued => announce(sending, turn),
            SendStage::Helping(together) => help(together, pieces, turn),
            _ => Ok(Step::Idle),
        }
    }

    fn begin(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        let length = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let pieces = receiving.pieces.as_slice();
        fetch.together = open(turn, pieces, length, &fetch.plan, fetch.sender)?;
        if fetch.together.is_none() {
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let Turn { wire, streaming, .. } = turn;
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        let pieces = receiving.pieces.as_slice();
        let Some(together) = &mut fetch.together else { return Ok(Step::Idle) };
        let record = wire.memory.record(true, together.record.into());
        let (generation, chunks) = (together.generation, together.chunks());
        let claimed = match together.failing {
            None => record.claim_front(generation, chunks)?,
            Some(_) => None,
        };
        // What the sender gave back is done here, once.
        let finished = record.told(generation, chunks);
        let returned = match (&finished, together.failing.is_some()) {
            (Ok(Finished { returned: Some(chunk), .. }), false) if !together.returned_done => {
                Some(*chunk)
            }
            _ => None,
        };
        if let Some(chunk) = claimed.or(returned) {
            let (offset, bytes) = together.chunk(chunk);
            let streaming = together.streams.then_some(*streaming);
            // SAFETY: the operation is under way, so its owner vouches for the pieces; the chunk
            // is this side's alone.
            let copied = unsafe {
                let (part, populates) = (offset..offset + bytes, together.populates);
                pinning::copy(&fetch.source, pieces, part, Access::Read, streaming, populates)
            };
            if let Err(error) = copied {
                let held = record.close(generation, chunks)?;
                together.failing = Some((held, error));
                return Ok(Step::Moved);
            }
            together.done += 1;
            together.returned_done |= claimed.is_none();
        }
        let record = wire.memory.record(true, together.record.into());
        let finished = record.told(generation, chunks)?;
        if let Some((held, error)) = &together.failing {
            let over = finished.given_up() >= *held;
            let step = if over { copy_failed(*error) } else { Step::Idle };
            if over {
                wire.return_record(together.record, generation);
            }
            return Ok(step);
        }
        if together.done + finished.chunks > chunks {
            return Err(Nonsense("more chunks finished than there are"));
        }
        if together.done + finished.chunks < chunks {
            let moved = claimed.or(returned).is_some();
            return Ok(if moved { Step::Moved } else { Step::Idle });
        }
        record.close(generation, chunks)?;
        wire.return_record(together.record, generation);
        Ok(Step::Done)
    }

    fn give_up(&self, receiving: &mut Receiving, wire: &mut Wire) -> Option<Claimed> {
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return None };
        let together = fetch.together.as_mut()?;
        let number = together.record;
        let record = wire.memory.record(true, number.into());
        let (generation, chunks) = (together.generation, together.chunks());
        let claimed = match &together.failing {
            Some((claimed, _)) => *claimed,
            None => record.close(generation, chunks).unwrap_or(0),
        };
        (claimed > 0).then_some(Claimed::Chunks { record: number, generation, chunks, claimed })
    }
}

/// Opens a record and tells the sender where the target is. `None` if all records are in use.
fn open(
    turn: &mut Turn<'_>,
    pieces: &[Piece],
    length: u64,
    plan: &Plan,
    sender: Number,
) -> Result<Option<Together>, Nonsense> {
    let (wire, receiver) = (&mut *turn.wire, turn.number);
    let Some((record, generation)) = wire.take_record() else { return Ok(None) };
    wire.memory.record(true, record.into()).open(generation);
    let chunk_bytes = plan.chunk_bytes;
    // Without room for the list of pieces the sender is not asked: this side does it all.
    if let Some(target) = wire.describe(pieces, Access::Write)? {
        let manner = Manner::Together { record, generation, chunk_bytes, target };
        wire.post(Note::Accept { sender, receiver, length, manner });
        wire.announce();
    }
    Ok(Some(Together {
        record,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        target: None,
        streams: plan.streams,
        populates: plan.populating.ends,
        failing: None,
        returned_done: false,
    }))
}

/// The sender copies one chunk, if one is left.
fn help(together: &mut Together, pieces: &[Piece], turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
    let Turn { wire, streaming, .. } = turn;
    let record = wire.memory.record(false, together.record.into());
    let (generation, chunks) = (together.generation, together.chunks());
    let Some(target) = &together.target else { return Ok(Step::Idle) };
    let Some(chunk) = record.claim_back(generation, chunks)? else {
        together.target = None;
        return Ok(Step::Idle);
    };
    let (offset, bytes) = together.chunk(chunk);
    let streaming = together.streams.then_some(*streaming);
    // SAFETY: the operation is under way, so its owner vouches for the pieces; the receiver named
    // the target for this, and the chunk is this side's alone.
    let copied = unsafe {
        let (part, populates) = (offset..offset + bytes, together.populates);
        pinning::copy(target, pieces, part, Access::Write, streaming, populates)
    };
    let returned = copied.is_err().then_some(chunk);
    together.done += u64::from(copied.is_ok());
    record.tell(generation, Finished { chunks: together.done, returned });
    if returned.is_some() {
        // This side cannot copy, or not all of it: the receiver does the rest.
        together.target = None;
    }
    if returned.is_some() || !record.has_unclaimed(generation, chunks) {
        wire.announce_later();
    }
    if let Err(error) = copied {
        wire.note_refusal(error, Access::Write);
    }
    Ok(Step::Moved)
}
