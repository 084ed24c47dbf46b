//! Packets between hosts: what one says, and the decoding that believes nothing.
//!
//! Every packet names its sender by the sender's whole address, so a peer that nobody has inserted
//! can speak first, and its target, so that whoever has inherited a port does not answer for it.

use memferry_message::{Envelope, Lane};

use super::Name;
use crate::regions::{Denial, Extent};

/// The bytes of a packet before its payload.
pub(super) const HEADER: usize = 120;
/// The most bytes of a packet: what libfabric's layers still send at once, and copy once.
pub(super) const MOST_PACKET: usize = 16 << 10;
/// The most bytes of a message that travels in one packet.
pub(super) const SMALL: usize = MOST_PACKET - HEADER;

/// What every packet begins with. The last byte is the version.
const MAGIC: [u8; 4] = *b"mfr\x01";

const PLAIN: u8 = 1;
const HAS_DATA: u8 = 2;
const ACKNOWLEDGED: u8 = 4;

/// What a packet says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// A message, whose bytes follow.
    Whole { envelope: Envelope },
    /// A message waits for the target's memory.
    Announce { envelope: Envelope, length: u64, ticket: u64, acknowledged: bool },
    /// The first bytes of an announced message are wanted, under this label.
    Fetch { ticket: u64, label: u64, length: u64 },
    /// They are there.
    Done { ticket: u64 },
    /// There is room for messages that cost so much.
    Room { cost: u64 },
    /// The sender closes.
    Bye,
    /// The bytes that follow are for the beginning of this memory of the target's.
    Write { ticket: u64, extent: Extent },
    /// The first bytes of this memory of the target's are wanted.
    Read { ticket: u64, extent: Extent, length: u64 },
    /// They are there, or follow; or why not.
    Answer { ticket: u64, denial: Option<Denial> },
}

/// A packet as it arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub(super) from: Name,
    /// The beginning of the target's identifier.
    pub(super) to: u64,
    pub(super) note: Note,
    pub(super) payload: &'a [u8],
}

/// What is wrong with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nonsense(pub(super) &'static str);

/// The numbers of a header behind the two names.
#[derive(Debug, Default)]
struct Fields {
    kind: u8,
    flags: u8,
    tag: u64,
    data: u64,
    ticket: u64,
    label: u64,
    length: u64,
}

impl Fields {
    fn of(note: &Note) -> Self {
        let none = Self::default();
        match *note {
            Note::Whole { envelope } => Self { kind: 1, ..Self::enclosing(&envelope) },
            Note::Announce { envelope, length, ticket, acknowledged } => {
                let fields = Self::enclosing(&envelope);
                let flags = fields.flags | if acknowledged { ACKNOWLEDGED } else { 0 };
                Self { kind: 2, flags, length, ticket, ..fields }
            }
            Note::Fetch { ticket, label, length } => {
                Self { kind: 3, ticket, label, length, ..none }
            }
            Note::Done { ticket } => Self { kind: 4, ticket, ..none },
            Note::Room { cost } => Self { kind: 5, length: cost, ..none },
            Note::Bye => Self { kind: 6, ..none },
            Note::Write { ticket, extent } => Self { kind: 7, ticket, ..Self::within(extent) },
            Note::Read { ticket, extent, length } => {
                Self { kind: 8, ticket, length, ..Self::within(extent) }
            }
            Note::Answer { ticket, denial } => {
                let (label, length) = words_of(denial);
                Self { kind: 9, ticket, label, length, ..none }
            }
        }
    }

    fn enclosing(envelope: &Envelope) -> Self {
        let lane = if envelope.lane == Lane::Plain { PLAIN } else { 0 };
        let data = if envelope.data.is_some() { HAS_DATA } else { 0 };
        let (tag, flags) = (envelope.tag, lane | data);
        Self { flags, tag, data: envelope.data.unwrap_or(0), ..Self::default() }
    }

    fn within(extent: Extent) -> Self {
        let Extent { key, address, length } = extent;
        Self { tag: key, data: address, label: length, ..Self::default() }
    }

    fn extent(&self) -> Extent {
        Extent { key: self.tag, address: self.data, length: self.label }
    }

    fn envelope(&self) -> Result<Envelope, Nonsense> {
        let lane = if self.flags & PLAIN == 0 { Lane::Tagged } else { Lane::Plain };
        if lane == Lane::Plain && self.tag != 0 {
            return Err(Nonsense("a plain message with a tag"));
        }
        let data = (self.flags & HAS_DATA != 0).then_some(self.data);
        Ok(Envelope { lane, tag: self.tag, data })
    }

    fn note(&self) -> Result<Note, Nonsense> {
        let Self { ticket, label, length, .. } = *self;
        if self.flags & !(PLAIN | HAS_DATA | ACKNOWLEDGED) != 0 {
            return Err(Nonsense("unknown flags"));
        }
        Ok(match self.kind {
            1 => Note::Whole { envelope: self.envelope()? },
            2 => {
                let (envelope, acknowledged) = (self.envelope()?, self.flags & ACKNOWLEDGED != 0);
                if length > isize::MAX as u64 {
                    return Err(Nonsense("a message that no memory can hold"));
                }
                Note::Announce { envelope, length, ticket, acknowledged }
            }
            3 => Note::Fetch { ticket, label, length },
            4 => Note::Done { ticket },
            5 => Note::Room { cost: length },
            6 => Note::Bye,
            7 => Note::Write { ticket, extent: self.extent() },
            8 => Note::Read { ticket, extent: self.extent(), length },
            9 => {
                let denial = denial_of(label, length);
                Note::Answer { ticket, denial: denial.ok_or(Nonsense("an unknown answer"))? }
            }
            _ => return Err(Nonsense("an unknown kind of packet")),
        })
    }
}

/// What a denial is called in a packet, with what it tells. None is zero.
fn words_of(denial: Option<Denial>) -> (u64, u64) {
    match denial {
        None => (0, 0),
        Some(Denial::NoKey) => (1, 0),
        Some(Denial::NoRight) => (2, 0),
        Some(Denial::Outside { region_bytes }) => (3, region_bytes),
    }
}

/// The opposite, if the words mean something.
fn denial_of(word: u64, detail: u64) -> Option<Option<Denial>> {
    Some(match (word, detail) {
        (0, 0) => None,
        (1, 0) => Some(Denial::NoKey),
        (2, 0) => Some(Denial::NoRight),
        (3, region_bytes) => Some(Denial::Outside { region_bytes }),
        _ => return None,
    })
}

/// Whether bytes may follow.
fn has_payload(note: &Note) -> bool {
    matches!(note, Note::Whole { .. } | Note::Write { .. } | Note::Answer { denial: None, .. })
}

/// The header of a packet; the payload is to be put behind it.
pub(super) fn encode(from: &Name, to: u64, note: &Note, payload_bytes: usize) -> Vec<u8> {
    let fields = Fields::of(note);
    let mut bytes = Vec::with_capacity(HEADER + payload_bytes);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[fields.kind, fields.flags, 0, 0]);
    bytes.extend_from_slice(from);
    let Fields { tag, data, ticket, label, length, .. } = fields;
    [to, tag, data, ticket, label, length]
        .iter()
        .for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    debug_assert_eq!(bytes.len(), HEADER);
    bytes
}

/// The packet that these bytes are, if they are one.
pub(super) fn decode(bytes: &[u8]) -> Result<Packet<'_>, Nonsense> {
    let (header, payload) =
        bytes.split_first_chunk::<HEADER>().ok_or(Nonsense("a packet without a header"))?;
    if header[..4] != MAGIC || header[6..8] != [0, 0] {
        return Err(Nonsense("not a packet of this version"));
    }
    let word = |index: usize| {
        let at = 72 + 8 * index;
        u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"))
    };
    let fields = Fields {
        kind: header[4],
        flags: header[5],
        tag: word(1),
        data: word(2),
        ticket: word(3),
        label: word(4),
        length: word(5),
    };
    let note = fields.note()?;
    if !has_payload(&note) && !payload.is_empty() {
        return Err(Nonsense("bytes behind a packet that has none"));
    }
    if payload.len() > SMALL {
        return Err(Nonsense("a packet that is too long"));
    }
    let from = header[8..72].try_into().expect("as many bytes as a name has");
    Ok(Packet { from, to: word(0), note, payload })
}

/// Who says that it has sent these bytes, and the beginning of the identifier of whom they are for, if
/// that can be told.
pub(super) fn names(bytes: &[u8]) -> Option<(Name, u64)> {
    let header = bytes.first_chunk::<HEADER>().filter(|header| header[..4] == MAGIC)?;
    let to = u64::from_le_bytes(header[72..80].try_into().ok()?);
    Some((header[8..72].try_into().ok()?, to))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn envelopes() -> impl Strategy<Value = Envelope> {
        (any::<bool>(), any::<u64>(), any::<Option<u64>>()).prop_map(|(plain, tag, data)| {
            let (lane, tag) = if plain { (Lane::Plain, 0) } else { (Lane::Tagged, tag) };
            Envelope { lane, tag, data }
        })
    }

    fn extents() -> impl Strategy<Value = Extent> {
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(key, address, length)| Extent {
            key,
            address,
            length,
        })
    }

    fn denials() -> impl Strategy<Value = Option<Denial>> {
        prop_oneof![
            Just(None),
            Just(Some(Denial::NoKey)),
            Just(Some(Denial::NoRight)),
            any::<u64>().prop_map(|region_bytes| Some(Denial::Outside { region_bytes })),
        ]
    }

    fn notes() -> impl Strategy<Value = Note> {
        prop_oneof![
            envelopes().prop_map(|envelope| Note::Whole { envelope }),
            (envelopes(), 0..=isize::MAX as u64, any::<u64>(), any::<bool>()).prop_map(
                |(envelope, length, ticket, acknowledged)| {
                    Note::Announce { envelope, length, ticket, acknowledged }
                }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(ticket, label, length)| Note::Fetch { ticket, label, length }),
            any::<u64>().prop_map(|ticket| Note::Done { ticket }),
            any::<u64>().prop_map(|cost| Note::Room { cost }),
            Just(Note::Bye),
            (any::<u64>(), extents()).prop_map(|(ticket, extent)| Note::Write { ticket, extent }),
            (any::<u64>(), extents(), any::<u64>())
                .prop_map(|(ticket, extent, length)| Note::Read { ticket, extent, length }),
            (any::<u64>(), denials()).prop_map(|(ticket, denial)| Note::Answer { ticket, denial }),
        ]
    }

    proptest! {
        #[test]
        fn a_packet_survives_its_bytes(
            note in notes(),
            name in any::<[u8; 32]>(),
            to in any::<u64>(),
            payload in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut from = [0; 64];
            from[32..].copy_from_slice(&name);
            let payload = if has_payload(&note) { payload } else { Vec::new() };
            let mut bytes = encode(&from, to, &note, payload.len());
            bytes.extend_from_slice(&payload);
            prop_assert_eq!(decode(&bytes), Ok(Packet { from, to, note, payload: &payload }));
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            kind in 0..12u8,
        ) {
            let _ = decode(&bytes);
            let mut almost = bytes;
            if almost.len() >= 8 {
                almost[..4].copy_from_slice(&MAGIC);
                almost[4] = kind;
                almost[5] &= 7;
                almost[6..8].fill(0);
            }
            if let Ok(packet) = decode(&almost) {
                prop_assert!(almost.len() >= HEADER && packet.payload.len() <= SMALL);
            }
        }
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_refused() {
        let whole = Note::Whole { envelope: Envelope::tagged(1) };
        let mut bytes = encode(&[1; 64], 2, &whole, 0);
        assert!(decode(&bytes[..HEADER - 1]).is_err());
        bytes.resize(HEADER + SMALL, 7);
        assert!(decode(&bytes).is_ok());
        bytes.push(7);
        assert!(decode(&bytes).is_err());
        let announce = |length| {
            let envelope = Envelope::tagged(1);
            let note = Note::Announce { envelope, length, ticket: 3, acknowledged: false };
            encode(&[1; 64], 2, &note, 0)
        };
        assert!(decode(&announce(isize::MAX as u64)).is_ok());
        assert!(decode(&announce(isize::MAX as u64 + 1)).is_err());
        assert!(decode(&announce(u64::MAX)).is_err());
        let mut bye = encode(&[1; 64], 2, &Note::Bye, 1);
        bye.push(0);
        assert!(decode(&bye).is_err());
    }
}
