//! A peer that implements the protocol by hand, so that it can violate it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memferry_message::ring::cells::{CellWords, Consumer, Producer};
use memferry_message::ring::layout::{ConnectionEnd, ConnectionMemory, GROW_MARKER};
use memferry_sys::seqpacket::{SeqPacketSocket, SocketName};
use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

use super::until;

const MAGIC: u64 = 0x7972_7265_666D_656D;
const VERSION: u32 = 5;
/// The initial size of a window table in bytes.
const BOARD_BYTES: usize = 64 << 10;

/// The first bytes of a connect request, and a complete one of a process that does not listen.
pub fn hello(identity: u128, probe: (u64, u64), name: &str) -> Vec<u8> {
    let mut packet = MAGIC.to_le_bytes().to_vec();
    packet.extend(VERSION.to_le_bytes());
    packet.extend(identity.to_le_bytes());
    packet.extend(probe.0.to_le_bytes());
    packet.extend(probe.1.to_le_bytes());
    packet.extend(name.as_bytes());
    packet
}

/// A socket to an endpoint, over which nothing is sent.
pub fn call(name: &str) -> SeqPacketSocket {
    let name = SocketName::parse(name);
    let mut socket = None;
    until("the endpoint accepts the connection", || {
        socket = SeqPacketSocket::connect(&name).ok();
        socket.is_some()
    });
    socket.unwrap()
}

/// An empty window table.
pub fn board() -> SealedMemory {
    SealedMemory::new("memferry-windows", BOARD_BYTES).unwrap()
}

/// A number that differs for every connection of every process.
pub fn identity() -> u128 {
    let spread = |sum, byte| crate::pattern::mix(sum ^ u64::from(byte));
    let name = super::unique("").bytes().fold(1, spread);
    u128::from(std::process::id()) << 64 | u128::from(name)
}

/// A connection by hand.
pub struct RawPeer {
    /// The socket of the handshake.
    pub socket: SeqPacketSocket,
    // The ends point into the memory, so they come first: fields are dropped in order.
    /// The end that writes to the peer.
    pub producer: Producer,
    /// The end that reads from the peer.
    pub consumer: Consumer,
    /// The shared memory.
    pub memory: ConnectionMemory,
    /// All bytes of the memory, mapped once more.
    pub bytes: Mapping,
    /// Kept while the peer may access it.
    _probe: Box<[u64; 2]>,
}

impl RawPeer {
    /// Sends a valid connect request, and waits for the reply.
    pub fn connect(name: &str) -> Option<Self> {
        Self::connect_as(name, identity(), "")
    }

    /// As `connect`, with a given identity and listening name.
    pub fn connect_as(name: &str, identity: u128, claimed: &str) -> Option<Self> {
        Self::connect_with(name, identity, claimed, &board())
    }

    /// As `connect`, with a window table.
    pub fn connect_with(
        name: &str,
        identity: u128,
        claimed: &str,
        board: &SealedMemory,
    ) -> Option<Self> {
        let socket = call(name);
        let (memory, descriptor) = ConnectionMemory::create(ConnectionEnd::Connector).unwrap();
        let probe = Box::new([identity as u64, 0]);
        let hello = hello(identity, (probe.as_ptr() as u64, probe[0]), claimed);
        socket.send(&hello, &[descriptor.as_fd(), board.as_fd()]).ok()?;
        let welcome = answer(&socket)?;
        // The word behind the two probe words contains the rejection.
        if welcome.get(44..48)? != [0; 4] {
            return None;
        }
        let (producer, consumer) = (memory.producer(), memory.consumer());
        let bytes = descriptor.map(Protection::ReadWrite).unwrap();
        Some(Self { socket, producer, consumer, memory, bytes, _probe: probe })
    }

    /// Returns a copy of the next cell, which stays in the ring. Follows the peer to the large ring.
    pub fn peek(&mut self) -> Option<CellWords> {
        loop {
            let words = self.consumer.peek()?;
            if words[0] >> 32 != GROW_MARKER[0] >> 32 {
                return Some(words);
            }
            self.consumer.grow().ok()?;
            self.consumer.advance();
        }
    }

    /// Writes a cell if there is space, and wakes the reader in any case.
    pub fn write(&mut self, words: &CellWords) -> bool {
        let has_room = self.producer.has_credit().unwrap_or(false);
        if has_room {
            self.producer.write(words);
            self.wake();
        }
        has_room
    }

    /// Wakes the peer.
    pub fn wake(&self) {
        let attention = self.memory.peer_wakeup();
        let ways = attention.take_armed();
        if ways != 0 {
            memferry_sys::futex::futex_wake_shared(attention.word());
            let _ = self.socket.send(&[0], &[]);
        }
    }

    /// Sends a descriptor as a shareable region is sent.
    pub fn send_region(&self, region: u32, descriptor: BorrowedFd<'_>) -> bool {
        self.socket.send(&region.to_le_bytes(), &[descriptor]).is_ok()
    }

    /// Returns whether the peer has closed the connection.
    pub fn is_lost(&self) -> bool {
        !memferry_sys::peer_process::is_alive(None, self.socket.as_fd())
    }
}

/// The next packet; `None` when the peer closes.
pub fn answer(socket: &SeqPacketSocket) -> Option<Vec<u8>> {
    let mut packet = [0; 512];
    let mut found = None;
    until("a reply arrives", || match socket.receive(&mut packet) {
        Ok((0, _)) => true,
        Ok((length, _)) => {
            found = Some(packet[..length].to_vec());
            true
        }
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    });
    found
}

/// Invalid memory for a request or a region.
pub fn bad_memory(length: usize) -> Vec<(&'static str, OwnedFd)> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let memfd = |bytes: usize, seals: SealFlags| {
        let fd = memfd_create("bad", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes as u64).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    vec![
        ("not sealed", memfd(length, SealFlags::empty())),
        ("can be shrunk", memfd(length, SealFlags::GROW)),
        ("too short", memfd(length - 4096, sealed)),
        ("too long", memfd(length + 4096, sealed)),
        ("empty", memfd(0, sealed)),
        ("not memory", std::fs::File::open("/proc/self/exe").unwrap().into()),
        (
            "not even a file",
            memferry_sys::seqpacket::SeqPacketSocket::pair()
                .unwrap()
                .0
                .as_fd()
                .try_clone_to_owned()
                .unwrap(),
        ),
    ]
}

/// The first word of a cell: its kind, an 8-bit and a 16-bit field.
pub fn first(kind: u8, small: u8, large: u16) -> u64 {
    u64::from(kind) << 32 | u64::from(small) << 40 | u64::from(large) << 48
}

/// The kinds of cells in the protocol.
pub mod kind {
    /// A message in a cell.
    pub const INLINE: u8 = 1;
    /// A message in the bounce ring.
    pub const EAGER: u8 = 2;
    /// A part of a message.
    pub const FRAGMENT: u8 = 3;
    /// An announcement (RTS).
    pub const REQUEST: u8 = 4;
    /// The reply to an announcement (CTS).
    pub const ACCEPT: u8 = 5;
    /// The end of a message (FIN).
    pub const FINISH: u8 = 6;
    /// A cancelled announcement.
    pub const WITHDRAW: u8 = 7;
    /// What the sender can access.
    pub const REACH: u8 = 9;
    /// A shared region.
    pub const SHARE: u8 = 10;
}
