//! Where everything lies in the memory of a connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memferry_sys::fault::step;
use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};
use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};

use super::attention::Attention;
use super::cells::{Cell, Consumer, Producer, Ring};
use super::fullness::{ENDED, Fullness, NO_MESSAGES, NO_PAYLOADS};
use super::record::Record;
use super::space::Span;
use super::visit::Visiting;

/// Cells of a ring.
pub const CELLS: usize = 256;
/// Bytes of a space for payloads.
pub const SPACE_BYTES: usize = 512 << 10;
/// Records of a direction.
pub const RECORDS: usize = 32;

/// What one side owns: how far it has read, whether it looks and what it has room for.
#[repr(C, align(128))]
struct Side {
    consumed: AtomicU64,
    /// Not 0: this side has given up its messages, and their memory may hold something else by now.
    ended: AtomicU64,
    padding: [u64; 14],
    // Those two are in one line: whoever writes asks for both.
    attention: Attention,
    fullness: Fullness,
    padding_2: [u32; 14],
    /// Which window of the other side this side is copying to or from.
    visiting: Visiting,
    padding_3: [u64; 7],
}

/// One direction.
#[repr(C, align(4096))]
struct Half {
    cells: [Cell; CELLS],
    records: [Record; RECORDS],
    space: [u8; SPACE_BYTES],
}

/// The whole memory of a connection. The first of each is the connecting side's: the half that it
/// writes, and the words that it owns.
#[repr(C, align(4096))]
struct Layout {
    sides: [Side; 2],
    halves: [Half; 2],
}

/// Which end of a connection this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The one that connected.
    Connecting,
    /// The one that accepted.
    Accepting,
    /// Both: an endpoint's connection to itself, of which one half is used.
    Both,
}

/// The memory of a connection, mapped. Everything that points into it holds a share of it.
#[derive(Debug, Clone)]
pub struct Memory {
    mapping: Arc<Mapping>,
    outgoing: usize,
    incoming: usize,
}

/// How many bytes the memory of a connection has.
pub const BYTES: usize = size_of::<Layout>();

impl Memory {
    /// Fresh memory, for the connecting side, with the descriptor for the other.
    pub fn create(end: End) -> io::Result<(Self, SealedMemory)> {
        let memory = SealedMemory::new("memferry-connection", BYTES)?;
        let mapped = Self::map(&memory, end)?;
        Ok((mapped, memory))
    }

    /// The memory that the connecting side sent, if it is what it must be.
    pub fn from_foreign(descriptor: OwnedFd, end: End) -> io::Result<Self> {
        Self::map(&SealedMemory::from_foreign(descriptor, BYTES)?, end)
    }

    fn map(memory: &SealedMemory, end: End) -> io::Result<Self> {
        let (outgoing, incoming) = match end {
            End::Connecting => (0, 1),
            End::Accepting => (1, 0),
            End::Both => (0, 0),
        };
        Ok(Self { mapping: Arc::new(memory.map(Access::Write)?), outgoing, incoming })
    }

    /// Whether this is the memory of the same connection.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    fn layout(&self) -> *const Layout {
        self.mapping.as_ptr().cast()
    }

    fn half(&self, index: usize) -> *const Half {
        // SAFETY: the mapping has the size of a layout, and the index is 0 or 1.
        unsafe { &raw const (*self.layout()).halves[index] }
    }

    fn side(&self, index: usize) -> &Side {
        // SAFETY: as above; a side is all atomics and padding that nobody reads.
        unsafe { &(*self.layout()).sides[index] }
    }

    /// The side that owns the words for reading a half: whoever does not write it.
    fn reader_of(&self, half: usize) -> &Side {
        if self.outgoing == self.incoming { self.side(0) } else { self.side(1 - half) }
    }

    /// The end of the outgoing ring that this process writes.
    pub fn producer(&self) -> Producer {
        Producer::new(self.ring(self.outgoing))
    }

    /// The end of the incoming ring that this process reads.
    pub fn consumer(&self) -> Consumer {
        Consumer::new(self.ring(self.incoming))
    }

    fn ring(&self, half: usize) -> Ring {
        let half_at = self.half(half);
        // SAFETY: cells and word lie in the mapping. Producer and consumer live in the `Wire`
        // beside this memory, which is dropped after them.
        unsafe {
            let cells = (&raw const (*half_at).cells).cast();
            Ring::new(cells, CELLS, &self.reader_of(half).consumed)
        }
    }

    /// The word by which this side says whether it looks.
    pub fn own_attention(&self) -> &Attention {
        &self.reader_of(self.incoming).attention
    }

    /// The word of the other side.
    pub fn other_attention(&self) -> &Attention {
        &self.reader_of(self.outgoing).attention
    }

    /// What this side has no room for.
    pub fn own_fullness(&self) -> &Fullness {
        &self.reader_of(self.incoming).fullness
    }

    /// What the other side has no room for.
    #[inline]
    pub fn other_fullness(&self) -> &Fullness {
        &self.reader_of(self.outgoing).fullness
    }

    /// Says that this side gives up its messages, before it does, and that its windows are closed
    /// to the other side. The other side sees one word when it
    /// sends, and the other when it has copied. Look for visits after this.
    pub fn end(&self) {
        self.own_fullness().set(NO_PAYLOADS | NO_MESSAGES | ENDED);
        step();
        self.reader_of(self.incoming).ended.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Whether the other side has given up its messages: what was copied from it may be anything.
    pub fn has_other_ended(&self) -> bool {
        // Acquire fence: the loads of the copy come before this one.
        fence(Ordering::Acquire);
        self.reader_of(self.outgoing).ended.load(Ordering::Relaxed) != 0
    }

    /// The window of the other side that this side copies to or from, for this side to say.
    pub fn own_visits(&self) -> &Visiting {
        &self.reader_of(self.incoming).visiting
    }

    /// The window of this side that the other one says it copies to or from.
    pub fn other_visits(&self) -> &Visiting {
        &self.reader_of(self.outgoing).visiting
    }

    /// A record of messages to this side, or from it.
    pub fn record(&self, incoming: bool, index: usize) -> &Record {
        let half = self.half(if incoming { self.incoming } else { self.outgoing });
        // SAFETY: inside the mapping, the index is checked, and a record is all atomics.
        unsafe { &(&(*half).records)[index] }
    }

    /// The bytes of a span, for this side to write or to read.
    pub fn span(&self, incoming: bool, span: Span) -> *mut u8 {
        assert!(span.offset as usize + span.length as usize <= SPACE_BYTES);
        let half = self.half(if incoming { self.incoming } else { self.outgoing });
        // SAFETY: inside the space, as just checked.
        unsafe { (&raw const (*half).space).cast::<u8>().add(span.offset as usize).cast_mut() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let (connecting, memory) = Memory::create(End::Connecting).unwrap();
        let descriptor = memory.as_fd().try_clone_to_owned().unwrap();
        let accepting = Memory::from_foreign(descriptor, End::Accepting).unwrap();
        for (from, to) in [(&connecting, &accepting), (&accepting, &connecting)] {
            let (mut producer, mut consumer) = (from.producer(), to.consumer());
            assert!(producer.has_room().unwrap());
            producer.write(&[1 << 40, 2, 3, 4, 5, 6, 7, 8]);
            assert_eq!(consumer.peek().unwrap()[1..], [2, 3, 4, 5, 6, 7, 8]);
            consumer.pass();
            consumer.publish();
            assert_eq!(producer.look(), Ok(1));
            to.own_attention().rest(1);
            assert_eq!(from.other_attention().take_ways(), 1);
            assert_eq!(to.own_attention().resting(), 0);
            to.own_fullness().set(NO_PAYLOADS);
            assert!(from.other_fullness().includes(NO_PAYLOADS));
            assert!(!to.other_fullness().includes(NO_PAYLOADS));
            to.own_fullness().set(0);
            let span = Span { offset: 64, length: 8 };
            // SAFETY: inside the space, and only this thread touches it.
            unsafe {
                from.span(false, span).write_volatile(9);
                assert_eq!(to.span(true, span).read_volatile(), 9);
            }
            to.record(true, 3).open(5);
            assert_eq!(from.record(false, 3).claim_back(5, 2), Ok(Some(1)));
        }
    }
}
