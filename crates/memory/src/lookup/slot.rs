//! The slot of one line in the cache: its key and its line, read without a lock.
//!
//! A sequence number is odd while the slot is changed. A reader reads it, the key and the line,
//! publishes the line in its [`HazardCell`], and reads the number again: if it is the same, key and
//! line belong together, and the line was in the cache when its use was visible already. So a
//! thread that takes the line out of the cache and then searches the cells finds the use.
//!
//! Only one thread at a time changes slots, the holder of the
//! [`FillToken`](super::cache::FillToken).

use memferry_sys::fence::AsymmetricFence;
use memferry_sys::sync::atomic::{AtomicU64, Ordering, fence};

use super::hazard::HazardCell;
use super::line::LineKey;
use crate::handle::ProcessHandle;

/// The slot of one line. Its alignment keeps it inside one cache line.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(32)))]
pub(super) struct LineSlot {
    /// Odd while the slot is being changed.
    sequence: AtomicU64,
    address: AtomicU64,
    /// The process handle in one word; 0 if the slot is empty.
    owner: AtomicU64,
    /// The line, as the cells of readers name it; never 0 in a slot with a key.
    line: AtomicU64,
}

/// The result of an attempt to use a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtectResult {
    /// The slot contains this line, which stays attached until the cell is cleared.
    Protected(u64),
    /// The slot contains another line, or is being changed.
    Mismatch,
    /// As `Mismatch`, and the cell named the line for a moment: the caller must check whether a
    /// thread waits for that, as after every release.
    Released,
}

impl LineSlot {
    /// Creates an empty slot.
    pub(super) fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self { sequence: word(), address: word(), owner: word(), line: word() }
    }

    /// Publishes the use of the slot's line in an empty cell, if it is the line of this owner.
    #[inline(always)]
    pub(super) fn try_protect(
        &self,
        (address, owner): (u64, u64),
        cell: &HazardCell,
        ends: AsymmetricFence,
    ) -> ProtectResult {
        // Acquire: what is read below is of this change or of a later one.
        let seen = self.sequence.load(Ordering::Acquire);
        if self.address.load(Ordering::Relaxed) != address
            || self.owner.load(Ordering::Relaxed) != owner
        {
            return ProtectResult::Mismatch;
        }
        let line = self.line.load(Ordering::Relaxed);
        if seen & 1 != 0 || line == 0 {
            return ProtectResult::Mismatch;
        }
        cell.publish(line, ends);
        // Acquire: the words above were read before the number is read again.
        fence(Ordering::Acquire);
        if self.sequence.load(Ordering::Relaxed) == seen {
            return ProtectResult::Protected(line);
        }
        cell.clear(ends);
        ProtectResult::Released
    }

    /// The line of the slot, if its key is this one. Only for the holder of the fill token.
    #[inline]
    pub(super) fn line_of(&self, (address, owner): (u64, u64)) -> Option<u64> {
        let is_same = self.address.load(Ordering::Relaxed) == address
            && self.owner.load(Ordering::Relaxed) == owner;
        is_same.then(|| self.line.load(Ordering::Relaxed))
    }

    /// The key and the line of the slot. Exact for the holder of the fill token, otherwise a hint.
    #[inline]
    pub(super) fn get(&self) -> Option<(LineKey, u64)> {
        let process = ProcessHandle::from_word(self.owner.load(Ordering::Relaxed))?;
        let address = self.address.load(Ordering::Relaxed);
        Some((LineKey { process, address }, self.line.load(Ordering::Relaxed)))
    }

    /// Replaces the contents. Only for the holder of the fill token.
    #[inline]
    pub(super) fn set(&self, contents: Option<(LineKey, u64)>) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        // Release: a reader that reads a word below also reads the odd number, or a later one.
        fence(Ordering::Release);
        let (address, owner, line) =
            contents.map_or((0, 0, 0), |(key, line)| (key.address, key.process.to_word(), line));
        self.address.store(address, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
        self.line.store(line, Ordering::Relaxed);
        // Release: a reader of the new number reads the new contents, and what the line points to.
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }
}

impl Default for LineSlot {
    fn default() -> Self {
        Self::new()
    }
}
