//! Hints: which peers of a process may have written to their rings.
//!
//! A process with many peers does not poll every ring. It arms [`HINT_ARMED`] in the wakeup flags of
//! a ring that was quiet for a while, polls that ring once more, and leaves it alone. The peer that
//! takes the flag sets its bit here, after it has written its cell. The owner polls one word for all
//! peers, and sleeps on one futex for all of them.
//!
//! All peers can write to these words, so the owner does not rely on them: a peer that clears the
//! bits of others, or takes the flags of the futex, delays their messages until the owner's next
//! sweep of all rings, and no longer.
//!
//! [`HINT_ARMED`]: super::wakeup::HINT_ARMED

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::wakeup::WakeupFlags;

/// Words of bits. Peers with higher numbers share the bits of others.
#[cfg(not(loom))]
const WORDS: usize = 64;
#[cfg(loom)]
const WORDS: usize = 1;

/// A word in two lines of its own: the adjacent line is often fetched too.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Line<T>(T);

/// The hints of one process, which its peers set.
#[derive(Debug)]
#[repr(C)]
pub struct HintWords {
    /// The wakeup of a thread that sleeps for all peers.
    wakeup: Line<WakeupFlags>,
    /// A bit for each word of `bits` that is not 0.
    summary: Line<AtomicU64>,
    bits: [AtomicU64; WORDS],
}

impl Default for HintWords {
    fn default() -> Self {
        Self {
            wakeup: Line::default(),
            summary: Line::default(),
            bits: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl HintWords {
    /// The wakeup of a thread that sleeps for all peers.
    pub fn wakeup(&self) -> &WakeupFlags {
        &self.wakeup.0
    }

    /// Returns whether any hint is set. Called by the owner.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.summary.0.load(Ordering::Relaxed) != 0
    }

    /// Takes all hints, and calls `visit` with the number of each bit. Called by the owner.
    pub fn take(&self, mut visit: impl FnMut(usize)) {
        let mut words = self.summary.0.swap(0, Ordering::Acquire);
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            // The summary comes from peers: its bits may name words that do not exist.
            let Some(bits) = self.bits.get(word) else { break };
            // Acquire: the cell was written before its hint.
            let mut bits = bits.swap(0, Ordering::Acquire);
            while bits != 0 {
                visit(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Sets the hint of a peer. Called by the peer after it has written a cell, or what else the
    /// owner is to see. Returns the armed flags of the owner's wakeup: the caller must wake it.
    #[must_use]
    pub fn set(&self, slot: usize) -> u32 {
        let word = slot / 64 % WORDS;
        step();
        self.bits[word].fetch_or(1 << (slot % 64), Ordering::Release);
        step();
        // After the bit, and in any case: another peer may have exited between its two steps.
        self.summary.0.fetch_or(1 << word, Ordering::Release);
        self.wakeup().take_armed()
    }

    /// The slots that have a bit, which may be fewer than there are peers.
    pub const SLOTS: usize = WORDS * 64;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ring::wakeup::FUTEX_ARMED;

    fn taken(hints: &HintWords) -> Vec<usize> {
        let mut slots = Vec::new();
        hints.take(|slot| slots.push(slot));
        slots
    }

    #[test]
    fn each_hint_is_taken_once() {
        let hints = HintWords::default();
        assert!(!hints.has_any() && taken(&hints).is_empty());
        for slot in [5, 64, 5, 4095] {
            assert_eq!(hints.set(slot), 0);
        }
        assert!(hints.has_any());
        assert_eq!(taken(&hints), [5, 64, 4095]);
        assert!(!hints.has_any() && taken(&hints).is_empty());
    }

    #[test]
    fn a_slot_beyond_the_bits_shares_one() {
        let hints = HintWords::default();
        assert_eq!(hints.set(HintWords::SLOTS + 3), 0);
        assert_eq!(taken(&hints), [3]);
    }

    #[test]
    fn the_first_of_several_peers_wakes_the_owner() {
        let hints = HintWords::default();
        hints.wakeup().arm(FUTEX_ARMED);
        assert_eq!((hints.set(1), hints.set(2)), (FUTEX_ARMED, 0));
    }

    #[test]
    fn a_summary_without_bits_leads_to_nobody() {
        let hints = HintWords::default();
        hints.summary.0.store(u64::MAX, Ordering::Relaxed);
        assert!(taken(&hints).is_empty());
    }
}
