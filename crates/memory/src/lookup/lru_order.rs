//! The LRU order of the lines of one set, in one word.
//!
//! Sixteen nibbles contain the numbers of the ways, the most recently used in the lowest. Readers
//! load the word and store a new one; both contain every way once. Of two concurrent uses one may
//! be lost.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

/// The LRU order of up to sixteen ways.
#[derive(Debug)]
pub(super) struct LruOrder(AtomicU64);

const ONES: u64 = 0x1111_1111_1111_1111;
const HIGHS: u64 = 0x8888_8888_8888_8888;
const IDENTITY: u64 = 0xfedc_ba98_7654_3210;

impl LruOrder {
    /// Creates an order with way 0 as the most and way 15 as the least recently used.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(IDENTITY))
    }

    /// Makes a way the most recently used. Writes nothing if it already is.
    #[inline]
    pub(super) fn touch(&self, way: usize) {
        let word = self.0.load(Ordering::Relaxed);
        if word & 0xf != way as u64 {
            // A plain store costs a fraction of an atomic exchange. Of two concurrent readers one
            // update is lost, and the word is the valid order of the other.
            self.0.store(moved_to_front(word, way as u64), Ordering::Relaxed);
        }
    }

    /// The least recently used of the first `ways` ways, which alone are ever used: they are in the
    /// lowest nibbles.
    #[inline]
    pub(super) fn oldest(&self, ways: usize) -> usize {
        (self.0.load(Ordering::Relaxed) >> (4 * (ways - 1)) & 0xf) as usize
    }
}

/// Moves `way` to the front of the word.
#[inline]
fn moved_to_front(word: u64, way: u64) -> u64 {
    // The nibble that equals `way` becomes 0, and the lowest mark is that of the lowest zero
    // nibble.
    let difference = word ^ (way * ONES);
    let marks = difference.wrapping_sub(ONES) & !difference & HIGHS;
    let shift = marks.trailing_zeros() & !3;
    let through = u64::MAX >> (60 - shift);
    let before = through >> 4;
    word & !through | (word & before) << 4 | way
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The ways of an order, the most recently used first.
    fn ways_of(order: &LruOrder, ways: usize) -> Vec<usize> {
        (1..=ways).map(|count| order.oldest(count)).collect()
    }

    #[test]
    fn uses_in_any_order_leave_the_oldest_at_the_end() {
        for ways in [1, 3, 4, 16] {
            let order = LruOrder::new();
            let mut model: Vec<usize> = (0..ways).collect();
            let mut way = 5 % ways;
            for step in 0..1000 {
                way = (way * 7 + step) % ways;
                order.touch(way);
                model.retain(|&other| other != way);
                model.insert(0, way);
                assert_eq!(ways_of(&order, ways), model);
            }
        }
    }

    #[test]
    fn ways_that_a_set_does_not_have_are_left_out() {
        let order = LruOrder::new();
        order.touch(2);
        assert_eq!(ways_of(&order, 3), [2, 0, 1]);
    }
}
