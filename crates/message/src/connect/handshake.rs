//! The two packets of the handshake: connect request and connect reply.

use memferry_sys::fault::{Call, call};

/// The version of everything that two processes share: packets, cells, layout.
pub(crate) const VERSION: u32 = 5;

const MAGIC: u64 = 0x7972_7265_666D_656D;
const MAX_NAME_BYTES: usize = 256;
/// The maximum length of a packet, in bytes.
pub(crate) const MAX_PACKET_BYTES: usize = 64 + MAX_NAME_BYTES;

/// A random number that identifies an endpoint, across processes and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EndpointUuid(pub u128);

impl EndpointUuid {
    /// Creates a random one.
    pub(crate) fn random() -> Self {
        let mut bytes = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        let filled = call(Call::Getrandom, || rustix::rand::getrandom(&mut bytes, flags));
        if filled != Ok(bytes.len()) {
            // The generator is not seeded: time, pid and an address still distinguish endpoints.
            let address = &raw const bytes as u64;
            let time = memferry_sys::clock::now_ns() ^ u64::from(std::process::id()) << 32;
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..].copy_from_slice(&time.to_le_bytes());
        }
        Self(u128::from_le_bytes(bytes))
    }
}

/// The packet of the connecting side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConnectRequest {
    /// The endpoint that connects.
    pub(crate) identity: EndpointUuid,
    /// The address of the probe words, and the value of the first.
    pub(crate) probe: (u64, u64),
    /// The name on which the endpoint listens; empty for a link.
    pub(crate) name: String,
}

/// The reason of a rejected connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RejectReason {
    /// Both sides connected at the same time.
    Crossed,
    /// The user is not allowed.
    User,
    /// The limit of peers is reached.
    Full,
    /// The shared memory is invalid.
    Memory,
    /// The accepting side has reached its limit of descriptors.
    Descriptors,
    /// A system call of the accepting side was denied.
    Filtered,
    /// The accepting side cannot map more memory.
    NoMemory,
    /// The accepting side has too low a limit of file sizes.
    FileSize,
    /// The access probe of the connecting side's memory does not complete.
    ProbeStuck,
    /// The connecting side has another version; this is the accepting side's.
    Version(u32),
}

impl RejectReason {
    /// The text for the user.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Crossed => "both sides connected at once",
            Self::User => "it does not allow this user: see `allow_uid`",
            Self::Full => "its limit of peers is reached: see `max_peers`",
            Self::Memory => "it did not accept the shared memory",
            Self::Descriptors => "its limit of open descriptors is reached: raise it (`ulimit -n`)",
            Self::Filtered => {
                "a system call that shared memory needs was denied to it: check for a filter \
                 (seccomp) or a security module"
            }
            Self::NoMemory => {
                "it can map no more memory: see its limits (`ulimit -v`, `sysctl vm.max_map_count`)"
            }
            Self::FileSize => {
                "its file size limit is too low for shared memory: raise it (`ulimit -f`)"
            }
            Self::ProbeStuck => super::PROBE_STUCK,
            Self::Version(_) => "it has another protocol version",
        }
    }

    /// The reason for an error of shared memory on the accepting side.
    pub(crate) fn for_memory(error: &std::io::Error) -> Self {
        match (error.raw_os_error(), error.kind()) {
            (Some(libc::EMFILE | libc::ENFILE), _) => Self::Descriptors,
            (Some(libc::EPERM | libc::EACCES | libc::ENOSYS), _) => Self::Filtered,
            (Some(libc::ENOMEM), _) => Self::NoMemory,
            (_, std::io::ErrorKind::FileTooLarge) => Self::FileSize,
            _ => Self::Memory,
        }
    }

    /// Returns whether a limit of the accepting side is the reason, which its owner should know.
    pub(crate) fn is_resource_shortage(self) -> bool {
        matches!(self, Self::Descriptors | Self::Filtered | Self::NoMemory | Self::FileSize)
    }

    fn encode(self) -> (u32, u32) {
        match self {
            Self::Crossed => (1, 0),
            Self::User => (2, 0),
            Self::Full => (3, 0),
            Self::Memory => (4, 0),
            Self::Version(version) => (5, version),
            Self::Descriptors => (6, 0),
            Self::Filtered => (7, 0),
            Self::NoMemory => (8, 0),
            Self::FileSize => (9, 0),
            Self::ProbeStuck => (10, 0),
        }
    }

    fn decode(code: u32, detail: u32) -> Option<Option<Self>> {
        Some(match code {
            0 => None,
            1 => Some(Self::Crossed),
            2 => Some(Self::User),
            3 => Some(Self::Full),
            4 => Some(Self::Memory),
            5 => Some(Self::Version(detail)),
            6 => Some(Self::Descriptors),
            7 => Some(Self::Filtered),
            8 => Some(Self::NoMemory),
            9 => Some(Self::FileSize),
            10 => Some(Self::ProbeStuck),
            _ => return None,
        })
    }
}

/// The packet of the accepting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectReply {
    /// The reason of the rejection, if the connection is rejected.
    pub(crate) rejection: Option<RejectReason>,
    /// The endpoint that accepts.
    pub(crate) identity: EndpointUuid,
    /// As in [`ConnectRequest`].
    pub(crate) probe: (u64, u64),
}

/// A connect request that cannot be accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadRequest {
    /// The packet is no connect request.
    UnknownProtocol,
    /// A request of another version.
    Version(u32),
}

fn encode_header(version: u32, identity: EndpointUuid, probe: (u64, u64)) -> Vec<u8> {
    let mut packet = Vec::with_capacity(MAX_PACKET_BYTES);
    packet.extend(MAGIC.to_le_bytes());
    packet.extend(version.to_le_bytes());
    packet.extend(identity.0.to_le_bytes());
    packet.extend(probe.0.to_le_bytes());
    packet.extend(probe.1.to_le_bytes());
    packet
}

/// Reads numbers from the front of a packet.
struct PacketReader<'a>(&'a [u8]);

impl PacketReader<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn header(&mut self) -> Option<(EndpointUuid, (u64, u64))> {
        let identity = EndpointUuid(u128::from_le_bytes(self.bytes()?));
        Some((identity, (self.u64()?, self.u64()?)))
    }
}

impl ConnectRequest {
    /// Encodes the request. A name that is too long is omitted.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut packet = encode_header(VERSION, self.identity, self.probe);
        if self.name.len() <= MAX_NAME_BYTES {
            packet.extend(self.name.as_bytes());
        }
        packet
    }

    /// Decodes a request.
    pub(crate) fn decode(packet: &[u8]) -> Result<Self, BadRequest> {
        let mut reader = PacketReader(packet);
        if reader.u64() != Some(MAGIC) {
            return Err(BadRequest::UnknownProtocol);
        }
        let version = reader.u32().ok_or(BadRequest::UnknownProtocol)?;
        if version != VERSION {
            return Err(BadRequest::Version(version));
        }
        let (identity, probe) = reader.header().ok_or(BadRequest::UnknownProtocol)?;
        let name =
            std::str::from_utf8(reader.0).map_err(|_| BadRequest::UnknownProtocol)?.to_owned();
        Ok(Self { identity, probe, name })
    }
}

impl ConnectReply {
    /// Encodes the reply.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut packet = encode_header(VERSION, self.identity, self.probe);
        let (code, detail) = self.rejection.map_or((0, 0), RejectReason::encode);
        packet.extend(code.to_le_bytes());
        packet.extend(detail.to_le_bytes());
        packet
    }

    /// Decodes a reply. The version is ignored, because every version must understand a rejection.
    pub(crate) fn decode(packet: &[u8]) -> Option<Self> {
        let mut reader = PacketReader(packet);
        if reader.u64() != Some(MAGIC) {
            return None;
        }
        reader.u32()?;
        let (identity, probe) = reader.header()?;
        let rejection = RejectReason::decode(reader.u32()?, reader.u32()?)?;
        Some(Self { rejection, identity, probe })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packets_survive_the_socket() {
        let request =
            ConnectRequest { identity: EndpointUuid(7), probe: (1, 2), name: "there".into() };
        assert_eq!(ConnectRequest::decode(&request.encode()), Ok(request));
        use RejectReason::{
            Crossed, Descriptors, FileSize, Filtered, Full, Memory, NoMemory, ProbeStuck, User,
        };
        let reasons =
            [Crossed, User, Full, Memory, Descriptors, Filtered, NoMemory, FileSize, ProbeStuck];
        let reasons = reasons.into_iter().chain([RejectReason::Version(9)]).map(Some);
        for rejection in reasons.chain([None]) {
            let reply = ConnectReply { rejection, identity: EndpointUuid::random(), probe: (3, 4) };
            assert_eq!(ConnectReply::decode(&reply.encode()), Some(reply));
        }
    }

    #[test]
    fn another_version_is_told_apart_from_another_protocol() {
        let request =
            ConnectRequest { identity: EndpointUuid(7), probe: (1, 2), name: String::new() };
        let mut packet = request.encode();
        packet[8] = 99;
        assert_eq!(ConnectRequest::decode(&packet), Err(BadRequest::Version(99)));
        packet[0] = 0;
        assert_eq!(ConnectRequest::decode(&packet), Err(BadRequest::UnknownProtocol));
    }

    proptest! {
        #[test]
        fn random_packets_are_refused_or_understood_but_never_crash(
            mut packet in prop::collection::vec(any::<u8>(), 0..MAX_PACKET_BYTES), real in any::<bool>(),
        ) {
            if real && packet.len() >= 12 {
                packet[..8].copy_from_slice(&MAGIC.to_le_bytes());
                packet[8..12].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = ConnectRequest::decode(&packet);
            let _ = ConnectReply::decode(&packet);
        }
    }
}
