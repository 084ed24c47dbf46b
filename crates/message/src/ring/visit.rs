//! How the owner of a window ends access to it: it closes the gate and then waits for visits; a
//! visitor says that it visits and then looks at the gate. With a full fence between the two steps
//! on both sides, at least one of them sees the other, so that nobody is inside when the owner goes
//! on.

use memferry_sys::fault::step;
use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};

use super::attention::full_fence;

/// Which window of the other side one side is copying to or from.
#[derive(Debug, Default)]
pub struct Visiting {
    /// The number of the window plus one, or 0.
    word: AtomicU64,
}

impl Visiting {
    /// For the visitor: says that it visits. Look at the gate after this.
    #[inline]
    pub fn begin(&self, window: u32) {
        step();
        self.word.store(u64::from(window) + 1, Ordering::Relaxed);
        full_fence();
    }

    /// For the visitor: it is out again.
    #[inline]
    pub fn end(&self) {
        step();
        // Release: whoever sees the end sees what was written before it.
        self.word.store(0, Ordering::Release);
    }

    /// For the owner, after it has closed a gate: whether the window is being visited.
    pub fn is_at(&self, window: u32) -> bool {
        self.word.load(Ordering::Acquire) == u64::from(window) + 1
    }

    /// For the owner: whether any window is being visited.
    pub fn is_anywhere(&self) -> bool {
        self.word.load(Ordering::Acquire) != 0
    }
}

/// Whether a window is open, with whatever else is in the word that says so.
#[derive(Debug, Default)]
pub struct Gate {
    word: AtomicU64,
}

impl Gate {
    /// For the owner: everything that was written about the window is valid from now on.
    pub fn open(&self, word: u64) {
        self.word.store(word, Ordering::Release);
    }

    /// For the owner: nobody gets in any more. Look for visits after this.
    pub fn close(&self, word: u64) {
        self.word.store(word, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The word now. What it says the window is can be read after this.
    #[inline]
    pub fn look(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// Whether the word is still the same after what it says the window is was read.
    #[inline]
    pub fn is_still(&self, word: u64) -> bool {
        fence(Ordering::Acquire);
        self.word.load(Ordering::Relaxed) == word
    }
}
