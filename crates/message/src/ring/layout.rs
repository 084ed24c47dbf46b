//! The layout of a connection's shared memory.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use memferry_sys::fault::step;
use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};
use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};

use super::backpressure::{Backpressure, CLOSED, NO_EAGER, NO_RTS};
use super::bounce::BounceSpan;
use super::cells::{Cell, CellWords, Consumer, Producer, Ring};
use super::claims::ChunkClaims;
use super::hint_memory::PeerHints;
use super::wakeup::WakeupFlags;
use super::window_gate::AccessFlag;

/// Cells of a large ring.
pub const CELLS: usize = 256;
/// Cells of a ring that has carried few messages. Those of both directions lie in one page.
pub const SMALL_CELLS: usize = 16;
/// The maximum number of cells that one side has written and the other has not read.
pub const MAX_UNREAD_CELLS: usize = CELLS + SMALL_CELLS;
/// The cell before the first one of a large ring: a control message without content.
pub const GROW_MARKER: CellWords = [15 << 32, 0, 0, 0, 0, 0, 0, 0];
/// Bytes of a bounce ring.
pub const BOUNCE_BYTES: usize = 512 << 10;
/// Claim slots of a direction.
pub const CLAIM_SLOTS: usize = 32;

/// The words that one side owns: its position in the ring, its wakeup flags and its backpressure.
#[repr(C, align(128))]
struct SideWords {
    consumed: AtomicU64,
    /// Not 0 if this side is closed: it has dropped its messages, and their memory may be reused.
    closed: AtomicU64,
    padding: [u64; 14],
    // The producer reads both of these after and before each cell, so they share a line.
    wakeup: WakeupFlags,
    backpressure: Backpressure,
    padding_2: [u32; 14],
    /// The window of the peer that this side is accessing.
    access: AccessFlag,
    padding_3: [u64; 7],
}

/// The rings of one direction.
#[repr(C, align(4096))]
struct DirectionRings {
    cells: [Cell; CELLS],
    claims: [ChunkClaims; CLAIM_SLOTS],
    bounce: [u8; BOUNCE_BYTES],
}

/// The shared memory of a connection. Index 0 is the connecting side's: the direction that it
/// writes, and the words that it owns.
#[repr(C, align(4096))]
struct Layout {
    sides: [SideWords; 2],
    small_cells: [[Cell; SMALL_CELLS]; 2],
    directions: [DirectionRings; 2],
}

/// The end of a connection that this process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The side that connected.
    Connector,
    /// The side that accepted.
    Acceptor,
    /// Both ends: an endpoint's connection to itself, which uses one direction.
    Loopback,
}

/// The mapped memory of a connection. Each clone holds a reference to the mapping.
#[derive(Debug, Clone)]
pub struct ConnectionMemory {
    mapping: Arc<Mapping>,
    /// The hints of the peer, once it has sent them.
    peer_hints: Arc<OnceLock<PeerHints>>,
    outgoing: usize,
    incoming: usize,
}

/// Size of a connection's shared memory, in bytes.
pub const CONNECTION_BYTES: usize = size_of::<Layout>();

impl ConnectionMemory {
    /// Creates the memory, on the connecting side. Returns it with the descriptor for the peer.
    pub fn create(end: ConnectionEnd) -> io::Result<(Self, SealedMemory)> {
        let memory = SealedMemory::new("memferry-connection", CONNECTION_BYTES)?;
        let mapped = Self::map(&memory, end)?;
        Ok((mapped, memory))
    }

    /// Maps the memory that the connecting side sent, if it has the right size and seals.
    pub fn from_untrusted_fd(descriptor: OwnedFd, end: ConnectionEnd) -> io::Result<Self> {
        Self::map(&SealedMemory::from_untrusted_fd(descriptor, CONNECTION_BYTES)?, end)
    }

    fn map(memory: &SealedMemory, end: ConnectionEnd) -> io::Result<Self> {
        let (outgoing, incoming) = match end {
            ConnectionEnd::Connector => (0, 1),
            ConnectionEnd::Acceptor => (1, 0),
            ConnectionEnd::Loopback => (0, 0),
        };
        let mapping = Arc::new(memory.map(Protection::ReadWrite)?);
        Ok(Self { mapping, peer_hints: Arc::default(), outgoing, incoming })
    }

    /// Returns whether both are the memory of one connection.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    fn layout(&self) -> *const Layout {
        self.mapping.as_ptr().cast()
    }

    fn direction(&self, index: usize) -> *const DirectionRings {
        // SAFETY: the mapping has the size of a layout, and the index is 0 or 1.
        unsafe { &raw const (*self.layout()).directions[index] }
    }

    fn side(&self, index: usize) -> &SideWords {
        // SAFETY: as above; a side consists of atomics, and of padding that no thread reads.
        unsafe { &(*self.layout()).sides[index] }
    }

    /// The words of the side that reads a direction.
    fn reader_of(&self, direction: usize) -> &SideWords {
        if self.outgoing == self.incoming { self.side(0) } else { self.side(1 - direction) }
    }

    /// Creates the producer of the outgoing ring.
    pub fn producer(&self) -> Producer {
        let [small, large] = self.rings(self.outgoing);
        Producer::growing(small, large, GROW_MARKER)
    }

    /// Creates the consumer of the incoming ring.
    pub fn consumer(&self) -> Consumer {
        let [small, large] = self.rings(self.incoming);
        Consumer::growing(small, large)
    }

    /// The small and the large ring of a direction.
    fn rings(&self, direction: usize) -> [Ring; 2] {
        let rings = self.direction(direction);
        let consumed = &self.reader_of(direction).consumed;
        // SAFETY: cells and word lie in the mapping. Producer and consumer live in the `Connection`
        // beside this memory, which is dropped after them.
        unsafe {
            let small = (&raw const (*self.layout()).small_cells[direction]).cast();
            let large = (&raw const (*rings).cells).cast();
            [Ring::new(small, SMALL_CELLS, consumed), Ring::new(large, CELLS, consumed)]
        }
    }

    /// This side's wakeup flags.
    pub fn own_wakeup(&self) -> &WakeupFlags {
        &self.reader_of(self.incoming).wakeup
    }

    /// The peer's wakeup flags.
    pub fn peer_wakeup(&self) -> &WakeupFlags {
        &self.reader_of(self.outgoing).wakeup
    }

    /// The hints of the peer, which this side sets when it takes [`super::wakeup::HINT_ARMED`].
    pub fn peer_hints(&self) -> &OnceLock<PeerHints> {
        &self.peer_hints
    }

    /// This side's backpressure.
    pub fn own_backpressure(&self) -> &Backpressure {
        &self.reader_of(self.incoming).backpressure
    }

    /// The peer's backpressure.
    #[inline]
    pub fn peer_backpressure(&self) -> &Backpressure {
        &self.reader_of(self.outgoing).backpressure
    }

    /// Marks this side closed, before it drops its messages, and closes its windows to the peer.
    /// The peer reads one of the words before it sends, and the other after it has copied. The
    /// caller must check for accesses of the peer after this.
    pub fn mark_closed(&self) {
        self.own_backpressure().set(NO_EAGER | NO_RTS | CLOSED);
        step();
        self.reader_of(self.incoming).closed.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Returns whether the peer is closed: then bytes that were copied from its memory may be of
    /// any content.
    pub fn is_peer_closed(&self) -> bool {
        // Acquire fence: the loads of the copy come before this load.
        fence(Ordering::Acquire);
        self.reader_of(self.outgoing).closed.load(Ordering::Relaxed) != 0
    }

    /// The flag in which this side publishes its access to a window of the peer.
    pub fn own_access(&self) -> &AccessFlag {
        &self.reader_of(self.incoming).access
    }

    /// The flag in which the peer publishes its access to a window of this side.
    pub fn peer_access(&self) -> &AccessFlag {
        &self.reader_of(self.outgoing).access
    }

    /// A claim slot of messages to this side (`incoming`) or from it.
    pub fn claims(&self, incoming: bool, index: usize) -> &ChunkClaims {
        let rings = self.direction(if incoming { self.incoming } else { self.outgoing });
        // SAFETY: the slot lies inside the mapping, the index is checked, and a slot consists of
        // atomics.
        unsafe { &(&(*rings).claims)[index] }
    }

    /// The address of a span in the incoming or outgoing bounce ring.
    pub fn span(&self, incoming: bool, span: BounceSpan) -> *mut u8 {
        assert!(span.offset as usize + span.length as usize <= BOUNCE_BYTES);
        let rings = self.direction(if incoming { self.incoming } else { self.outgoing });
        // SAFETY: the span lies inside the bounce ring, as checked above.
        unsafe { (&raw const (*rings).bounce).cast::<u8>().add(span.offset as usize).cast_mut() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_connection_with_few_messages_uses_one_page() {
        assert_eq!(std::mem::offset_of!(Layout, directions), 4096);
    }

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let (connecting, memory) = ConnectionMemory::create(ConnectionEnd::Connector).unwrap();
        let descriptor = memory.as_fd().try_clone_to_owned().unwrap();
        let accepting =
            ConnectionMemory::from_untrusted_fd(descriptor, ConnectionEnd::Acceptor).unwrap();
        for (from, to) in [(&connecting, &accepting), (&accepting, &connecting)] {
            let (mut producer, mut consumer) = (from.producer(), to.consumer());
            assert!(producer.has_credit().unwrap());
            producer.write(&[1 << 40, 2, 3, 4, 5, 6, 7, 8]);
            assert_eq!(consumer.peek().unwrap()[1..], [2, 3, 4, 5, 6, 7, 8]);
            consumer.advance();
            consumer.publish();
            assert_eq!(producer.refresh_credits(), Ok(1));
            to.own_wakeup().arm(1);
            assert_eq!(from.peer_wakeup().take_armed(), 1);
            assert_eq!(to.own_wakeup().armed(), 0);
            to.own_backpressure().set(NO_EAGER);
            assert!(from.peer_backpressure().includes(NO_EAGER));
            assert!(!to.peer_backpressure().includes(NO_EAGER));
            to.own_backpressure().set(0);
            let span = BounceSpan { offset: 64, length: 8 };
            // SAFETY: the span lies inside the bounce ring, and only this thread accesses it.
            unsafe {
                from.span(false, span).write_volatile(9);
                assert_eq!(to.span(true, span).read_volatile(), 9);
            }
            to.claims(true, 3).open(5);
            assert_eq!(from.claims(false, 3).claim_back(5, 2), Ok(Some(1)));
        }
    }
}
