//! The place of one line: whose line it holds, and how many hold on to it, without a lock.
//!
//! One word says it all: the generation of the contents, whether they are being changed, whether
//! the line is to leave, and how many use it. A reader looks at the word and the tag, adds itself,
//! and learns from the word it met whether the tag still was the tag of these contents. Whoever
//! changes the contents first moves the word from "no users" to the next generation, in one step.
//!
//! Who may touch what: readers add and take away users; everything else is done by one thread at a
//! time, the holder of the [`Filler`](super::cache::Filler). The tag and the entries of the slot
//! change only while the word says "busy", which it can only begin to say when nobody uses them.

use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::line::LineName;
use crate::handle::ProcessHandle;

/// The word: generation 32 bits, busy 1, leaving 1, users 30.
const BUSY: u64 = 1 << 31;
const LEAVING: u64 = 1 << 30;
const USERS: u64 = LEAVING - 1;
const GENERATION: u64 = !(BUSY | LEAVING | USERS);
const NEXT_GENERATION: u64 = 1 << 32;
/// With more users than this a slot admits no more, long before they could run into the flags.
const MOST_USERS_BITS: u32 = 29;

/// The place of one line. A quarter to a half of a cache line, never across two.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(32)))]
pub struct Slot {
    state: AtomicU64,
    address: AtomicU64,
    /// The process with its generation in one word; 0 where the slot is empty.
    owner: AtomicU64,
    /// The tick of the last use. Says nothing about who may do what.
    used: AtomicU64,
}

/// What came of the attempt to use a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The slot holds the line, and holds it until [`Slot::release`].
    Held,
    /// It holds another line, or is changing.
    Other,
    /// As `Other`; and the last user of a slot that is to leave was this very attempt, so that
    /// whoever waits for that has to be told.
    OtherAndWake,
}

impl Slot {
    /// An empty slot.
    pub fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self { state: word(), address: word(), owner: word(), used: word() }
    }

    /// Uses the slot if it holds the line of this owner.
    #[inline(always)]
    pub fn attempt(&self, address: u64, owner: u64) -> Attempt {
        // Acquire: the tag below is that of this generation or of a later one.
        let seen = self.state.load(Ordering::Acquire);
        if self.address.load(Ordering::Relaxed) != address
            || self.owner.load(Ordering::Relaxed) != owner
            // A tag that is being changed may look like any mixture of the old and the new.
            || seen & BUSY != 0
        {
            return Attempt::Other;
        }
        // Acquire: entries are read after this. If the word still has the generation and is not
        // busy, the tag read above was not a later one: a later one is written only after the
        // word was changed with no user in it, and from here on there is one.
        let before = self.state.fetch_add(1, Ordering::Acquire);
        if (before ^ seen & GENERATION) >> MOST_USERS_BITS == 0 {
            return Attempt::Held;
        }
        if self.release() { Attempt::OtherAndWake } else { Attempt::Other }
    }

    /// Adds a user to a slot whose contents the holder of the filler knows. Not when it is to leave.
    pub fn hold(&self) -> Attempt {
        let before = self.state.fetch_add(1, Ordering::Acquire);
        if (before & !GENERATION) >> MOST_USERS_BITS == 0 {
            return Attempt::Held;
        }
        if self.release() { Attempt::OtherAndWake } else { Attempt::Other }
    }

    /// Takes a user away. Says whether it was the last of a slot that is to leave.
    #[inline(always)]
    #[must_use]
    pub fn release(&self) -> bool {
        // Release: what this user read was read before the contents change.
        let before = self.state.fetch_sub(1, Ordering::Release);
        before & (LEAVING | BUSY | USERS) == LEAVING | 1
    }

    /// Remembers the tick of a use.
    #[inline]
    pub fn note_use(&self, tick: u64) {
        // Most uses come at the tick of the one before, and then the line stays unwritten.
        if self.used.load(Ordering::Relaxed) != tick {
            self.used.store(tick, Ordering::Relaxed);
        }
    }

    /// The tick of the last use.
    pub fn last_use(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The line it holds. For the holder of the filler, or as a mere hint.
    pub fn name(&self) -> Option<LineName> {
        let process = ProcessHandle::from_word(self.owner.load(Ordering::Relaxed))?;
        Some(LineName { process, address: self.address.load(Ordering::Relaxed) })
    }

    /// Admits no new users from now on.
    pub fn leave(&self) {
        self.state.fetch_or(LEAVING, Ordering::Relaxed);
    }

    /// Whether it was told to leave and has not done so.
    pub fn is_leaving(&self) -> bool {
        self.state.load(Ordering::Relaxed) & LEAVING != 0
    }

    /// Begins to change the contents, if nobody uses them. One thread at a time.
    pub fn begin_change(&self) -> bool {
        let seen = self.state.load(Ordering::Relaxed);
        let next = (seen & GENERATION).wrapping_add(NEXT_GENERATION) | BUSY;
        // Acquire: whatever the former users read, they have read before the contents change.
        seen & (BUSY | USERS) == 0
            && self.state.compare_exchange(seen, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives a changing slot its new line, or none.
    pub fn rename(&self, name: Option<LineName>) {
        let owner = name.map_or(0, |name| name.process.to_word());
        self.owner.store(owner, Ordering::Relaxed);
        self.address.store(name.map_or(0, |name| name.address), Ordering::Relaxed);
    }

    /// Ends the change: readers find the new contents.
    pub fn end_change(&self) {
        // Release: who meets the word without the flag meets the new tag and entries. A
        // subtraction, because readers that came in vain may be counted in the word right now.
        self.state.fetch_sub(BUSY, Ordering::Release);
    }
}
