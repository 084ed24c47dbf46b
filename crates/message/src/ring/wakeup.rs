//! Wakeup flags of one side of a connection.
//!
//! A consumer arms its flags and then polls the ring once more before it sleeps; a producer
//! publishes a cell and then reads the flags. A full fence separates the two steps on each side, so
//! at least one side observes the other and no wakeup is lost.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU32, Ordering, fence};

/// A full fence between a store and a later load. On x86 a locked instruction takes less time than
/// the `mfence` of `fence`.
#[inline]
pub fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: the instruction ORs 0 into a word of the stack, which changes nothing.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    fence(Ordering::SeqCst);
}

/// A thread of the owner sleeps on the word.
pub const FUTEX_ARMED: u32 = 1;
/// A thread of the owner waits for the descriptor.
pub const FD_ARMED: u32 = 2;
/// The owner does not poll this ring: the peer sets its hint ([`super::hints`]).
pub const HINT_ARMED: u32 = 4;

/// The flag word of one side. The owner sets flags; the peer clears them when it rings the
/// doorbell.
#[derive(Debug, Default)]
pub struct WakeupFlags {
    word: AtomicU32,
}

impl WakeupFlags {
    /// Arms the wakeups in `flags`. Called by the owner, which must poll its ring once more after
    /// this. Returns the flags that were armed and not yet taken by the peer.
    pub fn arm(&self, flags: u32) -> u32 {
        step();
        // Release: a peer that takes the flags sees what was shared with it before, such as hints.
        let before = self.word.swap(flags, Ordering::Release);
        fence(Ordering::SeqCst);
        before
    }

    /// Disarms all wakeups. Called by the owner. Returns the flags that were armed and not yet
    /// taken.
    pub fn disarm(&self) -> u32 {
        step();
        self.word.swap(0, Ordering::Relaxed)
    }

    /// The flags that are armed and not yet taken. Called by the owner.
    pub fn armed(&self) -> u32 {
        self.word.load(Ordering::Relaxed)
    }

    /// Takes the armed flags. Called by the peer after it has published a cell; the peer must then
    /// ring the doorbell for each returned flag.
    #[inline]
    pub fn take_armed(&self) -> u32 {
        full_fence();
        if self.word.load(Ordering::Relaxed) == 0 {
            0
        } else {
            step();
            self.word.swap(0, Ordering::Acquire)
        }
    }

    /// The flag word, as a futex.
    pub fn word(&self) -> &AtomicU32 {
        &self.word
    }
}
