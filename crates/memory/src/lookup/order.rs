//! The order of use of the lines of one set, in one word.
//!
//! Sixteen nibbles hold the numbers of the ways, the one used last in the lowest. Readers load the
//! word and store another, each of which holds every way once; of two uses at the same time one may
//! be forgotten.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

/// The order of use of up to sixteen ways.
#[derive(Debug)]
pub(super) struct Order(AtomicU64);

const ONES: u64 = 0x1111_1111_1111_1111;
const HIGHS: u64 = 0x8888_8888_8888_8888;
const IDENTITY: u64 = 0xfedc_ba98_7654_3210;

impl Order {
    /// Way 0 first, way 15 last.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(IDENTITY))
    }

    /// Says that a way was used now. Nothing is written when it was the last used already.
    #[inline]
    pub(super) fn touch(&self, way: usize) {
        let word = self.0.load(Ordering::Relaxed);
        if word & 0xf != way as u64 {
            // A plain store, which costs a fraction of an exchange: of two readers at the same time
            // one is forgotten, and what is left is the order of the other.
            self.0.store(moved_to_front(word, way as u64), Ordering::Relaxed);
        }
    }

    /// The first `ways` ways, the one that was not used for longest first.
    pub(super) fn oldest_first(&self, ways: usize) -> impl Iterator<Item = usize> {
        let word = self.0.load(Ordering::Relaxed);
        (0..16)
            .rev()
            .map(move |position| (word >> (4 * position) & 0xf) as usize)
            .filter(move |&way| way < ways)
    }
}

/// The word with `way` taken out of its place and put at the front.
#[inline]
fn moved_to_front(word: u64, way: u64) -> u64 {
    // The nibble that equals `way` becomes 0; the lowest zero nibble is the lowest marked one.
    let difference = word ^ (way * ONES);
    let marks = difference.wrapping_sub(ONES) & !difference & HIGHS;
    let place = marks.trailing_zeros() & !3;
    let through = u64::MAX >> (60 - place);
    let before = through >> 4;
    word & !through | (word & before) << 4 | way
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn uses_in_any_order_leave_the_oldest_at_the_end() {
        let order = Order::new();
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
        let order = Order::new();
        order.touch(2);
        assert_eq!(order.oldest_first(3).collect::<Vec<_>>(), [1, 0, 2]);
    }
}
