//! `inline`: the payload is in the cell, one cache line for the whole message.

use super::{Path, Sending, Step, Turn};
use crate::connection::Wire;
use crate::envelope::Envelope;
use crate::pieces::{Piece, gather};
use crate::ring::cells::Nonsense;
use crate::wire::{INLINE_BYTES, inline_limit, inline_words};

pub(super) struct Inline;

/// Writes a message that is no longer than [`inline_limit`] says if there is room.
///
/// # Safety
/// The pieces must be valid for reads of `length` bytes.
#[inline]
pub(crate) unsafe fn put_inline(
    wire: &mut Wire,
    envelope: &Envelope,
    pieces: &[Piece],
    length: usize,
) -> Result<bool, Nonsense> {
    debug_assert!(length <= inline_limit(envelope));
    if !wire.has_room()? {
        return Ok(false);
    }
    let mut payload = [0u64; INLINE_BYTES / 8];
    // SAFETY: the payload has room for the length; the pieces are the caller's promise.
    unsafe { gather(pieces, 0, payload.as_mut_ptr().cast(), length) };
    wire.write(&inline_words(envelope, length as u8, &payload));
    Ok(true)
}

impl Path for Inline {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let (envelope, length) = (sending.envelope, sending.length as usize);
        // SAFETY: the operation is under way, so its owner vouches for the memory.
        let written =
            unsafe { put_inline(turn.wire, &envelope, sending.pieces.as_slice(), length) }?;
        Ok(if written { Step::Done } else { Step::Idle })
    }
}
