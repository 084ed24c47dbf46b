//! Whether the other side looks at its ring by itself, or must be told that something came.
//!
//! A side that stops looking first says so, then looks once more; a side that writes first writes,
//! then asks whether the other one looks. With a full fence between the two steps on both sides,
//! at least one of them sees the other, so nothing is slept through.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU32, Ordering, fence};

/// A fence between a store and a later load. On x86 a locked instruction does that in less time
/// than the instruction that `fence` stands for.
#[inline]
pub fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: adds nothing to a word of the stack.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    fence(Ordering::SeqCst);
}

/// Somebody sleeps on the word.
pub const ASLEEP: u32 = 1;
/// Somebody watches the descriptor.
pub const AWAY: u32 = 2;

/// The word of one side. The side itself sets flags, the other side clears them when it rings.
#[derive(Debug, Default)]
pub struct Attention {
    word: AtomicU32,
}

impl Attention {
    /// For the owner: from now on it must be told, in the ways of `flags`. Look at the ring once
    /// more after this. Returns what it said last, unless it was told since.
    pub fn rest(&self, flags: u32) -> u32 {
        step();
        let before = self.word.swap(flags, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        before
    }

    /// For the owner: it looks by itself. Returns what it said last, unless it was told since.
    pub fn awake(&self) -> u32 {
        step();
        self.word.swap(0, Ordering::Relaxed)
    }

    /// For the owner: what it said last, unless it was told since.
    pub fn resting(&self) -> u32 {
        self.word.load(Ordering::Relaxed)
    }

    /// For the other side, after writing: the ways in which the owner must be told, now that this
    /// side has taken that on itself.
    #[inline]
    pub fn take_ways(&self) -> u32 {
        full_fence();
        if self.word.load(Ordering::Relaxed) == 0 {
            0
        } else {
            step();
            self.word.swap(0, Ordering::Relaxed)
        }
    }

    /// The word, to sleep on and to wake.
    pub fn word(&self) -> &AtomicU32 {
        &self.word
    }
}
