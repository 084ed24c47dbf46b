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

    /// The first `ways` ways, the least recently used first.
    pub(super) fn oldest_first(&self, ways: usize) -> impl Iterator<Item = usize> {
        let word = self.0.load(Ordering::Relaxed);
        (0..16)
            .rev()
            .map(move |position| (word >> (4 * position) & 0xf) as usize)
            .filter(move |&way| way < ways)
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

    #[test]
    fn uses_in_any_order_leave_the_oldest_at_the_end() {
        let order = LruOrder::new();
        let mut model: Vec<usize> = (0..16).rev().collect();
        let mut way = 5;
        for step in 0..1000 {
            way = (way * 7 + step) % 16;
            order.touch(way);
            model.retain(|&other| other != way);
            model.push(way);
            assert_eq!(order.oldest_first(16).collect::<Vec<_>>(), model);
        }
    }

    #[test]
    fn ways_that_a_set_does_not_have_are_left_out() {
        let order = LruOrder::new();
        order.touch(2);
        assert_eq!(order.oldest_first(3).collect::<Vec<_>>(), [1, 0, 2]);
    }
}
