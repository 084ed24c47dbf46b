//! `inline`: the payload is in the cell, one cache line for the whole message.

use super::{Path, Sending, Step, Turn};
use crate::connection::Wire;
use crate::pieces::{Piece, gather};
use crate::ring::cells::Nonsense;
use crate::wire::{INLINE_BYTES, inline_words};

pub(super) struct Inline;

/// Writes a message of at most [`INLINE_BYTES`] if there is room.
///
/// # Safety
/// The pieces must be valid for reads of `length` bytes.
#[inline]
pub(crate) unsafe fn put_inline(
    wire: &mut Wire,
    tag: u64,
    pieces: &[Piece],
    length: usize,
) -> Result<bool, Nonsense> {
    debug_assert!(length <= INLINE_BYTES);
    if !wire.has_room()? {
        return Ok(false);
    }
    let mut payload = [0u64; INLINE_BYTES / 8];
    // SAFETY: the payload has room for the length; the pieces are the caller's promise.
    unsafe { gather(pieces, 0, payload.as_mut_ptr().cast(), length) };
    wire.write(&inline_words(tag, length as u8, &payload));
    Ok(true)
}

impl Path for Inline {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let (tag, length) = (sending.tag, sending.length as usize);
        // SAFETY: the operation is under way, so its owner vouches for the memory.
        let written = unsafe { put_inline(turn.wire, tag, sending.pieces.as_slice(), length) }?;
        Ok(if written { Step::Done } else { Step::Idle })
    }
}
