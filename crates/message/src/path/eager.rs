//! `eager`: the payload goes through the bounce ring, without a reply of the receiver.

use super::{MessagePath, SendStage, Sending, StepContext, StepResult, stream};
use crate::connection::Connection;
use crate::control::ControlMessage;
use crate::envelope::Envelope;
use crate::ring::cells::ProtocolError;
use crate::segments::{Segment, gather};

pub(super) struct Eager;

/// Writes a message that fits into one fragment, if there is space.
///
/// # Safety
/// The segments must be valid for reads of `length` bytes.
#[inline]
pub(crate) unsafe fn write_eager(
    connection: &mut Connection,
    envelope: &Envelope,
    segments: &[Segment],
    length: usize,
) -> Result<bool, ProtocolError> {
    if !connection.has_credit()? {
        return Ok(false);
    }
    let Some(first) = connection.alloc_bounce(length)? else { return Ok(false) };
    // SAFETY: the caller guarantees the segments; the span belongs to this side until the cell that
    // refers to it is written.
    unsafe { gather(segments, 0, connection.outgoing(first), length) };
    connection.write(
        &ControlMessage::Eager { envelope: *envelope, length: length as u64, first }.encode(),
    );
    Ok(true)
}

impl MessagePath for Eager {
    fn send(
        &self,
        sending: &mut Sending,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        if let SendStage::Queued = sending.stage {
            let until = sending.length;
            sending.stage = SendStage::Streaming { sent: 0, receiver: None, until };
        }
        stream::send_fragment(sending, context.connection)
    }
}
