//! The two packets of the handshake.

use memferry_sys::fault::{Call, call};

/// The version of everything that two processes share: packets, cells, layout.
pub(crate) const VERSION: u32 = 4;

const MAGIC: u64 = 0x7972_7265_666D_656D;
const LONGEST_NAME: usize = 256;
/// The longest packet.
pub(crate) const MOST_BYTES: usize = 64 + LONGEST_NAME;

/// Tells endpoints apart, across processes and time: random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Identity(pub u128);

impl Identity {
    /// A fresh one.
    pub(crate) fn random() -> Self {
        let mut bytes = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        let filled = call(Call::Getrandom, || rustix::rand::getrandom(&mut bytes, flags));
        if filled != Ok(bytes.len()) {
            // Not yet seeded: time and place still tell endpoints apart.
            let place = &raw const bytes as u64;
            let time = memferry_sys::clock::now_ns() ^ u64::from(std::process::id()) << 32;
            bytes[..8].copy_from_slice(&place.to_le_bytes());
            bytes[8..].copy_from_slice(&time.to_le_bytes());
        }
        Self(u128::from_le_bytes(bytes))
    }
}

/// From the connecting side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Which endpoint this is.
    pub(crate) identity: Identity,
    /// The address of a word for trying out access, and what it holds.
    pub(crate) probe: (u64, u64),
    /// Where this endpoint can be reached; empty for a link.
    pub(crate) name: String,
}

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Both connected at once.
    Crossed,
    /// The user is not allowed.
    User,
    /// There are too many peers already.
    Full,
    /// The shared memory is not what it must be.
    Memory,
    /// The accepting side has as many descriptors as it may have.
    Descriptors,
    /// A system call was refused to the accepting side.
    Filtered,
    /// The accepting side can map nothing more.
    NoMemory,
    /// The accepting side may not make memory as long as it must be.
    FileSize,
    /// Memory that the connecting side names in its hello does not come.
    Absent,
    /// The connecting side speaks another version than this one.
    Version(u32),
}

impl Refusal {
    /// For people.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Crossed => "both sides connected at once",
            Self::User => "this user is not allowed there: see `allow_uid`",
            Self::Full => "it has as many peers as it may have: see `most_peers`",
            Self::Memory => "it did not accept the shared memory",
            Self::Descriptors => {
                "it has as many open descriptors as it may have: raise its limit (`ulimit -n`)"
            }
            Self::Filtered => {
                "a system call that shared memory needs was refused to it: look for a filter \
                 (seccomp) or a security module"
            }
            Self::NoMemory => {
                "it can map no more memory: see its limits (`ulimit -v`, `sysctl vm.max_map_count`)"
            }
            Self::FileSize => {
                "it may not make shared memory: raise its limit of the size of files (`ulimit -f`)"
            }
            Self::Absent => super::ABSENT,
            Self::Version(_) => "it speaks another version",
        }
    }

    /// What stands in the way of shared memory on the accepting side, by the error that it met.
    pub(crate) fn for_memory(error: &std::io::Error) -> Self {
        match (error.raw_os_error(), error.kind()) {
            (Some(libc::EMFILE | libc::ENFILE), _) => Self::Descriptors,
            (Some(libc::EPERM | libc::EACCES | libc::ENOSYS), _) => Self::Filtered,
            (Some(libc::ENOMEM), _) => Self::NoMemory,
            (_, std::io::ErrorKind::FileTooLarge) => Self::FileSize,
            _ => Self::Memory,
        }
    }

    /// Whether it is for want of something on the accepting side, whose owner should know.
    pub(crate) fn is_want(self) -> bool {
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
            Self::Absent => (10, 0),
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
            10 => Some(Self::Absent),
            _ => return None,
        })
    }
}

/// From the accepting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// Why not, if not.
    pub(crate) refusal: Option<Refusal>,
    /// Which endpoint this is.
    pub(crate) identity: Identity,
    /// As in [`Hello`].
    pub(crate) probe: (u64, u64),
}

/// A hello that cannot be answered with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadHello {
    /// Not a hello at all.
    Foreign,
    /// A hello of another version.
    Version(u32),
}

fn head(version: u32, identity: Identity, probe: (u64, u64)) -> Vec<u8> {
    let mut packet = Vec::with_capacity(MOST_BYTES);
    packet.extend(MAGIC.to_le_bytes());
    packet.extend(version.to_le_bytes());
    packet.extend(identity.0.to_le_bytes());
    packet.extend(probe.0.to_le_bytes());
    packet.extend(probe.1.to_le_bytes());
    packet
}

/// Takes numbers off the front of a packet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
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

    fn head(&mut self) -> Option<(Identity, (u64, u64))> {
        let identity = Identity(u128::from_le_bytes(self.bytes()?));
        Some((identity, (self.u64()?, self.u64()?)))
    }
}

impl Hello {
    /// As a packet. A name that is too long is left out: it is only for people.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut packet = head(VERSION, self.identity, self.probe);
        if self.name.len() <= LONGEST_NAME {
            packet.extend(self.name.as_bytes());
        }
        packet
    }

    /// From a packet.
    pub(crate) fn decode(packet: &[u8]) -> Result<Self, BadHello> {
        let mut reader = Reader(packet);
        if reader.u64() != Some(MAGIC) {
            return Err(BadHello::Foreign);
        }
        let version = reader.u32().ok_or(BadHello::Foreign)?;
        if version != VERSION {
            return Err(BadHello::Version(version));
        }
        let (identity, probe) = reader.head().ok_or(BadHello::Foreign)?;
        let name = std::str::from_utf8(reader.0).map_err(|_| BadHello::Foreign)?.to_owned();
        Ok(Self { identity, probe, name })
    }
}

impl Welcome {
    /// As a packet.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut packet = head(VERSION, self.identity, self.probe);
        let (code, detail) = self.refusal.map_or((0, 0), Refusal::encode);
        packet.extend(code.to_le_bytes());
        packet.extend(detail.to_le_bytes());
        packet
    }

    /// From a packet. The version is not looked at: a refusal must be understood by any.
    pub(crate) fn decode(packet: &[u8]) -> Option<Self> {
        let mut reader = Reader(packet);
        if reader.u64() != Some(MAGIC) {
            return None;
        }
        reader.u32()?;
        let (identity, probe) = reader.head()?;
        let refusal = Refusal::decode(reader.u32()?, reader.u32()?)?;
        Some(Self { refusal, identity, probe })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packets_survive_the_socket() {
        let hello = Hello { identity: Identity(7), probe: (1, 2), name: "there".into() };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        use Refusal::{
            Absent, Crossed, Descriptors, FileSize, Filtered, Full, Memory, NoMemory, User,
        };
        let refusals =
            [Crossed, User, Full, Memory, Descriptors, Filtered, NoMemory, FileSize, Absent];
        let refusals = refusals.into_iter().chain([Refusal::Version(9)]).map(Some);
        for refusal in refusals.chain([None]) {
            let welcome = Welcome { refusal, identity: Identity::random(), probe: (3, 4) };
            assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
        }
    }

    #[test]
    fn another_version_is_told_apart_from_another_protocol() {
        let hello = Hello { identity: Identity(7), probe: (1, 2), name: String::new() };
        let mut packet = hello.encode();
        packet[8] = 99;
        assert_eq!(Hello::decode(&packet), Err(BadHello::Version(99)));
        packet[0] = 0;
        assert_eq!(Hello::decode(&packet), Err(BadHello::Foreign));
    }

    proptest! {
        #[test]
        fn random_packets_are_refused_or_understood_but_never_crash(
            mut packet in prop::collection::vec(any::<u8>(), 0..MOST_BYTES), real in any::<bool>(),
        ) {
            if real && packet.len() >= 12 {
                packet[..8].copy_from_slice(&MAGIC.to_le_bytes());
                packet[8..12].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = Hello::decode(&packet);
            let _ = Welcome::decode(&packet);
        }
    }
}
