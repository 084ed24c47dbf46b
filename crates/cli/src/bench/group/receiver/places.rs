//! Where messages lie: both members walk over their memory in step, so that a message lies in the
//! sender's memory where it goes in the receiver's. Hot places are few and come again and again;
//! cold ones are so many that caches have forgotten them.

use std::ops::Range;

use memferry::sys::pages::Pages;

use crate::bench::group::messages::{fill_with_pattern, pattern};
use crate::bench::measure::Walk;

/// As many as may be in flight or computed on at the same time.
pub(super) const HOT_PLACES: usize = 3;
/// The memory of cold places. Tests are about what arrives in them.
const COLD_BYTES: usize = if cfg!(test) { 4 << 20 } else { 256 << 20 };
/// The largest message for which cold places are cold.
const MOST_BYTES: usize = COLD_BYTES / 8;

/// Places for messages of one size.
pub(super) struct Places {
    memory: Pages,
    walk: Walk,
    bytes: usize,
    cold: bool,
}

impl Places {
    /// Places of a kind, in the memory of others if there is enough of it. The sender's hold what
    /// [`holds_what_lies_at`] looks for; the receiver's are touched.
    pub(super) fn make(
        old: Option<Self>,
        bytes: usize,
        cold: bool,
        is_receiver: bool,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!((1..=MOST_BYTES).contains(&bytes), "a task cannot have {bytes} bytes");
        let length = if cold { COLD_BYTES } else { HOT_PLACES * bytes };
        // What is too small goes before more is asked for: there may not be room for both.
        let enough = old.map(|places| places.memory).filter(|memory| memory.len() >= length);
        let memory = match enough {
            Some(memory) => memory,
            None => {
                let mut memory = Pages::new(length)?;
                if is_receiver {
                    memory.as_mut_slice().fill(0x5A);
                } else {
                    fill_with_pattern(memory.as_mut_slice(), 0);
                }
                memory
            }
        };
        Ok(Self { memory, walk: Walk::over(length), bytes, cold })
    }

    pub(super) fn are_for(&self, bytes: usize, cold: bool) -> bool {
        (self.bytes, self.cold) == (bytes, cold)
    }

    /// The next place. It comes again after [`HOT_PLACES`] at the earliest.
    pub(super) fn next(&mut self) -> Range<usize> {
        self.walk.next(self.bytes)
    }

    /// The address of a place.
    pub(super) fn address(&self, place: &Range<usize>) -> *mut u8 {
        assert!(place.end <= self.memory.len());
        // SAFETY: within the memory, as was just asserted.
        unsafe { self.memory.as_ptr().add(place.start) }
    }

    /// The bytes of a place.
    ///
    /// # Safety
    /// Nothing may be in flight to this place.
    pub(super) unsafe fn at(&mut self, place: &Range<usize>) -> &mut [u8] {
        // SAFETY: within the memory, which this value owns; others write only what is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.address(place), place.len()) }
    }

    /// The bytes of the first place, when nothing is in flight.
    pub(super) fn first(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        &mut self.memory.as_mut_slice()[..bytes]
    }

    /// Clears the first few places, when nothing is in flight.
    pub(super) fn clear_first(&mut self, count: u64) {
        let length = self.memory.len().min(self.bytes * count as usize);
        self.memory.as_mut_slice()[..length].fill(0);
    }
}

/// Whether a message is what the sender has at this place.
pub(super) fn holds_what_lies_at(message: &[u8], start: usize) -> bool {
    message.iter().enumerate().all(|(place, &byte)| byte == pattern(start + place, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_places_come_again_and_cold_ones_do_not() {
        let mut hot = Places::make(None, 1000, false, true).unwrap();
        let starts: Vec<_> = (0..4).map(|_| hot.next().start).collect();
        assert_eq!(starts, [0, 1000, 2000, 0]);
        let mut cold = Places::make(Some(hot), 1000, true, true).unwrap();
        assert!(cold.are_for(1000, true) && !cold.are_for(1000, false));
        let starts: Vec<_> = (0..4).map(|_| cold.next().start).collect();
        assert_eq!(starts, [0, 1000, 2000, 3000]);
        assert!(Places::make(None, 0, false, true).is_err());
        assert!(Places::make(None, COLD_BYTES, true, true).is_err());
    }

    #[test]
    fn a_message_of_another_place_is_noticed() {
        let mut places = Places::make(None, 500, false, false).unwrap();
        for _ in 0..3 {
            let place = places.next();
            // SAFETY: nothing is in flight.
            let message = unsafe { places.at(&place) };
            assert!(holds_what_lies_at(message, place.start));
            assert!(!holds_what_lies_at(message, place.start + 500));
            message[499] ^= 1;
            assert!(!holds_what_lies_at(message, place.start));
        }
    }
}
