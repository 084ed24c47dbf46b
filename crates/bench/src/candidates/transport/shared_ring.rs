//! Rings in shared memory: one for each direction, with one writer and one reader each, and payload
//! space in every slot. The two transports on top differ in the contents of the slots.
//!
//! The writer stores a slot's sequence last (release), so a reader that loads the expected sequence
//! (acquire) also sees the rest of the slot. The reader counts the released slots in a cache line
//! of its own. Both sides poll and do not sleep.

use std::hint::spin_loop;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

use super::PeerSocket;

/// Number of slots of a ring, and payload bytes of each slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingShape {
    pub(super) slots: usize,
    pub(super) payload_bytes: usize,
}

/// Header of a slot, which describes its message.
pub(super) type SlotHeader = [u64; 2];

/// A pair of cache lines, which processors prefetch together.
#[repr(C, align(128))]
struct SlotLine {
    sequence: AtomicU64,
    header: [AtomicU64; 2],
}

/// One direction: a line with the count of released slots, a line for each slot, payloads.
#[derive(Clone)]
struct SharedRing {
    memory: Arc<Mapping>,
    offset: usize,
    shape: RingShape,
}

impl RingShape {
    fn lines(self) -> usize {
        1 + self.slots
    }

    /// Bytes of one direction, in whole pages.
    fn bytes(self) -> usize {
        const PAGE: usize = 4096;
        let lines = (self.lines() * size_of::<SlotLine>()).next_multiple_of(PAGE);
        lines + (self.slots * self.payload_bytes).next_multiple_of(PAGE)
    }
}

impl SharedRing {
    fn line(&self, index: usize) -> &SlotLine {
        assert!(index < self.shape.lines());
        // SAFETY: the mapping has both directions, each of `RingShape::bytes`, which begin with
        // this many lines on a page boundary; a line consists of atomics, for which any bytes are
        // valid.
        unsafe { &*self.memory.as_ptr().add(self.offset).cast::<SlotLine>().add(index) }
    }

    fn released_count(&self) -> &AtomicU64 {
        &self.line(0).sequence
    }

    fn slot(&self, position: u64) -> (&SlotLine, *mut u8) {
        let index = position as usize % self.shape.slots;
        let payloads = self.shape.bytes() - self.shape.slots * self.shape.payload_bytes;
        let offset = self.offset + payloads + index * self.shape.payload_bytes;
        // SAFETY: payloads are the last bytes of a direction, and the index is below their number.
        (self.line(1 + index), unsafe { self.memory.as_ptr().add(offset) })
    }
}

/// Writing end of one direction and reading end of the other.
pub(super) struct Rings {
    pub(super) writer: RingWriter,
    pub(super) reader: RingReader,
    socket: Arc<PeerSocket>,
}

pub(super) struct RingWriter {
    ring: SharedRing,
    socket: Arc<PeerSocket>,
    written: u64,
    /// Count of released slots when this side last loaded it.
    known_released: u64,
}

pub(super) struct RingReader {
    ring: SharedRing,
    socket: Arc<PeerSocket>,
    read: u64,
}

impl Rings {
    /// Creates shared memory between two members that are connected by a socket.
    pub(super) fn connect(meeting: PeerSocket, shape: RingShape) -> anyhow::Result<Self> {
        let bytes = 2 * shape.bytes();
        let memory = if meeting.is_first() {
            let memory = SealedMemory::new("memferry-bench-rings", bytes)?;
            meeting.send(&[0], &[memory.as_fd()])?;
            memory
        } else {
            let [descriptor] = meeting.receive(&mut [0])?;
            SealedMemory::from_untrusted_fd(descriptor, bytes)?
        };
        let memory = Arc::new(memory.map(Protection::ReadWrite)?);
        let ring = |is_back: bool| {
            let offset = if is_back { shape.bytes() } else { 0 };
            SharedRing { memory: memory.clone(), offset, shape }
        };
        let (to, from) = (ring(!meeting.is_first()), ring(meeting.is_first()));
        let meeting = Arc::new(meeting);
        Ok(Self {
            writer: RingWriter { ring: to, socket: meeting.clone(), written: 0, known_released: 0 },
            reader: RingReader { ring: from, socket: meeting.clone(), read: 0 },
            socket: meeting,
        })
    }

    /// Socket between the members.
    pub(super) fn socket(&self) -> &PeerSocket {
        &self.socket
    }
}

impl RingWriter {
    /// Waits for a free slot; this side owns its payload until it publishes the slot.
    pub(super) fn claim(&mut self) -> anyhow::Result<*mut u8> {
        let slots = self.ring.shape.slots as u64;
        if self.written - self.known_released == slots {
            self.wait_until_released(self.written - slots + 1)?;
        }
        Ok(self.ring.slot(self.written).1)
    }

    /// Publishes the claimed slot.
    pub(super) fn publish(&mut self, notice: SlotHeader) {
        let (line, _) = self.ring.slot(self.written);
        for (place, word) in line.header.iter().zip(notice) {
            place.store(word, Ordering::Relaxed);
        }
        self.written += 1;
        line.sequence.store(self.written, Ordering::Release);
    }

    /// Waits until the reader has released all slots.
    pub(super) fn wait_until_read(&mut self) -> anyhow::Result<()> {
        self.wait_until_released(self.written)
    }

    fn wait_until_released(&mut self, count: u64) -> anyhow::Result<()> {
        let (given_back, known_back) = (self.ring.released_count(), &mut self.known_released);
        wait_for(&self.socket, || {
            *known_back = given_back.load(Ordering::Acquire);
            *known_back >= count
        })
    }
}

impl RingReader {
    /// Waits for the next slot; this side owns its payload until it releases the slot.
    pub(super) fn next(&mut self) -> anyhow::Result<(SlotHeader, *const u8)> {
        let (line, payload) = self.ring.slot(self.read);
        let expected = self.read + 1;
        wait_for(&self.socket, || line.sequence.load(Ordering::Acquire) == expected)?;
        let notice = [0, 1].map(|index| line.header[index].load(Ordering::Relaxed));
        Ok((notice, payload.cast_const()))
    }

    /// Releases the slot.
    pub(super) fn release(&mut self) {
        self.read += 1;
        self.ring.released_count().store(self.read, Ordering::Release);
    }
}

/// Polls until `is_so` returns true. Every 50,000 polls it checks that the other member is alive
/// and yields the processor.
fn wait_for(meeting: &PeerSocket, mut is_so: impl FnMut() -> bool) -> anyhow::Result<()> {
    const POLLS_PER_CHECK: u32 = 50_000;
    loop {
        for look in 0..POLLS_PER_CHECK {
            if is_so() {
                return Ok(());
            }
            if look % 8 == 7 {
                spin_loop();
            }
        }
        meeting.check_peer()?;
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RingShape = RingShape { slots: 4, payload_bytes: 100 };

    fn pair(name: &str) -> (Rings, Rings) {
        let name = format!("ring-test-{name}-{}", std::process::id());
        let attend = |is_first: bool| {
            Rings::connect(PeerSocket::connect(&name, is_first).unwrap(), SHAPE).unwrap()
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| attend(false));
            (attend(true), second.join().unwrap())
        })
    }

    #[test]
    fn notices_come_in_order_with_their_payloads() {
        let (mut first, mut second) = pair("order");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..1000u64 {
                    let payload = second.writer.claim().unwrap();
                    // SAFETY: this side owns the payload, 100 bytes, of a claimed slot.
                    unsafe { payload.add(99).write(number as u8) };
                    second.writer.publish([number, !number]);
                }
                second.writer.wait_until_read().unwrap();
            });
            for number in 0..1000u64 {
                let (notice, payload) = first.reader.next().unwrap();
                assert_eq!(notice, [number, !number]);
                // SAFETY: the payload of a slot that was received and is not released.
                assert_eq!(unsafe { payload.add(99).read() }, number as u8);
                first.reader.release();
            }
        });
    }

    #[test]
    fn nobody_waits_for_one_that_has_gone() {
        let (mut first, second) = pair("gone");
        drop(second);
        let error = first.reader.next().unwrap_err().to_string();
        assert_eq!(error, "the other member has gone");
    }
}
