//! `cooperative`: one copy, by both sides. The receiver claims chunks from the front and reads
//! them, the sender claims from the back and writes them; a side that is busy elsewhere claims
//! none, and the other does its share.

use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Access;

use super::copying::{Last, Part, Tell};
use super::{
    Copying, Fetch, Path, ReceiveStage, Receiving, SendStage, Sending, Sides, Step, Turn, announce,
    copy_failed,
};
use crate::connection::{CopyError, View, Wire};
use crate::pieces::{Piece, Pieces};
use crate::plan::{Ends, PathKind};
use crate::quarantine::Claimed;
use crate::ring::cells::Nonsense;
use crate::ring::record::Finished;
use crate::wire::{Manner, Note};

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
    /// The memory of both, for the sender.
    sides: Option<Arc<Sides>>,
    /// Whether plain copies go around the caches.
    streams: bool,
    /// What this side brings in of the chunks that it copies.
    populates: Ends,
    /// The receiver's memory may never come: a thread of its own copies for the sender.
    pub(crate) is_slow: bool,
    /// The receiver stops: what the sender has claimed is waited for, then this is the end.
    failing: Option<(u64, CopyError)>,
    /// The receiver has begun to copy the chunk that the sender gave back.
    took_returned: bool,
}

impl Together {
    /// The bytes of all chunks.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The target, for the sender.
    pub(crate) fn target(&self) -> Option<&View> {
        self.sides.as_ref().map(|sides| &sides.theirs)
    }

    /// The sender is to copy from these pieces to the receiver's memory.
    pub(crate) fn help_from(&mut self, ours: &Pieces, theirs: View) {
        self.sides = Some(Sides::new(theirs, ours));
    }

    /// Brings in these ends of the chunks that this side copies.
    pub(crate) fn populate(&mut self, ends: Ends) {
        self.populates = ends;
    }

    fn chunks(&self) -> u64 {
        self.length.div_ceil(self.chunk_bytes)
    }

    /// The copy of a chunk.
    fn part(&self, index: u64, access: Access, streaming: Streaming) -> Part {
        let offset = index * self.chunk_bytes;
        let range = offset..self.length.min(offset + self.chunk_bytes);
        let streaming = self.streams.then_some(streaming);
        Part { range, access, streaming, populates: self.populates, tell: None }
    }
}

/// The receiver lets the sender help: its view of that. `None` if it cannot get at the target.
pub(crate) fn begin_helping(
    wire: &mut Wire,
    manner: &Manner,
    length: u64,
    stream_bytes: u64,
) -> Result<Option<(Box<Together>, View)>, Nonsense> {
    let Manner::Together { record, generation, chunk_bytes, target, absent } = *manner else {
        return Ok(None);
    };
    let described = wire.read_place(target, length)?;
    let (target, _) = wire.view(&described, Access::Write);
    if matches!(target, View::Nowhere) {
        return Ok(None);
    }
    let together = Box::new(Together {
        record,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        sides: None,
        streams: length >= stream_bytes,
        populates: Ends::default(),
        is_slow: absent && matches!(target, View::Cross { .. }),
        failing: None,
        took_returned: false,
    });
    Ok(Some((together, target)))
}

impl Path for Cooperative {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        match &mut sending.stage {
            SendStage::Queued => announce(sending, turn),
            SendStage::Helping(together) => help(together, &mut sending.copying, turn),
            _ => Ok(Step::Idle),
        }
    }

    fn begin(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        let length = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let pieces = receiving.pieces.as_slice();
        fetch.together = open(turn, pieces, length, fetch)?;
        if fetch.together.is_none() {
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let Turn { wire, streaming, may_copy, .. } = turn;
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        let Some(together) = &mut fetch.together else { return Ok(Step::Idle) };
        let record = wire.memory.record(true, together.record.into());
        let (generation, chunks) = (together.generation, together.chunks());
        match Copying::collect(&mut fetch.copying, &mut fetch.done) {
            Last::UnderWay => return Ok(Step::Idle),
            Last::Nothing => {}
            Last::Over(Ok(())) => together.done += 1,
            Last::Over(Err(error)) => {
                let held = record.close(generation, chunks)?;
                together.failing = Some((held, error));
            }
        }
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
        if together.done + finished.chunks == chunks {
            record.close(generation, chunks)?;
            wire.return_record(together.record, generation);
            return Ok(Step::Done);
        }
        // What the sender gave back is done here, once.
        let returned = finished.returned.filter(|_| !together.took_returned);
        let is_near = fetch.sides.is_near();
        if !*may_copy && !is_near {
            let has_more = returned.is_some() || record.has_unclaimed(generation, chunks);
            return Ok(if has_more { Step::Copy } else { Step::Idle });
        }
        let claimed = record.claim_front(generation, chunks)?;
        let Some(chunk) = claimed.or(returned) else { return Ok(Step::Idle) };
        together.took_returned |= claimed.is_none();
        let part = together.part(chunk, Access::Read, *streaming);
        if is_near {
            // SAFETY: the operation is under way, so its owner vouches for the pieces; the chunk is this
            // side's alone.
            match unsafe { fetch.sides.copy(&part) } {
                Ok(()) => together.done += 1,
                Err(error) => {
                    let held = record.close(generation, chunks)?;
                    together.failing = Some((held, error));
                }
            }
            // The end is seen in the next step, which is made at once.
            return Ok(Step::Moved);
        }
        // SAFETY: the operation is under way, so its owner vouches for the pieces, and it is not over
        // before the copy is; the chunk is this side's alone.
        fetch.copying = Some(unsafe { Copying::new(&fetch.sides, part) });
        Ok(Step::Copy)
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
    fetch: &Fetch,
) -> Result<Option<Together>, Nonsense> {
    let Fetch { sender, plan, is_target_absent: absent, .. } = fetch;
    let (sender, absent) = (*sender, *absent);
    let (wire, receiver) = (&mut *turn.wire, turn.number);
    let Some((record, generation)) = wire.take_record() else { return Ok(None) };
    wire.memory.record(true, record.into()).open(generation);
    let chunk_bytes = plan.chunk_bytes;
    // Without room for the list of pieces the sender is not asked: this side does it all.
    if let Some(target) = wire.describe(pieces, Access::Write)? {
        let manner = Manner::Together { record, generation, chunk_bytes, target, absent };
        wire.post(Note::Accept { sender, receiver, length, manner });
        wire.announce();
    }
    Ok(Some(Together {
        record,
        generation,
        chunk_bytes: chunk_bytes.into(),
        length,
        done: 0,
        sides: None,
        streams: plan.streams,
        is_slow: false,
        populates: plan.populating.ends,
        failing: None,
        took_returned: false,
    }))
}

/// The sender copies one chunk, if one is left.
fn help(
    together: &mut Together,
    copying: &mut Option<Arc<Copying>>,
    turn: &mut Turn<'_>,
) -> Result<Step, Nonsense> {
    let Turn { wire, streaming, may_copy, .. } = turn;
    let (generation, chunks) = (together.generation, together.chunks());
    let mut moved = Step::Idle;
    match Copying::collect(copying, &mut 0) {
        Last::UnderWay => return Ok(Step::Idle),
        Last::Nothing => {}
        Last::Over(copied) => {
            helped(together, wire, copied);
            moved = Step::Moved;
        }
    }
    let Some(sides) = &together.sides else { return Ok(moved) };
    let record = wire.memory.record(false, together.record.into());
    let is_near = sides.is_near();
    if !*may_copy && !is_near {
        let has_more = record.has_unclaimed(generation, chunks);
        return Ok(if has_more { Step::Copy } else { moved });
    }
    let Some(chunk) = record.claim_back(generation, chunks)? else {
        together.sides = None;
        return Ok(moved);
    };
    let mut part = together.part(chunk, Access::Write, *streaming);
    if is_near {
        // SAFETY: the operation is under way, so its owner vouches for the pieces; the receiver named the
        // target for this, and the chunk is this side's alone.
        let copied = unsafe { sides.copy(&part) };
        record.tell(generation, Finished::after(together.done, chunk, copied.is_ok()));
        helped(together, wire, copied);
        return Ok(Step::Moved);
    }
    let (memory, record, done) = (wire.memory.clone(), together.record, together.done);
    part.tell = Some(Tell { memory, record, generation, chunk, done });
    // SAFETY: as above, and the operation is not over before the copy is.
    *copying = Some(unsafe { Copying::new(sides, part) });
    Ok(Step::Copy)
}

/// The sender has copied a chunk, or could not.
fn helped(together: &mut Together, wire: &mut Wire, copied: Result<(), CopyError>) {
    let record = wire.memory.record(false, together.record.into());
    let has_more = record.has_unclaimed(together.generation, together.chunks());
    match copied {
        Ok(()) => together.done += 1,
        Err(error) => {
            // This side cannot copy, or not all of it: the receiver does the rest.
            together.sides = None;
            wire.note_refusal(error, Access::Write);
        }
    }
    if copied.is_err() || !has_more {
        wire.announce_later();
    }
}
