//! The slot of one line: its key and its users, without a lock.
//!
//! One word contains the generation of the contents, a busy flag, a draining flag, and the number
//! of users. A reader loads the word and the tag, adds itself to the word, and learns from the
//! previous value whether the tag belonged to these contents. A writer first changes the word from
//! "no users" to the next generation, in one step.
//!
//! Readers only add and remove users; all other operations are made by one thread at a time, the
//! holder of the [`FillToken`](super::cache::FillToken). The tag and the entries of the slot change
//! only while the word is busy, and it can become busy only without users.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::line::LineKey;
use crate::handle::ProcessHandle;

/// The word: generation 32 bits, busy 1, draining 1, users 30.
const BUSY: u64 = 1 << 31;
const DRAINING: u64 = 1 << 30;
const USERS: u64 = DRAINING - 1;
const GENERATION: u64 = !(BUSY | DRAINING | USERS);
const NEXT_GENERATION: u64 = 1 << 32;
/// With 2^29 or more users a slot accepts no more, long before the count reaches the flags.
const MAX_USERS_BITS: u32 = 29;

/// The slot of one line. Its alignment keeps it inside one cache line.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(32)))]
pub struct LineSlot {
    state: AtomicU64,
    address: AtomicU64,
    /// The process handle in one word; 0 if the slot is empty.
    owner: AtomicU64,
    /// The tick of the last use. Independent of the synchronisation.
    last_use: AtomicU64,
}

/// The result of an attempt to use a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcquireResult {
    /// The slot contains the line, and is acquired until [`LineSlot::release`].
    Acquired,
    /// The slot contains another line, or is being changed.
    Mismatch,
    /// As `Mismatch`, and this attempt was the last user of a draining slot: the caller must wake
    /// the threads that wait for it.
    MismatchAndWake,
}

impl LineSlot {
    /// Creates an empty slot.
    pub fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self { state: word(), address: word(), owner: word(), last_use: word() }
    }

    /// Acquires the slot if it contains the line of this owner.
    #[inline(always)]
    pub fn try_acquire(&self, address: u64, owner: u64) -> AcquireResult {
        // Acquire: the tag read below is that of this generation or of a later one.
        let seen = self.state.load(Ordering::Acquire);
        if self.address.load(Ordering::Relaxed) != address
            || self.owner.load(Ordering::Relaxed) != owner
            // A tag that is being changed may be a mixture of the old and the new one.
            || seen & BUSY != 0
        {
            return AcquireResult::Mismatch;
        }
        // Acquire: entries are read after this. If the word still has the same generation and is
        // not busy, the tag read above was not a later one: a later tag is written only after the
        // word changed without users, and from here on there is one.
        let before = self.state.fetch_add(1, Ordering::Acquire);
        if (before ^ seen & GENERATION) >> MAX_USERS_BITS == 0 {
            return AcquireResult::Acquired;
        }
        if self.release() { AcquireResult::MismatchAndWake } else { AcquireResult::Mismatch }
    }

    /// Adds a user to a slot whose contents the holder of the fill token knows. Fails if the slot
    /// is draining.
    pub fn acquire(&self) -> AcquireResult {
        let before = self.state.fetch_add(1, Ordering::Acquire);
        if (before & !GENERATION) >> MAX_USERS_BITS == 0 {
            return AcquireResult::Acquired;
        }
        if self.release() { AcquireResult::MismatchAndWake } else { AcquireResult::Mismatch }
    }

    /// Removes a user. Returns whether it was the last one of a draining slot.
    #[inline(always)]
    #[must_use]
    pub fn release(&self) -> bool {
        // Release: this user's reads come before a change of the contents.
        let before = self.state.fetch_sub(1, Ordering::Release);
        before & (DRAINING | BUSY | USERS) == DRAINING | 1
    }

    /// Records the tick of a use.
    #[inline]
    pub fn record_use(&self, tick: u64) {
        // Most uses have the same tick as the one before, and then the cache line is not written.
        if self.last_use.load(Ordering::Relaxed) != tick {
            self.last_use.store(tick, Ordering::Relaxed);
        }
    }

    /// The tick of the last use.
    pub fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }

    /// The line of the slot. Exact for the holder of the fill token, otherwise a hint.
    pub fn key(&self) -> Option<LineKey> {
        let process = ProcessHandle::from_word(self.owner.load(Ordering::Relaxed))?;
        Some(LineKey { process, address: self.address.load(Ordering::Relaxed) })
    }

    /// Starts draining: the slot accepts no new users.
    pub fn begin_drain(&self) {
        self.state.fetch_or(DRAINING, Ordering::Relaxed);
    }

    /// Whether the slot is draining.
    pub fn is_draining(&self) -> bool {
        self.state.load(Ordering::Relaxed) & DRAINING != 0
    }

    /// Starts a change of the contents, if there are no users. Only for the holder of the fill
    /// token.
    pub fn begin_change(&self) -> bool {
        let seen = self.state.load(Ordering::Relaxed);
        let next = (seen & GENERATION).wrapping_add(NEXT_GENERATION) | BUSY;
        // Acquire: all reads of former users come before the change.
        seen & (BUSY | USERS) == 0
            && self.state.compare_exchange(seen, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Sets the line of a busy slot, or none.
    pub fn set_key(&self, key: Option<LineKey>) {
        let owner = key.map_or(0, |key| key.process.to_word());
        self.owner.store(owner, Ordering::Relaxed);
        self.address.store(key.map_or(0, |key| key.address), Ordering::Relaxed);
    }

    /// Ends the change and publishes the new contents to readers.
    pub fn end_change(&self) {
        // Release: a reader that sees the word without the flag sees the new tag and entries. A
        // subtraction, because readers whose attempt fails may be counted in the word at this time.
        self.state.fetch_sub(BUSY, Ordering::Release);
    }
}
