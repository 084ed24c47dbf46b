//! Notices in shared memory: a ring for each direction, one writer and one reader each, with room for
//! a payload in every slot. The two ways that are made of it differ in what they put there.
//!
//! A slot's stamp is written last, so whoever finds the stamp it waits for finds the rest too. The
//! reader counts in a line of its own what it has given back. Both look without sleeping.

use std::hint::spin_loop;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};

use super::Meeting;

/// How many slots a ring has, and the payload of each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) slots: usize,
    pub(super) payload_bytes: usize,
}

/// What a slot says of its message.
pub(super) type Notice = [u64; 2];

/// A pair of cache lines, which processors like to fetch together.
#[repr(C, align(128))]
struct Line {
    stamp: AtomicU64,
    notice: [AtomicU64; 2],
}

/// One direction: a line with the count of what was given back, a line for each slot, payloads.
#[derive(Clone)]
struct Ring {
    memory: Arc<Mapping>,
    offset: usize,
    shape: Shape,
}

impl Shape {
    fn lines(self) -> usize {
        1 + self.slots
    }

    /// The bytes of one direction, in whole pages.
    fn bytes(self) -> usize {
        const PAGE: usize = 4096;
        let lines = (self.lines() * size_of::<Line>()).next_multiple_of(PAGE);
        lines + (self.slots * self.payload_bytes).next_multiple_of(PAGE)
    }
}

impl Ring {
    fn line(&self, index: usize) -> &Line {
        assert!(index < self.shape.lines());
        // SAFETY: the mapping has both directions, each of `Shape::bytes`, which begin with this
        // many lines on a page; a line is atomics, for which any bytes will do.
        unsafe { &*self.memory.as_ptr().add(self.offset).cast::<Line>().add(index) }
    }

    fn given_back(&self) -> &AtomicU64 {
        &self.line(0).stamp
    }

    fn slot(&self, position: u64) -> (&Line, *mut u8) {
        let index = position as usize % self.shape.slots;
        let payloads = self.shape.bytes() - self.shape.slots * self.shape.payload_bytes;
        let offset = self.offset + payloads + index * self.shape.payload_bytes;
        // SAFETY: payloads are the last bytes of a direction, and the index is below their number.
        (self.line(1 + index), unsafe { self.memory.as_ptr().add(offset) })
    }
}

/// The writing end of one direction and the reading end of the other.
pub(super) struct Rings {
    pub(super) outgoing: Outgoing,
    pub(super) incoming: Incoming,
    meeting: Arc<Meeting>,
}

pub(super) struct Outgoing {
    ring: Ring,
    meeting: Arc<Meeting>,
    written: u64,
    /// What the reader had given back when this side last looked.
    known_back: u64,
}

pub(super) struct Incoming {
    ring: Ring,
    meeting: Arc<Meeting>,
    read: u64,
}

impl Rings {
    /// Shared memory between two members that have met.
    pub(super) fn connect(meeting: Meeting, shape: Shape) -> anyhow::Result<Self> {
        let bytes = 2 * shape.bytes();
        let memory = if meeting.is_first() {
            let memory = SealedMemory::new("memferry-bench-rings", bytes)?;
            meeting.give(&[0], &[memory.as_fd()])?;
            memory
        } else {
            let [descriptor] = meeting.take(&mut [0])?;
            SealedMemory::from_foreign(descriptor, bytes)?
        };
        let memory = Arc::new(memory.map(Access::Write)?);
        let ring = |is_back: bool| {
            let offset = if is_back { shape.bytes() } else { 0 };
            Ring { memory: memory.clone(), offset, shape }
        };
        let (to, from) = (ring(!meeting.is_first()), ring(meeting.is_first()));
        let meeting = Arc::new(meeting);
        Ok(Self {
            outgoing: Outgoing { ring: to, meeting: meeting.clone(), written: 0, known_back: 0 },
            incoming: Incoming { ring: from, meeting: meeting.clone(), read: 0 },
            meeting,
        })
    }

    /// Where the members met.
    pub(super) fn meeting(&self) -> &Meeting {
        &self.meeting
    }
}

impl Outgoing {
    /// Waits for a free slot; the payload is this side's until it publishes.
    pub(super) fn claim(&mut self) -> anyhow::Result<*mut u8> {
        let slots = self.ring.shape.slots as u64;
        if self.written - self.known_back == slots {
            self.wait_until_back(self.written - slots + 1)?;
        }
        Ok(self.ring.slot(self.written).1)
    }

    /// Hands over the slot that was claimed.
    pub(super) fn publish(&mut self, notice: Notice) {
        let (line, _) = self.ring.slot(self.written);
        for (place, word) in line.notice.iter().zip(notice) {
            place.store(word, Ordering::Relaxed);
        }
        self.written += 1;
        line.stamp.store(self.written, Ordering::Release);
    }

    /// Waits until the reader is done with everything.
    pub(super) fn wait_until_read(&mut self) -> anyhow::Result<()> {
        self.wait_until_back(self.written)
    }

    fn wait_until_back(&mut self, count: u64) -> anyhow::Result<()> {
        let (given_back, known_back) = (self.ring.given_back(), &mut self.known_back);
        wait_for(&self.meeting, || {
            *known_back = given_back.load(Ordering::Acquire);
            *known_back >= count
        })
    }
}

impl Incoming {
    /// Waits for the next slot; its payload is this side's until it is given back.
    pub(super) fn next(&mut self) -> anyhow::Result<(Notice, *const u8)> {
        let (line, payload) = self.ring.slot(self.read);
        let expected = self.read + 1;
        wait_for(&self.meeting, || line.stamp.load(Ordering::Acquire) == expected)?;
        let notice = [0, 1].map(|index| line.notice[index].load(Ordering::Relaxed));
        Ok((notice, payload.cast_const()))
    }

    /// Gives the slot back.
    pub(super) fn give_back(&mut self) {
        self.read += 1;
        self.ring.given_back().store(self.read, Ordering::Release);
    }
}

/// Looks until it is so. Now and then others may run, and the other member must still be there.
fn wait_for(meeting: &Meeting, mut is_so: impl FnMut() -> bool) -> anyhow::Result<()> {
    const LOOKS: u32 = 50_000;
    loop {
        for look in 0..LOOKS {
            if is_so() {
                return Ok(());
            }
            if look % 8 == 7 {
                spin_loop();
            }
        }
        meeting.look_for_other()?;
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { slots: 4, payload_bytes: 100 };

    fn pair(name: &str) -> (Rings, Rings) {
        let name = format!("ring-test-{name}-{}", std::process::id());
        let attend = |is_first: bool| {
            Rings::connect(Meeting::attend(&name, is_first).unwrap(), SHAPE).unwrap()
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
                    let payload = second.outgoing.claim().unwrap();
                    // SAFETY: the payload of a claimed slot, 100 bytes, is this side's.
                    unsafe { payload.add(99).write(number as u8) };
                    second.outgoing.publish([number, !number]);
                }
                second.outgoing.wait_until_read().unwrap();
            });
            for number in 0..1000u64 {
                let (notice, payload) = first.incoming.next().unwrap();
                assert_eq!(notice, [number, !number]);
                // SAFETY: the payload of a slot that came and was not given back.
                assert_eq!(unsafe { payload.add(99).read() }, number as u8);
                first.incoming.give_back();
            }
        });
    }

    #[test]
    fn nobody_waits_for_one_that_has_gone() {
        let (mut first, second) = pair("gone");
        drop(second);
        let error = first.incoming.next().unwrap_err().to_string();
        assert_eq!(error, "the other member has gone");
    }
}
