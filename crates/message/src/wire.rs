//! What the cells say: every kind of note that one side leaves for the other, and its encoding.
//!
//! Decoding takes the words of a cell that were copied out of shared memory and believes none of
//! them: a note either makes sense in itself or is [`Nonsense`]. Whether it makes sense at the
//! moment is checked by whoever acts on it.

use crate::envelope::{Envelope, Lane};
use crate::pieces::MOST_PIECES;
use crate::ring::cells::{Nonsense, Words};
use crate::ring::layout::{RECORDS, SPACE_BYTES};
use crate::ring::record::MOST_CHUNKS;
use crate::ring::space::Span;

/// The longest payload inside a cell.
pub(crate) const INLINE_BYTES: usize = 48;

/// The longest message: no memory is longer.
const LONGEST: u64 = isize::MAX as u64;

/// An operation of the side that gave the number out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Number(pub u64);

/// Memory of the sender of a note, for the other side to read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// One piece: its address, and the shareable region it lies in (0: none).
    Piece { address: u64, region: u32 },
    /// Several: a list in the space.
    List { list: Span, count: u32 },
}

/// How the receiver wants a message to come that was announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Through the space, in fragments.
    Pipeline,
    /// Both copy: claims are in a record, chunks are of a size.
    /// Whether the target may not be in memory: writing to it may take any time.
    Together { record: u16, generation: u16, chunk_bytes: u32, target: Place, absent: bool },
}

/// A note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Note {
    /// A whole message.
    Inline { envelope: Envelope, length: u8, payload: [u64; 6] },
    /// The beginning of a message, of which fragments follow until its length is reached.
    Eager { envelope: Envelope, length: u64, first: Span },
    /// More of the message that began last, or of one that was accepted for the pipeline.
    Fragment { receiver: Option<Number>, data: Span },
    /// A message that waits in the sender's memory; whether the sender expects messages too.
    Request {
        envelope: Envelope,
        length: u64,
        sender: Number,
        source: Place,
        core: u16,
        expects: bool,
        /// The source may not be in memory: reading it may take any time.
        absent: bool,
    },
    /// The receiver has a place for a message, and says how it should come.
    Accept { sender: Number, receiver: Number, length: u64, manner: Manner },
    /// A requested message has arrived, or cannot (the number is the system's).
    Finish { sender: Number, error: u16 },
    /// The sender wants a request back.
    Withdraw { sender: Number },
    /// The answer: whether it was still unmatched.
    Withdrawn { sender: Number, granted: bool },
    /// Whether the writer of this note can read and write the memory of its reader.
    Reach { read: bool, write: bool },
    /// A shareable region: the descriptor waits in the socket.
    Share { region: u32, writable: bool, address: u64, length: u64 },
    /// A region is gone.
    Unshare { region: u32 },
    /// The other side closes; nothing follows.
    Close,
}

mod kind {
    pub(super) const INLINE: u8 = 1;
    pub(super) const EAGER: u8 = 2;
    pub(super) const FRAGMENT: u8 = 3;
    pub(super) const REQUEST: u8 = 4;
    pub(super) const ACCEPT: u8 = 5;
    pub(super) const FINISH: u8 = 6;
    pub(super) const WITHDRAW: u8 = 7;
    pub(super) const WITHDRAWN: u8 = 8;
    pub(super) const REACH: u8 = 9;
    pub(super) const SHARE: u8 = 10;
    pub(super) const UNSHARE: u8 = 11;
    pub(super) const CLOSE: u8 = 12;
}

/// The first word: the ring's half, the kind, a small number, a larger one.
fn first(kind: u8, small: u8, large: u16) -> u64 {
    u64::from(kind) << 32 | u64::from(small) << 40 | u64::from(large) << 48
}

fn pack_span(span: Span) -> u64 {
    u64::from(span.offset) << 32 | u64::from(span.length)
}

fn unpack_span(word: u64) -> Result<Span, Nonsense> {
    Span::checked(word >> 32, word & 0xFFFF_FFFF, SPACE_BYTES)
}

fn pack_place(place: Place) -> [u64; 2] {
    match place {
        Place::Piece { address, region } => [address, u64::from(region)],
        Place::List { list, count } => [pack_span(list), u64::from(count) << 32],
    }
}

fn unpack_place(words: [u64; 2]) -> Result<Place, Nonsense> {
    let (count, region) = ((words[1] >> 32) as u32, words[1] as u32);
    if count == 0 {
        return Ok(Place::Piece { address: words[0], region });
    }
    let list = unpack_span(words[0])?;
    if count as usize > MOST_PIECES || list.length as usize != count as usize * PIECE_BYTES {
        return Err(Nonsense("a list of pieces that is not as long as it says"));
    }
    Ok(Place::List { list, count })
}

/// The bytes of a piece in a list: address, length, region.
pub(crate) const PIECE_BYTES: usize = 24;

/// What the large number of a note says of its envelope.
const HAS_DATA: u16 = 1;
const IS_PLAIN: u16 = 2;
/// The same of a request, whose large number is that of a core.
const REQUEST_EXPECTS: u8 = 1;
const REQUEST_SHIFT: u32 = 1;

#[inline]
fn pack_envelope(envelope: &Envelope) -> u16 {
    let plain = if envelope.lane == Lane::Plain { IS_PLAIN } else { 0 };
    plain | if envelope.data.is_some() { HAS_DATA } else { 0 }
}

#[inline]
fn unpack_envelope(flags: u16, tag: u64, data: u64) -> Envelope {
    let lane = if flags & IS_PLAIN == 0 { Lane::Tagged } else { Lane::Plain };
    Envelope { lane, tag, data: (flags & HAS_DATA != 0).then_some(data) }
}

/// The longest payload of an inline message: data takes the last word of it.
#[inline]
pub(crate) fn inline_limit(envelope: &Envelope) -> usize {
    if envelope.data.is_some() { INLINE_BYTES - 8 } else { INLINE_BYTES }
}

/// The words of an inline message, without building a note first: this is the fastest path.
#[inline]
pub(crate) fn inline_words(envelope: &Envelope, length: u8, payload: &[u64; 6]) -> Words {
    let [a, b, c, d, e, f] = *payload;
    let first = first(kind::INLINE, length, pack_envelope(envelope));
    [first, envelope.tag, a, b, c, d, e, envelope.data.unwrap_or(f)]
}

/// Envelope, length and payload of an inline message, if the words are one and make sense. As
/// [`inline_words`], without building a note.
#[inline]
pub(crate) fn inline_message(words: &Words) -> Option<(Envelope, usize, &[u64; 6])> {
    let [first, tag, payload @ ..] = words;
    let (kind, length) = ((first >> 32) as u8, usize::from((first >> 40) as u8));
    let envelope = unpack_envelope((first >> 48) as u16, *tag, payload[5]);
    let makes_sense = kind == kind::INLINE && length <= inline_limit(&envelope);
    makes_sense.then_some((envelope, length, payload))
}

impl Note {
    /// As words of a cell.
    pub(crate) fn encode(&self) -> Words {
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
            Self::Request { envelope, length, sender, source, core, expects, absent } => {
                let [p, q] = pack_place(source);
                let flags = (pack_envelope(&envelope) as u8) << REQUEST_SHIFT
                    | if expects { REQUEST_EXPECTS } else { 0 };
                let data = envelope.data.unwrap_or(0);
                let absent = u64::from(absent);
                [first(REQUEST, flags, core), envelope.tag, length, sender.0, p, q, data, absent]
            }
            Self::Accept { sender, receiver, length, manner } => match manner {
                Manner::Pipeline => [first(ACCEPT, 0, 0), sender.0, receiver.0, length, 0, 0, 0, 0],
                Manner::Together { record, generation, chunk_bytes, target, absent } => {
                    let [p, q] = pack_place(target);
                    let claims = u64::from(generation) << 48
                        | u64::from(record) << 32
                        | u64::from(chunk_bytes);
                    [first(ACCEPT, 1, 0), sender.0, receiver.0, length, p, q, claims, absent.into()]
                }
            },
            Self::Finish { sender, error } => [first(FINISH, 0, error), sender.0, 0, 0, 0, 0, 0, 0],
            Self::Withdraw { sender } => [first(WITHDRAW, 0, 0), sender.0, 0, 0, 0, 0, 0, 0],
            Self::Withdrawn { sender, granted } => {
                [first(WITHDRAWN, granted.into(), 0), sender.0, 0, 0, 0, 0, 0, 0]
            }
            Self::Reach { read, write } => {
                [first(REACH, u8::from(read) | u8::from(write) << 1, 0), 0, 0, 0, 0, 0, 0, 0]
            }
            Self::Share { region, writable, address, length } => {
                [first(SHARE, writable.into(), 0), region.into(), address, length, 0, 0, 0, 0]
            }
            Self::Unshare { region } => [first(UNSHARE, 0, 0), region.into(), 0, 0, 0, 0, 0, 0],
            Self::Close => [first(CLOSE, 0, 0), 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// From words of a cell, if they make sense.
    #[inline]
    pub(crate) fn decode(words: &Words) -> Result<Self, Nonsense> {
        let (kind, small) = ((words[0] >> 32) as u8, (words[0] >> 40) as u8);
        if kind == kind::INLINE {
            let Some((envelope, _, payload)) = inline_message(words) else {
                return Err(Nonsense("more payload than a cell holds"));
            };
            return Ok(Self::Inline { envelope, length: small, payload: *payload });
        }
        Self::decode_others(kind, small, words)
    }

    fn decode_others(kind: u8, small: u8, words: &Words) -> Result<Self, Nonsense> {
        let large = (words[0] >> 48) as u16;
        let region = words[1] as u32;
        Ok(match kind {
            kind::EAGER => {
                let (length, first) = (words[2], unpack_span(words[3])?);
                if u64::from(first.length) > length || first.length == 0 || length > LONGEST {
                    return Err(Nonsense("a message shorter than its beginning"));
                }
                let envelope = unpack_envelope(large, words[1], words[4]);
                Self::Eager { envelope, length, first }
            }
            kind::FRAGMENT => {
                let receiver = (small != 0).then_some(Number(words[1]));
                let data = unpack_span(words[2])?;
                if data.length == 0 {
                    return Err(Nonsense("an empty fragment"));
                }
                Self::Fragment { receiver, data }
            }
            kind::REQUEST if words[2] > LONGEST => {
                return Err(Nonsense("a message longer than memory can be"));
            }
            kind::REQUEST => Self::Request {
                envelope: unpack_envelope((small >> REQUEST_SHIFT).into(), words[1], words[6]),
                length: words[2],
                sender: Number(words[3]),
                source: unpack_place([words[4], words[5]])?,
                core: large,
                expects: small & REQUEST_EXPECTS != 0,
                absent: words[7] & 1 != 0,
            },
            kind::ACCEPT => {
                let length = words[3];
                let manner =
                    if small == 0 { Manner::Pipeline } else { unpack_together(length, words)? };
                let (sender, receiver) = (Number(words[1]), Number(words[2]));
                Self::Accept { sender, receiver, length, manner }
            }
            kind::FINISH => Self::Finish { sender: Number(words[1]), error: large },
            kind::WITHDRAW => Self::Withdraw { sender: Number(words[1]) },
            kind::WITHDRAWN => Self::Withdrawn { sender: Number(words[1]), granted: small != 0 },
            kind::REACH => Self::Reach { read: small & 1 != 0, write: small & 2 != 0 },
            kind::SHARE if region != 0 => {
                let (address, length) = (words[2], words[3]);
                Self::Share { region, writable: small != 0, address, length }
            }
            kind::UNSHARE => Self::Unshare { region },
            kind::CLOSE => Self::Close,
            _ => return Err(Nonsense("a note of an unknown kind")),
        })
    }
}

fn unpack_together(length: u64, words: &Words) -> Result<Manner, Nonsense> {
    let (claims, absent) = (words[6], words[7] & 1 != 0);
    let (generation, record) = ((claims >> 48) as u16, (claims >> 32) as u16);
    let chunk_bytes = claims as u32;
    if usize::from(record) >= RECORDS {
        return Err(Nonsense("a record that does not exist"));
    }
    if chunk_bytes == 0 || length.div_ceil(chunk_bytes.into()) > MOST_CHUNKS {
        return Err(Nonsense("chunks that are too small"));
    }
    let target = unpack_place([words[4], words[5]])?;
    Ok(Manner::Together { record, generation, chunk_bytes, target, absent })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> impl Strategy<Value = Place> {
        let list = (0..=8u32, 1..=64u32).prop_map(|(offset, count)| Place::List {
            list: Span { offset: offset * 64, length: count * PIECE_BYTES as u32 },
            count,
        });
        prop_oneof![
            any::<(u64, u32)>().prop_map(|(address, region)| Place::Piece { address, region }),
            list,
        ]
    }

    fn envelope() -> impl Strategy<Value = Envelope> {
        any::<(bool, u64, Option<u64>)>().prop_map(|(plain, tag, data)| {
            let lane = if plain { Lane::Plain } else { Lane::Tagged };
            Envelope { lane, tag, data }
        })
    }

    fn note() -> impl Strategy<Value = Note> {
        let span = (0..1024u32, 1..4096u32).prop_map(|(offset, length)| Span { offset, length });
        let number = || any::<u64>().prop_map(Number);
        prop_oneof![
            (envelope(), 0..=48u8, any::<[u64; 6]>()).prop_map(
                |(envelope, length, mut payload)| {
                    let length = length.min(inline_limit(&envelope) as u8);
                    payload[5] = envelope.data.unwrap_or(payload[5]);
                    Note::Inline { envelope, length, payload }
                }
            ),
            (envelope(), 4096..LONGEST, span.clone())
                .prop_map(|(envelope, length, first)| Note::Eager { envelope, length, first }),
            (proptest::option::of(number()), span)
                .prop_map(|(receiver, data)| Note::Fragment { receiver, data }),
            (envelope(), 0..LONGEST, number(), place(), any::<u16>(), any::<[bool; 2]>()).prop_map(
                |(envelope, length, sender, source, core, [expects, absent])| Note::Request {
                    envelope,
                    length,
                    sender,
                    source,
                    core,
                    expects,
                    absent
                }
            ),
            (
                number(),
                number(),
                0..1u64 << 40,
                place(),
                0..RECORDS as u16,
                any::<u16>(),
                1u32 << 20..
            )
                .prop_map(
                    |(sender, receiver, length, target, record, generation, chunk_bytes)| {
                        let absent = generation % 2 == 1;
                        let manner =
                            Manner::Together { record, generation, chunk_bytes, target, absent };
                        Note::Accept { sender, receiver, length, manner }
                    }
                ),
            (number(), any::<u16>()).prop_map(|(sender, error)| Note::Finish { sender, error }),
            (number(), any::<bool>())
                .prop_map(|(sender, granted)| Note::Withdrawn { sender, granted }),
            any::<(bool, bool)>().prop_map(|(read, write)| Note::Reach { read, write }),
            (1..=u32::MAX, any::<bool>(), any::<u64>(), any::<u64>()).prop_map(
                |(region, writable, address, length)| Note::Share {
                    region,
                    writable,
                    address,
                    length
                }
            ),
            Just(Note::Close),
        ]
    }

    proptest! {
        #[test]
        fn a_note_survives_the_ring(note in note()) {
            prop_assert_eq!(Note::decode(&note.encode()), Ok(note));
        }

        #[test]
        fn whatever_random_words_decode_to_lies_inside_the_bounds(
            mut words in any::<Words>(), kind in 0..16u8,
        ) {
            words[0] = words[0] & !(0xFF << 32) | u64::from(kind) << 32;
            let inside = |span: Span| {
                prop_assert!(span.offset as usize + span.length as usize <= SPACE_BYTES);
                Ok(())
            };
            match Note::decode(&words) {
                Ok(Note::Inline { length, envelope, .. }) => {
                    prop_assert!(usize::from(length) <= inline_limit(&envelope));
                }
                Ok(Note::Eager { first, length, .. }) => {
                    inside(first)?;
                    prop_assert!(u64::from(first.length) <= length);
                }
                Ok(Note::Fragment { data, .. }) => inside(data)?,
                Ok(Note::Request { source: Place::List { list, count }, .. }) => {
                    inside(list)?;
                    prop_assert_eq!(list.length, count * PIECE_BYTES as u32);
                }
                Ok(Note::Accept { manner: Manner::Together { record, chunk_bytes, .. }, .. }) => {
                    prop_assert!(usize::from(record) < RECORDS && chunk_bytes > 0);
                }
                _ => {}
            }
        }
    }
}
