//! A peer that speaks the protocol by hand, so that it can break it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memferry_message::ring::cells::{Consumer, Producer, Words};
use memferry_message::ring::layout::{End, Memory};
use memferry_sys::packet_socket::{PacketSocket, SocketName};
use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};

use super::until;

const MAGIC: u64 = 0x7972_7265_666D_656D;
const VERSION: u32 = 4;
/// The bytes of a list of windows, as it begins.
const BOARD_BYTES: usize = 64 << 10;

/// The first bytes of a hello, and all of it for somebody who does not listen.
pub(crate) fn hello(identity: u128, probe: (u64, u64), name: &str) -> Vec<u8> {
    let mut packet = MAGIC.to_le_bytes().to_vec();
    packet.extend(VERSION.to_le_bytes());
    packet.extend(identity.to_le_bytes());
    packet.extend(probe.0.to_le_bytes());
    packet.extend(probe.1.to_le_bytes());
    packet.extend(name.as_bytes());
    packet
}

/// A socket to an endpoint, and not a word said.
pub(crate) fn call(name: &str) -> PacketSocket {
    let name = SocketName::parse(name);
    let mut socket = None;
    until("the endpoint takes the call", || {
        socket = PacketSocket::connect(&name).ok();
        socket.is_some()
    });
    socket.unwrap()
}

/// A list of windows without any.
pub(crate) fn board() -> SealedMemory {
    SealedMemory::new("memferry-windows", BOARD_BYTES).unwrap()
}

/// Different for every connection of every process.
pub(crate) fn identity() -> u128 {
    let spread = |sum, byte| super::memory::mix(sum ^ u64::from(byte));
    let name = super::unique("").bytes().fold(1, spread);
    u128::from(std::process::id()) << 64 | u128::from(name)
}

/// A connection by hand.
pub(crate) struct RawPeer {
    pub(crate) socket: PacketSocket,
    // The ends point into the memory, so they come first: they are dropped first.
    pub(crate) producer: Producer,
    pub(crate) consumer: Consumer,
    pub(crate) memory: Memory,
    /// All bytes of the memory, once more.
    pub(crate) bytes: Mapping,
    probe: Box<[u64; 2]>,
}

impl RawPeer {
    /// Says hello as it should be said, and waits for the welcome.
    pub(crate) fn connect(name: &str) -> Option<Self> {
        Self::connect_as(name, identity(), "")
    }

    /// The same, as an endpoint that claims to be a certain one and to listen on a name.
    pub(crate) fn connect_as(name: &str, identity: u128, claimed: &str) -> Option<Self> {
        Self::connect_with(name, identity, claimed, &board())
    }

    /// The same, with a list of windows.
    pub(crate) fn connect_with(
        name: &str,
        identity: u128,
        claimed: &str,
        board: &SealedMemory,
    ) -> Option<Self> {
        let socket = call(name);
        let (memory, descriptor) = Memory::create(End::Connecting).unwrap();
        let probe = Box::new([identity as u64, 0]);
        let hello = hello(identity, (probe.as_ptr() as u64, probe[0]), claimed);
        socket.send(&hello, &[descriptor.as_fd(), board.as_fd()]).ok()?;
        let welcome = answer(&socket)?;
        // The word behind the two words of the probe says whether the answer is yes.
        if welcome.get(44..48)? != [0; 4] {
            return None;
        }
        let (producer, consumer) = (memory.producer(), memory.consumer());
        let bytes = descriptor.map(Access::Write).unwrap();
        Some(Self { socket, producer, consumer, memory, bytes, probe })
    }

    /// Writes a cell if there is room, and wakes the reader whatever it says.
    pub(crate) fn write(&mut self, words: &Words) -> bool {
        let has_room = self.producer.has_room().unwrap_or(false);
        if has_room {
            self.producer.write(words);
            self.wake();
        }
        has_room
    }

    pub(crate) fn wake(&self) {
        let attention = self.memory.other_attention();
        let ways = attention.take_ways();
        if ways != 0 {
            memferry_sys::wait_word::futex_wake_shared(attention.word());
            let _ = self.socket.send(&[0], &[]);
        }
    }

    /// Sends a descriptor as a shareable region is sent.
    pub(crate) fn send_region(&self, region: u32, descriptor: BorrowedFd<'_>) -> bool {
        self.socket.send(&region.to_le_bytes(), &[descriptor]).is_ok()
    }

    /// Whether the other side has hung up.
    pub(crate) fn is_lost(&self) -> bool {
        !memferry_sys::peer_process::is_alive(None, self.socket.as_fd())
    }
}

/// The next packet; `None` when the other side hangs up.
pub(crate) fn answer(socket: &PacketSocket) -> Option<Vec<u8>> {
    let mut packet = [0; 512];
    let mut found = None;
    until("an answer comes", || match socket.receive(&mut packet) {
        Ok((0, _)) => true,
        Ok((length, _)) => {
            found = Some(packet[..length].to_vec());
            true
        }
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    });
    found
}

/// Memory as a hello or a region must not have it.
pub(crate) fn bad_memory(length: usize) -> Vec<(&'static str, OwnedFd)> {
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
            memferry_sys::packet_socket::PacketSocket::pair()
                .unwrap()
                .0
                .as_fd()
                .try_clone_to_owned()
                .unwrap(),
        ),
    ]
}

/// The first word of a cell: its kind, a small number, a larger one.
pub(crate) fn first(kind: u8, small: u8, large: u16) -> u64 {
    u64::from(kind) << 32 | u64::from(small) << 40 | u64::from(large) << 48
}

/// The kinds of cells, as the protocol numbers them.
pub(crate) mod kind {
    pub(crate) const INLINE: u8 = 1;
    pub(crate) const EAGER: u8 = 2;
    pub(crate) const FRAGMENT: u8 = 3;
    pub(crate) const REQUEST: u8 = 4;
    pub(crate) const ACCEPT: u8 = 5;
    pub(crate) const FINISH: u8 = 6;
    pub(crate) const WITHDRAW: u8 = 7;
    pub(crate) const REACH: u8 = 9;
    pub(crate) const SHARE: u8 = 10;
}
