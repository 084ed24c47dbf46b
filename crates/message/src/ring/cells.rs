//! The ring of cells: one producer, one consumer, a cache line for each cell.
//!
//! A cell's first word holds, in its low half, the number of the cell's use; the producer writes it
//! last, so a consumer that finds the number it waits for finds the rest too, in the same line. The
//! consumer tells how far it has come in a line of its own, and only now and then: the producer
//! looks there when it seems to run out of cells.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

/// Words in a cell.
pub const WORDS: usize = 8;

/// One cache line of the ring.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Cell(pub [AtomicU64; WORDS]);

/// The contents of a cell, copied out. The low half of the first word is the ring's own.
pub type Words = [u64; WORDS];

/// The other side wrote what no correct side writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonsense(pub &'static str);

/// A ring in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    cells: *const Cell,
    mask: u64,
    /// How many cells the consumer has given back in all.
    consumed: *const AtomicU64,
}

// SAFETY: a ring is two pointers to atomics, which any thread may use; that they stay valid is the
// promise of `Ring::new`.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring over `count` cells, a power of two.
    ///
    /// # Safety
    /// `cells` must point to `count` cells and `consumed` to a word, both valid for as long as the
    /// ring or anything made of it is used.
    pub unsafe fn new(cells: *const Cell, count: usize, consumed: *const AtomicU64) -> Self {
        assert!(count.is_power_of_two() && count >= 4);
        Self { cells, mask: count as u64 - 1, consumed }
    }

    fn count(&self) -> u64 {
        self.mask + 1
    }

    fn cell(&self, position: u64) -> &Cell {
        // SAFETY: the masked position is below the number of cells that `new` was promised.
        unsafe { &*self.cells.add((position & self.mask) as usize) }
    }

    fn consumed(&self) -> &AtomicU64 {
        // SAFETY: valid by the promise of `new`.
        unsafe { &*self.consumed }
    }
}

/// The number that marks the use of a cell at a position. Never 0 in the first lap.
fn stamp(position: u64) -> u32 {
    (position + 1) as u32
}

/// The writing end.
#[derive(Debug)]
pub struct Producer {
    ring: Ring,
    /// Where the next cell goes.
    tail: u64,
    /// What the consumer had given back when last looked.
    seen_consumed: u64,
}

impl Producer {
    /// The writing end of a fresh ring.
    pub fn new(ring: Ring) -> Self {
        Self { ring, tail: 0, seen_consumed: 0 }
    }

    /// Whether a cell can be written now.
    #[inline]
    pub fn has_room(&mut self) -> Result<bool, Nonsense> {
        if self.tail - self.seen_consumed < self.ring.count() {
            return Ok(true);
        }
        self.look()?;
        Ok(self.tail - self.seen_consumed < self.ring.count())
    }

    /// Looks how far the consumer has come; returns how many cells it has given back in all.
    pub fn look(&mut self) -> Result<u64, Nonsense> {
        // Acquire: the consumer's reads of a cell are over before the cell is written again.
        let consumed = self.ring.consumed().load(Ordering::Acquire);
        if consumed < self.seen_consumed || consumed > self.tail {
            return Err(Nonsense("more cells given back than were sent"));
        }
        self.seen_consumed = consumed;
        Ok(consumed)
    }

    /// Whether cells were given back since the last look.
    pub fn has_news(&self) -> bool {
        self.ring.consumed().load(Ordering::Acquire) != self.seen_consumed
    }

    /// The position of the next cell, which is how many were written.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Writes a cell. The low half of the first word is replaced.
    ///
    /// # Panics
    /// When there is no room: ask [`Producer::has_room`] first.
    #[inline]
    pub fn write(&mut self, words: &Words) {
        assert!(self.tail - self.seen_consumed < self.ring.count(), "no room was found before");
        let cell = self.ring.cell(self.tail);
        for (to, from) in cell.0.iter().zip(words).skip(1) {
            to.store(*from, Ordering::Relaxed);
        }
        let first = (words[0] & !0xFFFF_FFFF) | u64::from(stamp(self.tail));
        step();
        // Release: whoever sees the stamp sees the other words, and payload written before.
        cell.0[0].store(first, Ordering::Release);
        self.tail += 1;
    }
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer {
    ring: Ring,
    head: u64,
}

impl Consumer {
    /// The reading end of a fresh ring.
    pub fn new(ring: Ring) -> Self {
        Self { ring, head: 0 }
    }

    /// Whether a cell is there.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.ring.cell(self.head).0[0].load(Ordering::Acquire) as u32 == stamp(self.head)
    }

    /// A copy of the next cell, if it is there. It stays in the ring until [`Consumer::pass`].
    #[inline]
    pub fn peek(&self) -> Option<Words> {
        let cell = self.ring.cell(self.head);
        let first = cell.0[0].load(Ordering::Acquire);
        if first as u32 != stamp(self.head) {
            return None;
        }
        let mut words = [first; WORDS];
        for (to, from) in words.iter_mut().zip(&cell.0).skip(1) {
            *to = from.load(Ordering::Relaxed);
        }
        Some(words)
    }

    /// Goes on to the next cell. The producer learns of it by [`Consumer::publish`].
    #[inline]
    pub fn pass(&mut self) {
        self.head += 1;
    }

    /// How many cells were passed in all.
    #[inline]
    pub fn passed(&self) -> u64 {
        self.head
    }

    /// Gives all passed cells back.
    #[inline]
    pub fn publish(&mut self) {
        step();
        // Release: the reads of the cells and of their payload are over.
        self.ring.consumed().store(self.head, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn ring(count: usize) -> (Vec<Cell>, Box<AtomicU64>) {
        ((0..count).map(|_| Cell::default()).collect(), Box::new(AtomicU64::new(0)))
    }

    #[test]
    fn cells_come_out_in_order_and_a_full_ring_takes_no_more() {
        let (cells, consumed) = ring(4);
        // SAFETY: both live until the end of the test.
        let ring = unsafe { Ring::new(cells.as_ptr(), 4, &*consumed) };
        let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
        let mut expected = 0;
        for number in 0..100u64 {
            while !producer.has_room().unwrap() {
                assert_eq!(consumer.peek().unwrap()[1], expected);
                expected += 1;
                consumer.pass();
                consumer.publish();
            }
            producer.write(&[7 << 32, number, 0, 0, 0, 0, 0, 0]);
        }
        while let Some(words) = consumer.peek() {
            assert_eq!((words[0] >> 32, words[1]), (7, expected));
            expected += 1;
            consumer.pass();
        }
        assert_eq!(expected, 100);
    }

    #[test]
    fn an_impossible_count_from_the_other_side_is_noticed() {
        let (cells, consumed) = ring(4);
        // SAFETY: both live until the end of the test.
        let ring = unsafe { Ring::new(cells.as_ptr(), 4, &*consumed) };
        let mut producer = Producer::new(ring);
        for _ in 0..4 {
            assert!(producer.has_room().unwrap());
            producer.write(&[0; 8]);
        }
        consumed.store(5, Ordering::Relaxed);
        assert!(producer.has_room().is_err());
        consumed.store(u64::MAX, Ordering::Relaxed);
        assert!(producer.has_room().is_err());
        consumed.store(1, Ordering::Relaxed);
        assert!(producer.has_room().unwrap());
        consumed.store(0, Ordering::Relaxed);
        assert!(producer.look().is_err());
    }
}
