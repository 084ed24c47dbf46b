//! Bytes through the shared space, fragment by fragment: what `eager` and `pipeline` have in
//! common. The sender fills spans while the receiver empties those before, so that both copies
//! of a long message run at the same time.

use memferry_memory::pinning::Access as Use;

use super::pinning::{self, STEP_BYTES};
use super::{ReceiveStage, Receiving, Requested, SendStage, Sending, Step};
use crate::connection::Wire;
use crate::pieces::{gather, scatter};
use crate::ring::cells::Nonsense;
use crate::ring::space::Span;
use crate::wire::Note;

/// Sends the next fragment if there is room for it.
pub(super) fn send_fragment(sending: &mut Sending, wire: &mut Wire) -> Result<Step, Nonsense> {
    let SendStage::Streaming { sent, receiver, until } = sending.stage else {
        return Ok(Step::Idle);
    };
    if sent >= until {
        return Ok(Step::Done);
    }
    if !wire.has_room()? {
        return Ok(Step::Idle);
    }
    let most = (sending.chunk_bytes as usize).min(wire.longest_span());
    let length = usize::try_from(until - sent).unwrap_or(usize::MAX).min(most);
    let Some(span) = wire.give_out(length)? else { return Ok(Step::Idle) };
    // SAFETY: the operation is under way, so its owner vouches for the pieces; the span is this
    // side's until the cell that names it is written.
    unsafe { gather(sending.pieces.as_slice(), sent, wire.outgoing(span), length) };
    let note = match receiver {
        None if sent == 0 => {
            let (envelope, length) = (sending.envelope, sending.length);
            Note::Eager { envelope, length, first: span }
        }
        receiver => Note::Fragment { receiver, data: span },
    };
    wire.write(&note.encode());
    // Let the receiver begin with this one while the next is copied.
    wire.announce();
    let sent = sent + length as u64;
    sending.stage = SendStage::Streaming { sent, receiver, until };
    Ok(if sent == until { Step::Done } else { Step::Moved })
}

/// A fragment has come for a receive: puts it in its place.
pub(crate) fn arrive(
    receiving: &mut Receiving,
    data: Span,
    wire: &mut Wire,
) -> Result<Step, Nonsense> {
    let (length, accepted) = (receiving.length, receiving.accepted());
    let ReceiveStage::Arriving { arrived, requested } = &mut receiving.stage else {
        return Err(Nonsense("a fragment of a message that does not come in fragments"));
    };
    // Of a message that was asked for, only what fits is sent.
    let length = if requested.is_some() { accepted } else { length };
    if u64::from(data.length) > length - *arrived {
        return Err(Nonsense("more fragments than the message has bytes"));
    }
    let fits = accepted.saturating_sub(*arrived).min(data.length.into());
    if let Some(Requested { populated: Some(populated), .. }) = requested
        && *arrived + fits > *populated
    {
        // The sender fills the next spans meanwhile.
        let length = (accepted - *populated).min(STEP_BYTES.max(fits));
        pinning::populate(receiving.pieces.as_slice(), *populated, length, Use::Write);
        *populated += length;
    }
    // SAFETY: the operation is under way, so its owner vouches for the pieces, and no more is
    // written than they hold; the span was checked to lie inside the space.
    unsafe { scatter(receiving.pieces.as_slice(), *arrived, wire.incoming(data), fits as usize) };
    wire.used(data);
    *arrived += u64::from(data.length);
    Ok(if *arrived == length { Step::Done } else { Step::Moved })
}
