//! Memory of the messages. Both members advance through their memory in step, so a message has the
//! same offset in the sender's and the receiver's memory. There are few hot slots, which are reused
//! at once; there are enough cold slots that the caches have evicted a slot before its reuse.

use std::ops::Range;

use memferry::sys::pages::Pages;

use crate::harness::ColdCursor;
use crate::message::messages::{fill_with_pattern, has_pattern};

/// Maximum number of messages that are in flight or computed on at the same time.
pub(super) const HOT_SLOTS: usize = 3;
/// Bytes of the cold slots. Tests check only the received data, so they use less memory.
const COLD_BYTES: usize = if cfg!(test) { 4 << 20 } else { 256 << 20 };
/// Maximum size of a message for which cold slots are cold.
const MAX_BYTES: usize = COLD_BYTES / 8;

/// Slots for messages of one size.
pub(super) struct MessageSlots {
    memory: Pages,
    cursor: ColdCursor,
    bytes: usize,
    cold: bool,
}

impl MessageSlots {
    /// Returns slots of a kind. The memory of `old` is reused if it is large enough. The sender's
    /// slots contain what [`matches_source_at`] checks; the receiver's slots are resident.
    pub(super) fn reuse_or_new(
        old: Option<Self>,
        bytes: usize,
        cold: bool,
        is_receiver: bool,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!((1..=MAX_BYTES).contains(&bytes), "a task cannot have {bytes} bytes");
        let length = if cold { COLD_BYTES } else { HOT_SLOTS * bytes };
        // Memory that is too small is freed before the new allocation: there may not be enough for
        // both.
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
        Ok(Self { memory, cursor: ColdCursor::over(length), bytes, cold })
    }

    pub(super) fn matches(&self, bytes: usize, cold: bool) -> bool {
        (self.bytes, self.cold) == (bytes, cold)
    }

    /// Returns the next slot. It is reused after [`HOT_SLOTS`] messages at the earliest.
    pub(super) fn next(&mut self) -> Range<usize> {
        self.cursor.next(self.bytes)
    }

    /// Address of a slot.
    pub(super) fn address(&self, place: &Range<usize>) -> *mut u8 {
        assert!(place.end <= self.memory.len());
        // SAFETY: within the memory, as was just asserted.
        unsafe { self.memory.as_ptr().add(place.start) }
    }

    /// Bytes of a slot.
    ///
    /// # Safety
    ///
    /// Nothing may be in flight to this slot.
    pub(super) unsafe fn slot_mut(&mut self, place: &Range<usize>) -> &mut [u8] {
        // SAFETY: within the memory, which this value owns; only what is in flight is written from
        // elsewhere.
        unsafe { std::slice::from_raw_parts_mut(self.address(place), place.len()) }
    }

    /// Bytes of the first slot, when nothing is in flight.
    pub(super) fn first_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        &mut self.memory.as_mut_slice()[..bytes]
    }

    /// Clears the first `count` slots, when nothing is in flight.
    pub(super) fn clear_first(&mut self, count: u64) {
        let length = self.memory.len().min(self.bytes * count as usize);
        self.memory.as_mut_slice()[..length].fill(0);
    }
}

/// Returns whether a message is what the sender has at this offset.
pub(super) fn matches_source_at(message: &[u8], start: usize) -> bool {
    has_pattern(message, start, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_places_come_again_and_cold_ones_do_not() {
        let mut hot = MessageSlots::reuse_or_new(None, 1000, false, true).unwrap();
        let starts: Vec<_> = (0..4).map(|_| hot.next().start).collect();
        assert_eq!(starts, [0, 1000, 2000, 0]);
        let mut cold = MessageSlots::reuse_or_new(Some(hot), 1000, true, true).unwrap();
        assert!(cold.matches(1000, true) && !cold.matches(1000, false));
        let starts: Vec<_> = (0..4).map(|_| cold.next().start).collect();
        assert_eq!(starts, [0, 1000, 2000, 3000]);
        assert!(MessageSlots::reuse_or_new(None, 0, false, true).is_err());
        assert!(MessageSlots::reuse_or_new(None, COLD_BYTES, true, true).is_err());
    }

    #[test]
    fn a_message_of_another_place_is_noticed() {
        let mut places = MessageSlots::reuse_or_new(None, 500, false, false).unwrap();
        for _ in 0..3 {
            let place = places.next();
            // SAFETY: nothing is in flight.
            let message = unsafe { places.slot_mut(&place) };
            assert!(matches_source_at(message, place.start));
            assert!(!matches_source_at(message, place.start + 500));
            message[499] ^= 1;
            assert!(!matches_source_at(message, place.start));
        }
    }
}
