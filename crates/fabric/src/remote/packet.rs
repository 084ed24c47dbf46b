//! Packets between hosts: their contents, encoder and decoder, which trusts nothing.
//!
//! Every packet contains the sender's whole address, so that a peer that no program has inserted
//! can send first, and the target's identifier, so that an endpoint with a reused port does not
//! reply for another.

use memferry_message::{Envelope, MatchSpace};

use super::RawAddress;
use crate::mr_table::{RmaDenied, RmaExtent};

/// The bytes of a packet before its payload.
pub(super) const HEADER_BYTES: usize = 120;
/// The maximum length of a packet: libfabric's layers send this much at once, with one copy.
pub(super) const MAX_PACKET: usize = 16 << 10;
/// The maximum length of a message in one packet.
pub(super) const MAX_EAGER: usize = MAX_PACKET - HEADER_BYTES;

/// The first bytes of every packet. The last byte is the version.
const MAGIC: [u8; 4] = *b"mfr\x01";

const UNTAGGED: u8 = 1;
const HAS_DATA: u8 = 2;
const ACKNOWLEDGED: u8 = 4;
/// A request to the receiver's provider, or the reply to one if [`UNTAGGED`] is set too.
const INTERNAL: u8 = 8;

/// The body of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PacketBody {
    /// A message, whose bytes follow.
    Eager { envelope: Envelope },
    /// Announcement of a message.
    Rts { envelope: Envelope, length: u64, ticket: u64, acknowledged: bool },
    /// Request for the first bytes of an announced message, to be sent under this label.
    Cts { ticket: u64, label: u64, length: u64 },
    /// The bytes have arrived.
    Fin { ticket: u64 },
    /// Return of credit.
    Credit { cost: u64 },
    /// The sender closes.
    Close,
    /// Write: the bytes that follow are for the start of this memory of the target.
    Write { ticket: u64, extent: RmaExtent },
    /// Read: request for the first bytes of this memory of the target.
    Read { ticket: u64, extent: RmaExtent, length: u64 },
    /// Reply to a write or read: the bytes follow, or the access is denied.
    Reply { ticket: u64, denial: Option<RmaDenied> },
}

/// A decoded packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub(super) from: RawAddress,
    /// The first bytes of the target's identifier.
    pub(super) to: u64,
    pub(super) body: PacketBody,
    pub(super) payload: &'a [u8],
}

/// The violation in an invalid packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PacketError(pub(super) &'static str);

/// The fields of a header behind the two addresses.
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
    fn of(body: &PacketBody) -> Self {
        let none = Self::default();
        match *body {
            PacketBody::Eager { envelope } => Self { kind: 1, ..Self::enclosing(&envelope) },
            PacketBody::Rts { envelope, length, ticket, acknowledged } => {
                let fields = Self::enclosing(&envelope);
                let flags = fields.flags | if acknowledged { ACKNOWLEDGED } else { 0 };
                Self { kind: 2, flags, length, ticket, ..fields }
            }
            PacketBody::Cts { ticket, label, length } => {
                Self { kind: 3, ticket, label, length, ..none }
            }
            PacketBody::Fin { ticket } => Self { kind: 4, ticket, ..none },
            PacketBody::Credit { cost } => Self { kind: 5, length: cost, ..none },
            PacketBody::Close => Self { kind: 6, ..none },
            PacketBody::Write { ticket, extent } => {
                Self { kind: 7, ticket, ..Self::within(extent) }
            }
            PacketBody::Read { ticket, extent, length } => {
                Self { kind: 8, ticket, length, ..Self::within(extent) }
            }
            PacketBody::Reply { ticket, denial } => {
                let (label, length) = words_of(denial);
                Self { kind: 9, ticket, label, length, ..none }
            }
        }
    }

    fn enclosing(envelope: &Envelope) -> Self {
        let lane = match envelope.space {
            MatchSpace::Tagged => 0,
            MatchSpace::Untagged => UNTAGGED,
            MatchSpace::Service => INTERNAL,
            MatchSpace::Reply => INTERNAL | UNTAGGED,
        };
        let data = if envelope.data.is_some() { HAS_DATA } else { 0 };
        let (tag, flags) = (envelope.tag, lane | data);
        Self { flags, tag, data: envelope.data.unwrap_or(0), ..Self::default() }
    }

    fn within(extent: RmaExtent) -> Self {
        let RmaExtent { key, address, length } = extent;
        Self { tag: key, data: address, label: length, ..Self::default() }
    }

    fn extent(&self) -> RmaExtent {
        RmaExtent { key: self.tag, address: self.data, length: self.label }
    }

    fn envelope(&self) -> Result<Envelope, PacketError> {
        let lane = match (self.flags & INTERNAL != 0, self.flags & UNTAGGED != 0) {
            (false, false) => MatchSpace::Tagged,
            (false, true) => MatchSpace::Untagged,
            (true, false) => MatchSpace::Service,
            (true, true) => MatchSpace::Reply,
        };
        if lane == MatchSpace::Untagged && self.tag != 0 {
            return Err(PacketError("untagged message with a tag"));
        }
        let data = (self.flags & HAS_DATA != 0).then_some(self.data);
        Ok(Envelope { space: lane, tag: self.tag, data })
    }

    fn body(&self) -> Result<PacketBody, PacketError> {
        let Self { ticket, label, length, .. } = *self;
        if self.flags & !(UNTAGGED | HAS_DATA | ACKNOWLEDGED | INTERNAL) != 0 {
            return Err(PacketError("unknown flags"));
        }
        Ok(match self.kind {
            1 => PacketBody::Eager { envelope: self.envelope()? },
            2 => {
                let (envelope, acknowledged) = (self.envelope()?, self.flags & ACKNOWLEDGED != 0);
                if envelope.space == MatchSpace::Service {
                    return Err(PacketError("announced request"));
                }
                if length > isize::MAX as u64 {
                    return Err(PacketError("message longer than the address space"));
                }
                PacketBody::Rts { envelope, length, ticket, acknowledged }
            }
            3 => PacketBody::Cts { ticket, label, length },
            4 => PacketBody::Fin { ticket },
            5 => PacketBody::Credit { cost: length },
            6 => PacketBody::Close,
            7 => PacketBody::Write { ticket, extent: self.extent() },
            8 => PacketBody::Read { ticket, extent: self.extent(), length },
            9 => {
                let denial = denial_of(label, length);
                PacketBody::Reply { ticket, denial: denial.ok_or(PacketError("unknown reply"))? }
            }
            _ => return Err(PacketError("unknown kind of packet")),
        })
    }
}

/// Encodes a denial as two words. None is zero.
fn words_of(denial: Option<RmaDenied>) -> (u64, u64) {
    match denial {
        None => (0, 0),
        Some(RmaDenied::UnknownKey) => (1, 0),
        Some(RmaDenied::NoRight) => (2, 0),
        Some(RmaDenied::Outside { region_bytes }) => (3, region_bytes),
    }
}

/// Decodes a denial.
fn denial_of(word: u64, detail: u64) -> Option<Option<RmaDenied>> {
    Some(match (word, detail) {
        (0, 0) => None,
        (1, 0) => Some(RmaDenied::UnknownKey),
        (2, 0) => Some(RmaDenied::NoRight),
        (3, region_bytes) => Some(RmaDenied::Outside { region_bytes }),
        _ => return None,
    })
}

/// Returns whether a payload may follow.
fn has_payload(body: &PacketBody) -> bool {
    matches!(
        body,
        PacketBody::Eager { .. }
            | PacketBody::Write { .. }
            | PacketBody::Reply { denial: None, .. }
    )
}

/// Encodes the header of a packet; the payload is appended to it.
pub(super) fn encode(
    from: &RawAddress,
    to: u64,
    body: &PacketBody,
    payload_bytes: usize,
) -> Vec<u8> {
    let fields = Fields::of(body);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload_bytes);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[fields.kind, fields.flags, 0, 0]);
    bytes.extend_from_slice(from);
    let Fields { tag, data, ticket, label, length, .. } = fields;
    [to, tag, data, ticket, label, length]
        .iter()
        .for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    debug_assert_eq!(bytes.len(), HEADER_BYTES);
    bytes
}

/// Decodes a packet.
pub(super) fn decode(bytes: &[u8]) -> Result<Packet<'_>, PacketError> {
    let (header, payload) =
        bytes.split_first_chunk::<HEADER_BYTES>().ok_or(PacketError("packet without a header"))?;
    if header[..4] != MAGIC || header[6..8] != [0, 0] {
        return Err(PacketError("not a packet of this version"));
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
    let body = fields.body()?;
    if !has_payload(&body) && !payload.is_empty() {
        return Err(PacketError("payload in a packet that has none"));
    }
    if payload.len() > MAX_EAGER {
        return Err(PacketError("packet too long"));
    }
    let from = header[8..72].try_into().expect("as many bytes as a name has");
    Ok(Packet { from, to: word(0), body, payload })
}

/// The sender's address and the first bytes of the target's identifier, if the header has them.
pub(super) fn addresses(bytes: &[u8]) -> Option<(RawAddress, u64)> {
    let header = bytes.first_chunk::<HEADER_BYTES>().filter(|header| header[..4] == MAGIC)?;
    let to = u64::from_le_bytes(header[72..80].try_into().ok()?);
    Some((header[8..72].try_into().ok()?, to))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn envelopes() -> impl Strategy<Value = Envelope> {
        (0..3u8, any::<u64>(), any::<Option<u64>>()).prop_map(|(lane, tag, data)| {
            let (lane, tag) = match lane {
                0 => (MatchSpace::Untagged, 0),
                1 => (MatchSpace::Tagged, tag),
                _ => (MatchSpace::Reply, tag),
            };
            Envelope { space: lane, tag, data }
        })
    }

    fn extents() -> impl Strategy<Value = RmaExtent> {
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(key, address, length)| RmaExtent {
            key,
            address,
            length,
        })
    }

    fn denials() -> impl Strategy<Value = Option<RmaDenied>> {
        prop_oneof![
            Just(None),
            Just(Some(RmaDenied::UnknownKey)),
            Just(Some(RmaDenied::NoRight)),
            any::<u64>().prop_map(|region_bytes| Some(RmaDenied::Outside { region_bytes })),
        ]
    }

    fn bodies() -> impl Strategy<Value = PacketBody> {
        prop_oneof![
            envelopes().prop_map(|envelope| PacketBody::Eager { envelope }),
            (envelopes(), 0..=isize::MAX as u64, any::<u64>(), any::<bool>()).prop_map(
                |(envelope, length, ticket, acknowledged)| {
                    PacketBody::Rts { envelope, length, ticket, acknowledged }
                }
            ),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(ticket, label, length)| PacketBody::Cts { ticket, label, length }),
            any::<u64>().prop_map(|ticket| PacketBody::Fin { ticket }),
            any::<u64>().prop_map(|cost| PacketBody::Credit { cost }),
            Just(PacketBody::Close),
            (any::<u64>(), extents())
                .prop_map(|(ticket, extent)| PacketBody::Write { ticket, extent }),
            (any::<u64>(), extents(), any::<u64>())
                .prop_map(|(ticket, extent, length)| PacketBody::Read { ticket, extent, length }),
            (any::<u64>(), denials())
                .prop_map(|(ticket, denial)| PacketBody::Reply { ticket, denial }),
        ]
    }

    proptest! {
        #[test]
        fn a_packet_survives_its_bytes(
            body in bodies(),
            name in any::<[u8; 32]>(),
            to in any::<u64>(),
            payload in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut from = [0; 64];
            from[32..].copy_from_slice(&name);
            let payload = if has_payload(&body) { payload } else { Vec::new() };
            let mut bytes = encode(&from, to, &body, payload.len());
            bytes.extend_from_slice(&payload);
            prop_assert_eq!(decode(&bytes), Ok(Packet { from, to, body, payload: &payload }));
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
                almost[5] &= 15;
                almost[6..8].fill(0);
            }
            if let Ok(packet) = decode(&almost) {
                prop_assert!(almost.len() >= HEADER_BYTES && packet.payload.len() <= MAX_EAGER);
            }
        }
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_refused() {
        let whole = PacketBody::Eager { envelope: Envelope::tagged(1) };
        let mut bytes = encode(&[1; 64], 2, &whole, 0);
        assert!(decode(&bytes[..HEADER_BYTES - 1]).is_err());
        bytes.resize(HEADER_BYTES + MAX_EAGER, 7);
        assert!(decode(&bytes).is_ok());
        bytes.push(7);
        assert!(decode(&bytes).is_err());
        let announce = |length| {
            let envelope = Envelope::tagged(1);
            let body = PacketBody::Rts { envelope, length, ticket: 3, acknowledged: false };
            encode(&[1; 64], 2, &body, 0)
        };
        assert!(decode(&announce(isize::MAX as u64)).is_ok());
        assert!(decode(&announce(isize::MAX as u64 + 1)).is_err());
        assert!(decode(&announce(u64::MAX)).is_err());
        let mut bye = encode(&[1; 64], 2, &PacketBody::Close, 1);
        bye.push(0);
        assert!(decode(&bye).is_err());
    }
}
