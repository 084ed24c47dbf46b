//! The end of access to a window. The owner closes the gate and then checks for accesses; an
//! accessor publishes its access and then reads the gate. A full fence separates the two steps on
//! each side, so at least one side observes the other, and no access runs when the owner continues.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};

use super::wakeup::full_fence;

/// The window of the peer that one side accesses.
#[derive(Debug, Default)]
pub struct AccessFlag {
    /// The number of the window plus one, or 0.
    word: AtomicU64,
}

impl AccessFlag {
    /// Publishes the access. Called by the accessor, which must read the gate after this.
    #[inline]
    pub fn begin(&self, window: u32) {
        step();
        self.word.store(u64::from(window) + 1, Ordering::Relaxed);
        full_fence();
    }

    /// Ends the access. Called by the accessor.
    #[inline]
    pub fn end(&self) {
        step();
        // Release: an owner that reads the 0 also reads what the accessor wrote before it.
        self.word.store(0, Ordering::Release);
    }

    /// Returns whether the peer accesses the window. Called by the owner after it has closed the
    /// gate.
    pub fn is_accessing(&self, window: u32) -> bool {
        self.word.load(Ordering::Acquire) == u64::from(window) + 1
    }

    /// Returns whether the peer accesses any window. Called by the owner.
    pub fn is_active(&self) -> bool {
        self.word.load(Ordering::Acquire) != 0
    }
}

/// The gate of a window: a word that is different when the window is closed.
#[derive(Debug, Default)]
pub struct WindowGate {
    word: AtomicU64,
}

impl WindowGate {
    /// Opens the gate. Called by the owner, after it has written the window's record.
    pub fn open(&self, word: u64) {
        self.word.store(word, Ordering::Release);
    }

    /// Closes the gate. Called by the owner, which must check for accesses after this.
    pub fn close(&self, word: u64) {
        self.word.store(word, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Loads the word. The window's record can be read after this.
    #[inline]
    pub fn load(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// Returns whether the word is unchanged since before the record was read.
    #[inline]
    pub fn is_unchanged(&self, word: u64) -> bool {
        fence(Ordering::Acquire);
        self.word.load(Ordering::Relaxed) == word
    }
}
