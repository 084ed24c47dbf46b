//! The ring of cells: one producer, one consumer, one cache line for each cell.
//!
//! The low half of a cell's first word holds a stamp, which is different in each lap. The producer
//! writes it last, so a consumer that reads the expected stamp also reads the rest of the cell,
//! which is in the same line. The consumer publishes its position in a line of its own, once per
//! several cells; the producer reads that line only when it runs out of credits.
//!
//! A ring begins small and grows once, when it is full or was used for a while: most connections of a
//! process with many peers carry few messages. The producer writes a marker into the last cell of the
//! small ring that it uses, and goes on in the large one; the consumer follows when it reads the marker.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

/// Words of a cell.
pub const CELL_WORDS: usize = 8;

/// A cell: one cache line of the ring.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Cell(pub [AtomicU64; CELL_WORDS]);

/// A copy of a cell. The low half of the first word belongs to the ring.
pub type CellWords = [u64; CELL_WORDS];

/// The peer violated the protocol; the text names the violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProtocolError(pub &'static str);

/// A ring in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    cells: *const Cell,
    mask: u64,
    /// The number of cells that the consumer has freed since the start.
    consumed: *const AtomicU64,
}

// SAFETY: a ring is two pointers to atomics, which any thread may use; the caller of `Ring::new`
// guarantees that they stay valid.
unsafe impl Send for Ring {}

impl Ring {
    /// Creates a ring over `count` cells, a power of two.
    ///
    /// # Safety
    /// `cells` must point to `count` cells and `consumed` to a word, both valid for as long as the
    /// ring or anything made of it is used.
    pub unsafe fn new(cells: *const Cell, count: usize, consumed: *const AtomicU64) -> Self {
        assert!(count.is_power_of_two() && count >= 4);
        Self { cells, mask: count as u64 - 1, consumed }
    }

    /// The number of cells.
    pub fn count(&self) -> u64 {
        self.mask + 1
    }

    fn cell(&self, position: u64) -> &Cell {
        // SAFETY: the masked position is below the number of cells that the caller of `new`
        // guarantees.
        unsafe { &*self.cells.add((position & self.mask) as usize) }
    }

    fn consumed(&self) -> &AtomicU64 {
        // SAFETY: the caller of `new` guarantees that it is valid.
        unsafe { &*self.consumed }
    }
}

/// The stamp of the cell at a position. It is never 0 in the first lap.
fn stamp(position: u64) -> u32 {
    (position + 1) as u32
}

/// Cells after which a small ring counts as used.
const CELLS_BEFORE_GROWTH: u64 = 64;

/// The producer's end of a ring.
#[derive(Debug)]
pub struct Producer {
    ring: Ring,
    /// The ring that follows this one, and the marker in the cell before it.
    larger: Option<(Ring, CellWords)>,
    /// The position of the ring's first cell.
    start: u64,
    /// The position of the next cell.
    tail: u64,
    /// The consumer's position at the last refresh.
    seen_consumed: u64,
    /// Cells before this position can be written now.
    limit: u64,
    /// The position at which a small ring counts as used.
    grows_at: u64,
}

impl Producer {
    /// Creates the producer of a new ring.
    pub fn new(ring: Ring) -> Self {
        let (limit, grows_at) = (ring.count(), CELLS_BEFORE_GROWTH);
        Self { ring, larger: None, start: 0, tail: 0, seen_consumed: 0, limit, grows_at }
    }

    /// Creates the producer of a new ring that grows to a larger one, which `marker` announces.
    pub fn growing(ring: Ring, larger: Ring, marker: CellWords) -> Self {
        let mut producer = Self { larger: Some((larger, marker)), ..Self::new(ring) };
        producer.update_limit();
        producer
    }

    /// Lets a small ring grow only when it is full.
    pub fn keep_small(&mut self) {
        self.grows_at = u64::MAX;
        self.update_limit();
    }

    /// Returns whether a cell can be written now.
    #[inline]
    pub fn has_credit(&mut self) -> Result<bool, ProtocolError> {
        Ok(self.tail < self.limit || self.make_credit()?)
    }

    #[cold]
    fn make_credit(&mut self) -> Result<bool, ProtocolError> {
        self.refresh_credits()?;
        if self.tail >= self.limit
            && let Some((larger, marker)) = self.larger.take()
        {
            // One cell was kept free for the marker.
            self.put(&marker);
            (self.ring, self.start) = (larger, self.tail);
            self.update_limit();
        }
        Ok(self.tail < self.limit)
    }

    /// A small ring keeps one cell for the marker, and ends when it was used for a while.
    fn update_limit(&mut self) {
        // The cells of a large ring are free at first, whatever is left in the small one.
        let free_from = self.seen_consumed.max(self.start) + self.ring.count();
        self.limit = match self.larger {
            Some(_) => (free_from - 1).min(self.grows_at),
            None => free_from,
        };
    }

    /// Reads the consumer's position, and returns the number of cells that it has freed since the
    /// start.
    pub fn refresh_credits(&mut self) -> Result<u64, ProtocolError> {
        // Acquire: the consumer has finished reading a cell before the producer writes the cell
        // again.
        let consumed = self.ring.consumed().load(Ordering::Acquire);
        if consumed < self.seen_consumed || consumed > self.tail {
            return Err(ProtocolError("more cells freed than sent"));
        }
        self.seen_consumed = consumed;
        self.update_limit();
        Ok(consumed)
    }

    /// Returns whether the consumer has freed cells since the last refresh.
    pub fn has_new_credits(&self) -> bool {
        self.ring.consumed().load(Ordering::Acquire) != self.seen_consumed
    }

    /// The position of the next cell, which is the number of cells written.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Writes a cell. The ring replaces the low half of the first word.
    ///
    /// # Panics
    /// When there is no credit: call [`Producer::has_credit`] first.
    #[inline]
    pub fn write(&mut self, words: &CellWords) {
        assert!(self.tail < self.limit, "write without a credit");
        self.put(words);
    }

    #[inline]
    fn put(&mut self, words: &CellWords) {
        let cell = self.ring.cell(self.tail);
        for (to, from) in cell.0.iter().zip(words).skip(1) {
            to.store(*from, Ordering::Relaxed);
        }
        let first = (words[0] & !0xFFFF_FFFF) | u64::from(stamp(self.tail));
        step();
        // Release: a consumer that reads the stamp also reads the other words and the payload.
        cell.0[0].store(first, Ordering::Release);
        self.tail += 1;
    }
}

/// The consumer's end of a ring.
#[derive(Debug)]
pub struct Consumer {
    ring: Ring,
    /// The ring that follows this one.
    larger: Option<Ring>,
    head: u64,
}

impl Consumer {
    /// Creates the consumer of a new ring.
    pub fn new(ring: Ring) -> Self {
        Self { ring, larger: None, head: 0 }
    }

    /// Creates the consumer of a new ring that grows to a larger one.
    pub fn growing(ring: Ring, larger: Ring) -> Self {
        Self { larger: Some(larger), ..Self::new(ring) }
    }

    /// Follows the producer to the larger ring: the current cell is the marker.
    pub fn grow(&mut self) -> Result<(), ProtocolError> {
        self.ring = self.larger.take().ok_or(ProtocolError("a ring that grows twice"))?;
        Ok(())
    }

    /// The number of cells of the ring.
    #[inline]
    pub fn count(&self) -> u64 {
        self.ring.count()
    }

    /// Returns whether a cell can be read.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.ring.cell(self.head).0[0].load(Ordering::Acquire) as u32 == stamp(self.head)
    }

    /// Returns a copy of the next cell, if it has been written. The cell stays in the ring until
    /// [`Consumer::advance`].
    #[inline]
    pub fn peek(&self) -> Option<CellWords> {
        let cell = self.ring.cell(self.head);
        let first = cell.0[0].load(Ordering::Acquire);
        if first as u32 != stamp(self.head) {
            return None;
        }
        let mut words = [first; CELL_WORDS];
        for (to, from) in words.iter_mut().zip(&cell.0).skip(1) {
            *to = from.load(Ordering::Relaxed);
        }
        Some(words)
    }

    /// Moves to the next cell. [`Consumer::publish`] makes the step visible to the producer.
    #[inline]
    pub fn advance(&mut self) {
        self.head += 1;
    }

    /// The number of cells read since the start.
    #[inline]
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Frees all cells that were read.
    #[inline]
    pub fn publish(&mut self) {
        step();
        // Release: the reads of the cells and of their payload come before this store.
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
        // SAFETY: cells and word live until the end of the test.
        let ring = unsafe { Ring::new(cells.as_ptr(), 4, &*consumed) };
        let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
        let mut expected = 0;
        for number in 0..100u64 {
            while !producer.has_credit().unwrap() {
                assert_eq!(consumer.peek().unwrap()[1], expected);
                expected += 1;
                consumer.advance();
                consumer.publish();
            }
            producer.write(&[7 << 32, number, 0, 0, 0, 0, 0, 0]);
        }
        while let Some(words) = consumer.peek() {
            assert_eq!((words[0] >> 32, words[1]), (7, expected));
            expected += 1;
            consumer.advance();
        }
        assert_eq!(expected, 100);
    }

    #[test]
    fn a_small_ring_grows_when_it_is_full_or_was_used_for_a_while() {
        const MARKER: CellWords = [9 << 32, 0, 0, 0, 0, 0, 0, 0];
        let (cells, consumed) = ring(4 + 8);
        // SAFETY: cells and word live until the end of the test.
        let (small, large) = unsafe {
            let large = Ring::new(cells.as_ptr().add(4), 8, &*consumed);
            (Ring::new(cells.as_ptr(), 4, &*consumed), large)
        };
        for (in_flight, keeps_small) in
            [(0, false), (2, false), (3, false), (5, false), (0, true), (2, true), (5, true)]
        {
            cells.iter().flat_map(|cell| &cell.0).for_each(|word| word.store(0, Ordering::Relaxed));
            consumed.store(0, Ordering::Relaxed);
            let mut producer = Producer::growing(small, large, MARKER);
            if keeps_small {
                producer.keep_small();
            }
            let mut consumer = Consumer::growing(small, large);
            let (mut expected, mut growths) = (0, 0);
            let mut read_one = |growths: &mut u32| {
                let words = consumer.peek().expect("it was written");
                if words[0] >> 32 == 9 {
                    *growths += 1;
                    consumer.grow().unwrap();
                } else {
                    assert_eq!(words[1], expected);
                    expected += 1;
                }
                consumer.advance();
                consumer.publish();
                expected
            };
            for number in 0..100u64 {
                assert!(producer.has_credit().unwrap());
                producer.write(&[7 << 32, number, 0, 0, 0, 0, 0, 0]);
                while number >= in_flight && read_one(&mut growths) + in_flight <= number {}
            }
            let is_full = in_flight >= 3;
            assert_eq!(growths, u32::from(is_full || !keeps_small), "with {in_flight} in flight");
            if growths == 0 {
                continue;
            }
            assert_eq!(consumer.grow(), Err(ProtocolError("a ring that grows twice")));
        }
    }

    #[test]
    fn an_impossible_count_from_the_other_side_is_noticed() {
        let (cells, consumed) = ring(4);
        // SAFETY: cells and word live until the end of the test.
        let ring = unsafe { Ring::new(cells.as_ptr(), 4, &*consumed) };
        let mut producer = Producer::new(ring);
        for _ in 0..4 {
            assert!(producer.has_credit().unwrap());
            producer.write(&[0; 8]);
        }
        consumed.store(5, Ordering::Relaxed);
        assert!(producer.has_credit().is_err());
        consumed.store(u64::MAX, Ordering::Relaxed);
        assert!(producer.has_credit().is_err());
        consumed.store(1, Ordering::Relaxed);
        assert!(producer.has_credit().unwrap());
        consumed.store(0, Ordering::Relaxed);
        assert!(producer.refresh_credits().is_err());
    }
}
