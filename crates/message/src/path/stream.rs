//! Fragments through the bounce ring: the common part of `eager` and `pipeline`. The sender fills
//! spans while the receiver empties earlier ones, so that both copies of a long message run at the
//! same time.

use memferry_memory::pinning::Access as Use;

use super::pinning::{self, PREFAULT_BYTES};
use super::{PipelineRequest, ReceiveStage, Receiving, SendStage, Sending, StepResult};
use crate::connection::Connection;
use crate::control::ControlMessage;
use crate::ring::bounce::BounceSpan;
use crate::ring::cells::ProtocolError;
use crate::segments::{gather, scatter};

/// Sends the next fragment, if there is space.
pub(super) fn send_fragment(
    sending: &mut Sending,
    connection: &mut Connection,
) -> Result<StepResult, ProtocolError> {
    let SendStage::Streaming { sent, receiver, until } = sending.stage else {
        return Ok(StepResult::Idle);
    };
    if sent >= until {
        return Ok(StepResult::Done);
    }
    if !connection.has_credit()? {
        return Ok(StepResult::Idle);
    }
    let max = (sending.chunk_bytes as usize).min(connection.max_span());
    let length = usize::try_from(until - sent).unwrap_or(usize::MAX).min(max);
    let Some(span) = connection.alloc_bounce(length)? else { return Ok(StepResult::Idle) };
    // SAFETY: the operation is in flight, so its owner guarantees the segments; the span belongs to
    // this side until the cell that refers to it is written.
    unsafe { gather(sending.segments.as_slice(), sent, connection.outgoing(span), length) };
    let message = match receiver {
        None if sent == 0 => {
            let (envelope, length) = (sending.envelope, sending.length);
            ControlMessage::Eager { envelope, length, first: span }
        }
        receiver => ControlMessage::Fragment { receiver, data: span },
    };
    connection.write(&message.encode());
    // The receiver copies this fragment while this side copies the next.
    connection.ring_doorbell();
    let sent = sent + length as u64;
    sending.stage = SendStage::Streaming { sent, receiver, until };
    Ok(if sent == until { StepResult::Done } else { StepResult::Progressed })
}

/// Copies a fragment that has arrived into the receive's segments.
pub(crate) fn receive_fragment(
    receiving: &mut Receiving,
    data: BounceSpan,
    connection: &mut Connection,
) -> Result<StepResult, ProtocolError> {
    let (length, accepted) = (receiving.length, receiving.accepted());
    let ReceiveStage::Arriving { arrived, requested } = &mut receiving.stage else {
        return Err(ProtocolError("fragment of a message that has none"));
    };
    // The sender of a requested message sends only the bytes that fit.
    let length = if requested.is_some() { accepted } else { length };
    if u64::from(data.length) > length - *arrived {
        return Err(ProtocolError("fragments longer than the message"));
    }
    let fits = accepted.saturating_sub(*arrived).min(data.length.into());
    if let Some(PipelineRequest { prefaulted: Some(prefaulted), .. }) = requested
        && *arrived + fits > *prefaulted
    {
        // The sender fills the next spans at the same time.
        let length = (accepted - *prefaulted).min(PREFAULT_BYTES.max(fits));
        pinning::populate(receiving.segments.as_slice(), *prefaulted, length, Use::Write);
        *prefaulted += length;
    }
    // SAFETY: the operation is in flight, so its owner guarantees the segments, and at most their
    // length is written; the span was checked to lie inside the bounce ring.
    unsafe {
        scatter(receiving.segments.as_slice(), *arrived, connection.incoming(data), fits as usize);
    };
    connection.release_bounce(data);
    *arrived += u64::from(data.length);
    Ok(if *arrived == length { StepResult::Done } else { StepResult::Progressed })
}
