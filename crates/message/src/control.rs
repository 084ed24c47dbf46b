//! Control messages: what a cell can contain, and its encoding.
//!
//! The decoder takes the words of a cell that were copied out of shared memory, and trusts none of
//! them: it returns a message that is valid in itself, or a [`ProtocolError`]. The code that
//! handles the message checks whether it is valid at that time.

use crate::envelope::{Envelope, MatchSpace};
use crate::ring::bounce::BounceSpan;
use crate::ring::cells::{CellWords, ProtocolError};
use crate::ring::claims::MAX_CHUNKS;
use crate::ring::layout::{BOUNCE_BYTES, CLAIM_SLOTS};
use crate::segments::MAX_SEGMENTS;

/// The maximum payload of a cell, in bytes.
pub(crate) const INLINE_BYTES: usize = 48;

/// The maximum length of a message: no memory is longer.
const MAX_MESSAGE_BYTES: u64 = isize::MAX as u64;

/// The number of an operation, chosen by the side that owns the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct OperationId(pub u64);

/// A reference to memory of the sender of a control message, for the peer to read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BufferRef {
    /// One segment: its address, and the shareable region it lies in (0: none).
    Contiguous { address: u64, region: u32 },
    /// Several segments: a list in the bounce ring.
    SegmentList { list: BounceSpan, count: u32 },
}

/// The receiver's choice of how an announced message is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RendezvousMode {
    /// Through the bounce ring, in fragments.
    Pipeline,
    /// By both sides: the claim slot, the chunk size and the target. `nonresident`: writing to the
    /// target may block for any time.
    Cooperative {
        claim_slot: u16,
        generation: u16,
        chunk_bytes: u32,
        target: BufferRef,
        nonresident: bool,
    },
}

/// A control message, or a message that fits into a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// A complete message.
    Inline { envelope: Envelope, length: u8, payload: [u64; 6] },
    /// The start of a message. Fragments follow until its length is reached.
    Eager { envelope: Envelope, length: u64, first: BounceSpan },
    /// The next fragment of the eager message that was started last, or of a pipeline message.
    Fragment { receiver: Option<OperationId>, data: BounceSpan },
    /// Announcement of a message in the sender's memory, with the sender's core and whether the
    /// sender has posted receives.
    Rts {
        envelope: Envelope,
        length: u64,
        sender: OperationId,
        source: BufferRef,
        core: u16,
        has_receives: bool,
        /// The source may not be resident: reading it may block for any time.
        nonresident: bool,
    },
    /// Reply to an announcement: the receiver has a target, and chooses the mode.
    Cts { sender: OperationId, receiver: OperationId, length: u64, mode: RendezvousMode },
    /// The announced message has arrived, or has failed with an error code.
    Fin { sender: OperationId, error: u16 },
    /// The sender cancels an announcement.
    CancelRts { sender: OperationId },
    /// Reply to a cancellation: `granted` if no receive had matched the message.
    CancelReply { sender: OperationId, granted: bool },
    /// Whether the sender of this message can read and write the memory of its receiver.
    AccessCaps { read: bool, write: bool },
    /// A shareable region. Its descriptor is sent over the socket before this message.
    ShareRegion { region: u32, writable: bool, address: u64, length: u64 },
    /// A region is freed.
    UnshareRegion { region: u32 },
    /// The hints of the sender of this message, with the number of its receiver in them. Their
    /// descriptor is sent over the socket before this message.
    ShareHints { slot: u32 },
    /// Reply to [`ControlMessage::ShareHints`]: the sender of this message sets hints from now on.
    HintsMapped,
    /// The next cell is in the large ring.
    GrowRing,
    /// The sender of this message closes the connection; no message follows.
    Close,
}

mod kind {
    pub(super) const INLINE: u8 = 1;
    pub(super) const EAGER: u8 = 2;
    pub(super) const FRAGMENT: u8 = 3;
    pub(super) const RTS: u8 = 4;
    pub(super) const CTS: u8 = 5;
    pub(super) const FIN: u8 = 6;
    pub(super) const CANCEL_RTS: u8 = 7;
    pub(super) const CANCEL_REPLY: u8 = 8;
    pub(super) const ACCESS_CAPS: u8 = 9;
    pub(super) const SHARE_REGION: u8 = 10;
    pub(super) const UNSHARE_REGION: u8 = 11;
    pub(super) const CLOSE: u8 = 12;
    pub(super) const SHARE_HINTS: u8 = 13;
    pub(super) const HINTS_MAPPED: u8 = 14;
    pub(super) const GROW_RING: u8 = (crate::ring::layout::GROW_MARKER[0] >> 32) as u8;
}

/// Packs the first word of a cell: the ring's half, the kind, an 8-bit and a 16-bit field.
fn first(kind: u8, small: u8, large: u16) -> u64 {
    u64::from(kind) << 32 | u64::from(small) << 40 | u64::from(large) << 48
}

fn pack_span(span: BounceSpan) -> u64 {
    u64::from(span.offset) << 32 | u64::from(span.length)
}

fn unpack_span(word: u64) -> Result<BounceSpan, ProtocolError> {
    BounceSpan::checked(word >> 32, word & 0xFFFF_FFFF, BOUNCE_BYTES)
}

fn pack_buffer(buffer: BufferRef) -> [u64; 2] {
    match buffer {
        BufferRef::Contiguous { address, region } => [address, u64::from(region)],
        BufferRef::SegmentList { list, count } => [pack_span(list), u64::from(count) << 32],
    }
}

fn unpack_buffer(words: [u64; 2]) -> Result<BufferRef, ProtocolError> {
    let (count, region) = ((words[1] >> 32) as u32, words[1] as u32);
    if count == 0 {
        return Ok(BufferRef::Contiguous { address: words[0], region });
    }
    let list = unpack_span(words[0])?;
    if count as usize > MAX_SEGMENTS || list.length as usize != count as usize * SEGMENT_BYTES {
        return Err(ProtocolError("segment list with a wrong length"));
    }
    Ok(BufferRef::SegmentList { list, count })
}

/// Bytes of a segment in a list: address, length, region.
pub(crate) const SEGMENT_BYTES: usize = 24;

/// Flags of the envelope, in the 16-bit field.
const HAS_DATA: u16 = 1;
/// The position of the match space, of two bits.
const SPACE_SHIFT: u32 = 1;
/// Flags of an announcement, in the 8-bit field: its 16-bit field contains the core.
const RTS_HAS_RECEIVES: u8 = 1;
const RTS_FLAGS_SHIFT: u32 = 1;

#[inline]
fn pack_envelope(envelope: &Envelope) -> u16 {
    u16::from(envelope.space.code()) << SPACE_SHIFT
        | if envelope.data.is_some() { HAS_DATA } else { 0 }
}

#[inline]
fn unpack_envelope(flags: u16, tag: u64, data: u64) -> Envelope {
    let space = MatchSpace::of_code((flags >> SPACE_SHIFT) as u8);
    Envelope { space, tag, data: (flags & HAS_DATA != 0).then_some(data) }
}

/// The maximum payload of an inline message, in bytes. Data of the envelope uses the last word.
#[inline]
pub(crate) fn inline_limit(envelope: &Envelope) -> usize {
    if envelope.data.is_some() { INLINE_BYTES - 8 } else { INLINE_BYTES }
}

/// Encodes an inline message without building a [`ControlMessage`]: this is the fastest path.
#[inline]
pub(crate) fn inline_words(envelope: &Envelope, length: u8, payload: &[u64; 6]) -> CellWords {
    let [a, b, c, d, e, f] = *payload;
    let first = first(kind::INLINE, length, pack_envelope(envelope));
    [first, envelope.tag, a, b, c, d, e, envelope.data.unwrap_or(f)]
}

/// Decodes envelope, length and payload of a valid inline message. As [`inline_words`], it builds
/// no [`ControlMessage`].
#[inline]
pub(crate) fn inline_message(words: &CellWords) -> Option<(Envelope, usize, &[u64; 6])> {
    let [first, tag, payload @ ..] = words;
    let (kind, length) = ((first >> 32) as u8, usize::from((first >> 40) as u8));
    let envelope = unpack_envelope((first >> 48) as u16, *tag, payload[5]);
    let is_valid = kind == kind::INLINE && length <= inline_limit(&envelope);
    is_valid.then_some((envelope, length, payload))
}

/// Whether a cell begins a message whose payload is in the ring, and that a receive may match.
#[inline]
pub(crate) fn begins_buffered_message(words: &CellWords) -> bool {
    let kind = (words[0] >> 32) as u8;
    let is_buffered = kind == kind::INLINE || kind == kind::EAGER;
    is_buffered && unpack_envelope((words[0] >> 48) as u16, 0, 0).space != MatchSpace::Service
}

impl ControlMessage {
    /// Encodes the message as words of a cell.
    pub(crate) fn encode(&self) -> CellWords {
        use kind::*;
        match *self {
            Self::Inline { envelope, length, payload } => inline_words(&envelope, length, &payload),
            Self::Eager { envelope, length, first: span } => {
                let first = first(EAGER, 0, pack_envelope(&envelope));
                let data = envelope.data.unwrap_or(0);
                [first, envelope.tag, length, pack_span(span), data, 0, 0, 0]
            }
            Self::Fragment { receiver, data } => {
                let named = u8::from(receiver.is_some());
                let number = receiver.unwrap_or_default().0;
                [first(FRAGMENT, named, 0), number, pack_span(data), 0, 0, 0, 0, 0]
            }
            Self::Rts { envelope, length, sender, source, core, has_receives, nonresident } => {
                let [p, q] = pack_buffer(source);
                let flags = (pack_envelope(&envelope) as u8) << RTS_FLAGS_SHIFT
                    | if has_receives { RTS_HAS_RECEIVES } else { 0 };
                let data = envelope.data.unwrap_or(0);
                let nonresident = u64::from(nonresident);
                [first(RTS, flags, core), envelope.tag, length, sender.0, p, q, data, nonresident]
            }
            Self::Cts { sender, receiver, length, mode } => match mode {
                RendezvousMode::Pipeline => {
                    [first(CTS, 0, 0), sender.0, receiver.0, length, 0, 0, 0, 0]
                }
                RendezvousMode::Cooperative {
                    claim_slot,
                    generation,
                    chunk_bytes,
                    target,
                    nonresident,
                } => {
                    let [p, q] = pack_buffer(target);
                    let claims = u64::from(generation) << 48
                        | u64::from(claim_slot) << 32
                        | u64::from(chunk_bytes);
                    let nonresident = nonresident.into();
                    [first(CTS, 1, 0), sender.0, receiver.0, length, p, q, claims, nonresident]
                }
            },
            Self::Fin { sender, error } => [first(FIN, 0, error), sender.0, 0, 0, 0, 0, 0, 0],
            Self::CancelRts { sender } => [first(CANCEL_RTS, 0, 0), sender.0, 0, 0, 0, 0, 0, 0],
            Self::CancelReply { sender, granted } => {
                [first(CANCEL_REPLY, granted.into(), 0), sender.0, 0, 0, 0, 0, 0, 0]
            }
            Self::AccessCaps { read, write } => {
                [first(ACCESS_CAPS, u8::from(read) | u8::from(write) << 1, 0), 0, 0, 0, 0, 0, 0, 0]
            }
            Self::ShareRegion { region, writable, address, length } => [
                first(SHARE_REGION, writable.into(), 0),
                region.into(),
                address,
                length,
                0,
                0,
                0,
                0,
            ],
            Self::UnshareRegion { region } => {
                [first(UNSHARE_REGION, 0, 0), region.into(), 0, 0, 0, 0, 0, 0]
            }
            Self::ShareHints { slot } => [first(SHARE_HINTS, 0, 0), slot.into(), 0, 0, 0, 0, 0, 0],
            Self::HintsMapped => [first(HINTS_MAPPED, 0, 0), 0, 0, 0, 0, 0, 0, 0],
            Self::GrowRing => crate::ring::layout::GROW_MARKER,
            Self::Close => [first(CLOSE, 0, 0), 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// Decodes the words of a cell.
    #[inline]
    pub(crate) fn decode(words: &CellWords) -> Result<Self, ProtocolError> {
        let (kind, small) = ((words[0] >> 32) as u8, (words[0] >> 40) as u8);
        if kind == kind::INLINE {
            let Some((envelope, _, payload)) = inline_message(words) else {
                return Err(ProtocolError("inline payload longer than a cell"));
            };
            return Ok(Self::Inline { envelope, length: small, payload: *payload });
        }
        Self::decode_others(kind, small, words)
    }

    fn decode_others(kind: u8, small: u8, words: &CellWords) -> Result<Self, ProtocolError> {
        let large = (words[0] >> 48) as u16;
        let region = words[1] as u32;
        Ok(match kind {
            kind::EAGER => {
                let (length, first) = (words[2], unpack_span(words[3])?);
                if u64::from(first.length) > length
                    || first.length == 0
                    || length > MAX_MESSAGE_BYTES
                {
                    return Err(ProtocolError("eager message shorter than its first fragment"));
                }
                let envelope = unpack_envelope(large, words[1], words[4]);
                Self::Eager { envelope, length, first }
            }
            kind::FRAGMENT => {
                let receiver = (small != 0).then_some(OperationId(words[1]));
                let data = unpack_span(words[2])?;
                if data.length == 0 {
                    return Err(ProtocolError("empty fragment"));
                }
                Self::Fragment { receiver, data }
            }
            kind::RTS if words[2] > MAX_MESSAGE_BYTES => {
                return Err(ProtocolError("message longer than the address space"));
            }
            kind::RTS => Self::Rts {
                envelope: unpack_envelope((small >> RTS_FLAGS_SHIFT).into(), words[1], words[6]),
                length: words[2],
                sender: OperationId(words[3]),
                source: unpack_buffer([words[4], words[5]])?,
                core: large,
                has_receives: small & RTS_HAS_RECEIVES != 0,
                nonresident: words[7] & 1 != 0,
            },
            kind::CTS => {
                let length = words[3];
                let mode = if small == 0 {
                    RendezvousMode::Pipeline
                } else {
                    unpack_cooperative(length, words)?
                };
                let (sender, receiver) = (OperationId(words[1]), OperationId(words[2]));
                Self::Cts { sender, receiver, length, mode }
            }
            kind::FIN => Self::Fin { sender: OperationId(words[1]), error: large },
            kind::CANCEL_RTS => Self::CancelRts { sender: OperationId(words[1]) },
            kind::CANCEL_REPLY => {
                Self::CancelReply { sender: OperationId(words[1]), granted: small != 0 }
            }
            kind::ACCESS_CAPS => Self::AccessCaps { read: small & 1 != 0, write: small & 2 != 0 },
            kind::SHARE_REGION if region != 0 => {
                let (address, length) = (words[2], words[3]);
                Self::ShareRegion { region, writable: small != 0, address, length }
            }
            kind::UNSHARE_REGION => Self::UnshareRegion { region },
            kind::SHARE_HINTS => Self::ShareHints { slot: words[1] as u32 },
            kind::HINTS_MAPPED => Self::HintsMapped,
            kind::GROW_RING => Self::GrowRing,
            kind::CLOSE => Self::Close,
            _ => return Err(ProtocolError("unknown kind of control message")),
        })
    }
}

fn unpack_cooperative(length: u64, words: &CellWords) -> Result<RendezvousMode, ProtocolError> {
    let (claims, nonresident) = (words[6], words[7] & 1 != 0);
    let (generation, claim_slot) = ((claims >> 48) as u16, (claims >> 32) as u16);
    let chunk_bytes = claims as u32;
    if usize::from(claim_slot) >= CLAIM_SLOTS {
        return Err(ProtocolError("claim slot out of range"));
    }
    if chunk_bytes == 0 || length.div_ceil(chunk_bytes.into()) > MAX_CHUNKS {
        return Err(ProtocolError("too many chunks"));
    }
    let target = unpack_buffer([words[4], words[5]])?;
    Ok(RendezvousMode::Cooperative { claim_slot, generation, chunk_bytes, target, nonresident })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn buffer_ref() -> impl Strategy<Value = BufferRef> {
        let list = (0..=8u32, 1..=64u32).prop_map(|(offset, count)| BufferRef::SegmentList {
            list: BounceSpan { offset: offset * 64, length: count * SEGMENT_BYTES as u32 },
            count,
        });
        prop_oneof![
            any::<(u64, u32)>()
                .prop_map(|(address, region)| BufferRef::Contiguous { address, region }),
            list,
        ]
    }

    fn envelope() -> impl Strategy<Value = Envelope> {
        (0..4u8, any::<u64>(), any::<Option<u64>>()).prop_map(|(space, tag, data)| Envelope {
            space: MatchSpace::of_code(space),
            tag,
            data,
        })
    }

    fn message() -> impl Strategy<Value = ControlMessage> {
        use ControlMessage::{Close, GrowRing, HintsMapped};
        let span =
            (0..1024u32, 1..4096u32).prop_map(|(offset, length)| BounceSpan { offset, length });
        let number = || any::<u64>().prop_map(OperationId);
        prop_oneof![
            (envelope(), 0..=48u8, any::<[u64; 6]>()).prop_map(
                |(envelope, length, mut payload)| {
                    let length = length.min(inline_limit(&envelope) as u8);
                    payload[5] = envelope.data.unwrap_or(payload[5]);
                    ControlMessage::Inline { envelope, length, payload }
                }
            ),
            (envelope(), 4096..MAX_MESSAGE_BYTES, span.clone()).prop_map(
                |(envelope, length, first)| ControlMessage::Eager { envelope, length, first }
            ),
            (proptest::option::of(number()), span)
                .prop_map(|(receiver, data)| ControlMessage::Fragment { receiver, data }),
            (
                envelope(),
                0..MAX_MESSAGE_BYTES,
                number(),
                buffer_ref(),
                any::<u16>(),
                any::<[bool; 2]>()
            )
                .prop_map(
                    |(envelope, length, sender, source, core, [has_receives, nonresident])| {
                        ControlMessage::Rts {
                            envelope,
                            length,
                            sender,
                            source,
                            core,
                            has_receives,
                            nonresident,
                        }
                    }
                ),
            (
                number(),
                number(),
                0..1u64 << 40,
                buffer_ref(),
                0..CLAIM_SLOTS as u16,
                any::<u16>(),
                1u32 << 20..
            )
                .prop_map(
                    |(sender, receiver, length, target, claim_slot, generation, chunk_bytes)| {
                        let nonresident = generation % 2 == 1;
                        let mode = RendezvousMode::Cooperative {
                            claim_slot,
                            generation,
                            chunk_bytes,
                            target,
                            nonresident,
                        };
                        ControlMessage::Cts { sender, receiver, length, mode }
                    }
                ),
            (number(), any::<u16>())
                .prop_map(|(sender, error)| ControlMessage::Fin { sender, error }),
            (number(), any::<bool>())
                .prop_map(|(sender, granted)| ControlMessage::CancelReply { sender, granted }),
            any::<(bool, bool)>()
                .prop_map(|(read, write)| ControlMessage::AccessCaps { read, write }),
            (1..=u32::MAX, any::<bool>(), any::<u64>(), any::<u64>()).prop_map(
                |(region, writable, address, length)| ControlMessage::ShareRegion {
                    region,
                    writable,
                    address,
                    length
                }
            ),
            any::<u32>().prop_map(|slot| ControlMessage::ShareHints { slot }),
            prop::sample::select(&[HintsMapped, GrowRing, Close][..]),
        ]
    }

    proptest! {
        #[test]
        fn a_note_survives_the_ring(message in message()) {
            prop_assert_eq!(ControlMessage::decode(&message.encode()), Ok(message));
        }

        #[test]
        fn whatever_random_words_decode_to_lies_inside_the_bounds(
            mut words in any::<CellWords>(), kind in 0..17u8,
        ) {
            words[0] = words[0] & !(0xFF << 32) | u64::from(kind) << 32;
            let inside = |span: BounceSpan| {
                prop_assert!(span.offset as usize + span.length as usize <= BOUNCE_BYTES);
                Ok(())
            };
            match ControlMessage::decode(&words) {
                Ok(ControlMessage::Inline { length, envelope, .. }) => {
                    prop_assert!(usize::from(length) <= inline_limit(&envelope));
                }
                Ok(ControlMessage::Eager { first, length, .. }) => {
                    inside(first)?;
                    prop_assert!(u64::from(first.length) <= length);
                }
                Ok(ControlMessage::Fragment { data, .. }) => inside(data)?,
                Ok(ControlMessage::Rts { source: BufferRef::SegmentList { list, count }, .. }) => {
                    inside(list)?;
                    prop_assert_eq!(list.length, count * SEGMENT_BYTES as u32);
                }
                Ok(ControlMessage::Cts { mode: RendezvousMode::Cooperative { claim_slot, chunk_bytes, .. }, .. }) => {
                    prop_assert!(usize::from(claim_slot) < CLAIM_SLOTS && chunk_bytes > 0);
                }
                _ => {}
            }
        }
    }
}
