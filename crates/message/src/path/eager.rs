//! `eager`: through the shared space at once, without asking the receiver.

use super::{Path, SendStage, Sending, Step, Turn, stream};
use crate::connection::Wire;
use crate::envelope::Envelope;
use crate::pieces::{Piece, gather};
use crate::ring::cells::Nonsense;
use crate::wire::Note;

pub(super) struct Eager;

/// Writes a message that fits one fragment, if there is room.
///
/// # Safety
/// The pieces must be valid for reads of `length` bytes.
#[inline]
pub(crate) unsafe fn put_eager(
    wire: &mut Wire,
    envelope: &Envelope,
    pieces: &[Piece],
    length: usize,
) -> Result<bool, Nonsense> {
    if !wire.has_room()? {
        return Ok(false);
    }
    let Some(first) = wire.give_out(length)? else { return Ok(false) };
    // SAFETY: the pieces are the caller's promise; the span is this side's until the cell that
    // names it is written.
    unsafe { gather(pieces, 0, wire.outgoing(first), length) };
    wire.write(&Note::Eager { envelope: *envelope, length: length as u64, first }.encode());
    Ok(true)
}

impl Path for Eager {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        if let SendStage::Queued = sending.stage {
            let until = sending.length;
            sending.stage = SendStage::Streaming { sent: 0, receiver: None, until };
        }
        stream::send_fragment(sending, turn.wire)
    }
}
