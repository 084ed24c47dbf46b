//! How a reader keeps a line attached without a locked instruction.
//!
//! A reader owns a cell. It stores the line that it is about to use in the cell, and then checks
//! that the cache still has the line. A thread that detaches a line first takes it out of the cache
//! and then searches the cells. An asymmetric fence between the two steps of each side makes sure
//! that one of them sees the other; its cheap end, which readers execute, is no instruction. In the
//! same way a reader that clears its cell learns whether a thread waits for that.

use memferry_sys::fence::AsymmetricFence;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

/// The line that a reader uses, or 0. Written by one reader at a time, read by threads that detach.
#[derive(Debug)]
pub struct HazardCell(AtomicU64);

impl HazardCell {
    /// Creates an empty cell.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether the reader uses no line with this cell.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        // Acquire: if another thread has cleared it, its use comes before the next publication.
        self.0.load(Ordering::Acquire) == 0
    }

    /// Publishes the use of a line. What is read afterwards is not older than the publication is
    /// for a thread behind a [`Drains::begin`].
    #[inline(always)]
    pub fn publish(&self, line: u64, fence: AsymmetricFence) {
        // Release: a thread that reads this line in the cell has the uses of earlier ones behind it.
        self.0.store(line, Ordering::Release);
        fence.light();
    }

    /// Publishes the use of a line that the caller has found under the lock of the tables, which
    /// threads that detach hold too.
    pub fn publish_locked(&self, line: u64) {
        self.0.store(line, Ordering::Release);
    }

    /// Ends the use. The caller must check [`Drains::is_awaited`] afterwards.
    #[inline(always)]
    pub fn clear(&self, fence: AsymmetricFence) {
        // Release: this reader's use comes before the detachment.
        self.0.store(0, Ordering::Release);
        fence.light();
    }

    /// The line in use, for threads that detach.
    pub fn get(&self) -> u64 {
        // Acquire: if the use has ended, all of it is before what the caller does next.
        self.0.load(Ordering::Acquire)
    }
}

impl Default for HazardCell {
    fn default() -> Self {
        Self::new()
    }
}

/// The number of threads that wait until lines are unused. Every release reads it, so it has a
/// cache line of its own.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(128)))]
pub struct Drains(AtomicU64);

impl Drains {
    /// No thread waits.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Announces a thread that has taken lines out of the cache and is about to search the cells.
    /// Until [`Drains::end`], every reader that clears a cell sees it. Only for the holder of the
    /// lock of the tables.
    pub fn begin(&self, fence: AsymmetricFence) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        fence.heavy_always();
    }

    /// Ends [`Drains::begin`]. Only for the holder of the lock of the tables.
    pub fn end(&self) {
        self.0.store(self.0.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    /// Whether a thread waits, after a cell was cleared. Then the caller must wake it.
    #[inline(always)]
    pub fn is_awaited(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

impl Default for Drains {
    fn default() -> Self {
        Self::new()
    }
}
