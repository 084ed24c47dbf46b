//! `inline`: the payload is in the cell, so that a message is one cache line.

use super::{MessagePath, Sending, StepContext, StepResult};
use crate::connection::Connection;
use crate::control::{INLINE_BYTES, inline_limit, inline_words};
use crate::envelope::Envelope;
use crate::ring::cells::ProtocolError;
use crate::segments::{Segment, gather};

pub(super) struct Inline;

/// Writes a message of at most [`inline_limit`] bytes, if a cell is free.
///
/// # Safety
/// The segments must be valid for reads of `length` bytes.
#[inline(always)]
pub(crate) unsafe fn write_inline(
    connection: &mut Connection,
    envelope: &Envelope,
    segments: &[Segment],
    length: usize,
) -> Result<bool, ProtocolError> {
    debug_assert!(length <= inline_limit(envelope));
    if !connection.has_credit()? {
        return Ok(false);
    }
    let mut payload = [0u64; INLINE_BYTES / 8];
    // SAFETY: the payload has space for `length` bytes; the caller guarantees the segments.
    unsafe { gather(segments, 0, payload.as_mut_ptr().cast(), length) };
    connection.write(&inline_words(envelope, length as u8, &payload));
    Ok(true)
}

impl MessagePath for Inline {
    fn send(
        &self,
        sending: &mut Sending,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        let (envelope, length) = (sending.envelope, sending.length as usize);
        // SAFETY: the operation is in flight, so its owner guarantees that the memory is valid.
        let written = unsafe {
            write_inline(context.connection, &envelope, sending.segments.as_slice(), length)
        }?;
        Ok(if written { StepResult::Done } else { StepResult::Idle })
    }
}
