//! A copy between memory of this process and memory of a peer, made without the lock of the port.
//!
//! A step of a message describes its next copy. Whoever made the step lets go of the lock, runs the copy,
//! takes the lock again and makes the next step. A system call that reads or writes memory of a peer does
//! not return before the pages are there, and no signal ends it: they may lie in a file of a dead server,
//! or behind a userfaultfd that nobody answers. So nobody waits for it with a lock. Where a peer says
//! that its memory is not there, not even a call of the application does: a thread of its own runs it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Access;

use super::pinning;
use crate::connection::{CopyError, View};
use crate::pieces::Pieces;
use crate::plan::Ends;
use crate::port::Port;
use crate::ring::layout::Memory;
use crate::ring::record::Finished;

/// As much is copied before it is looked whether anybody still wants the rest.
const SLICE_BYTES: u64 = 1 << 20;

/// The memory of a message on both sides, as the side sees it that copies.
#[derive(Debug)]
pub(crate) struct Sides {
    pub(crate) theirs: View,
    ours: Pieces,
}

// SAFETY: addresses, and the mappings that keep those of the peer valid. What is ours belongs to an
// operation, and whoever copies vouches for it.
unsafe impl Send for Sides {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Sides {}

impl Sides {
    pub(crate) fn new(theirs: View, ours: &Pieces) -> Arc<Self> {
        Arc::new(Self { theirs, ours: ours.clone() })
    }

    /// Whether the peer's memory is mapped here. It comes without the peer, so the lock may be held.
    pub(super) fn is_near(&self) -> bool {
        matches!(self.theirs, View::Near { .. })
    }

    /// Copies a part.
    ///
    /// # Safety
    /// This side's memory must be valid, for writes if the peer's is read.
    pub(super) unsafe fn copy(&self, part: &Part) -> Result<(), CopyError> {
        let Part { range, access, streaming, populates, .. } = part;
        let (theirs, ours) = (&self.theirs, self.ours.as_slice());
        // SAFETY: passed on.
        unsafe { pinning::copy(theirs, ours, range.clone(), *access, *streaming, *populates) }
    }
}

/// Tells the receiver of a chunk that its sender has copied, or could not copy. It is told right behind
/// the copy: the connection may be gone by the time somebody holds the lock, and the receiver waits.
#[derive(Debug)]
pub(super) struct Tell {
    pub(super) memory: Memory,
    pub(super) record: u16,
    pub(super) generation: u16,
    pub(super) chunk: u64,
    /// Chunks that were copied before.
    pub(super) done: u64,
}

impl Tell {
    fn tell(&self, is_copied: bool) {
        let record = self.memory.record(false, self.record.into());
        record.tell(self.generation, Finished::after(self.done, self.chunk, is_copied));
    }
}

/// How a part of a message is copied.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) range: Range<u64>,
    pub(super) access: Access,
    pub(super) streaming: Option<Streaming>,
    /// What is brought in before.
    pub(super) populates: Ends,
    pub(super) tell: Option<Tell>,
}

/// One copy.
#[derive(Debug)]
pub(crate) struct Copying {
    sides: Arc<Sides>,
    part: Part,
    is_cancelled: AtomicBool,
    outcome: OnceLock<Result<(), CopyError>>,
}

/// What became of the last copy of a message.
pub(super) enum Last {
    /// None was made.
    Nothing,
    UnderWay,
    Over(Result<(), CopyError>),
}

impl Copying {
    /// # Safety
    /// This side's memory must be valid, for writes if the peer's is read, until the copy is over or
    /// dropped.
    pub(super) unsafe fn new(sides: &Arc<Sides>, part: Part) -> Arc<Self> {
        let (is_cancelled, outcome) = (AtomicBool::new(false), OnceLock::new());
        Arc::new(Self { sides: sides.clone(), part, is_cancelled, outcome })
    }

    /// Copies. Called once, by whoever holds no lock.
    pub(crate) fn run(&self) {
        // The lock is taken again behind this, whatever happens here.
        let copied = catch_unwind(AssertUnwindSafe(|| self.copy()));
        let copied = copied.unwrap_or(Err(CopyError::Refused(libc::EFAULT)));
        if let Some(tell) = &self.part.tell {
            tell.tell(copied.is_ok());
        }
        let _ = self.outcome.set(copied);
    }

    fn copy(&self) -> Result<(), CopyError> {
        let Part { range, access, streaming, populates, .. } = &self.part;
        let Sides { theirs, ours } = &*self.sides;
        let mut at = range.start;
        while at < range.end {
            // What is not copied is not told as copied.
            if self.is_cancelled.load(Ordering::Relaxed) {
                return Err(CopyError::Refused(libc::ECANCELED));
            }
            let slice = at..range.end.min(at + SLICE_BYTES);
            at = slice.end;
            // SAFETY: whoever made this vouches for our side's memory until the outcome is set.
            unsafe {
                pinning::copy(theirs, ours.as_slice(), slice, *access, *streaming, *populates)
            }?;
        }
        Ok(())
    }

    /// Lets a thread of its own copy. `false` if none can be had.
    pub(crate) fn run_by_thread(self: &Arc<Self>, port: Weak<Port>) -> bool {
        let copying = self.clone();
        let run = move || {
            copying.run();
            // Whoever waits for the message learns of it. Copies of other messages are not this thread's:
            // they may never come either.
            if let Some(port) = port.upgrade() {
                port.enter().step_all();
            }
        };
        memferry_sys::thread::spawn("memferry-slow", run).is_ok()
    }

    /// Whether somebody may still access the memory of this side.
    pub(crate) fn is_under_way(&self) -> bool {
        self.outcome.get().is_none()
    }

    /// Nobody wants the rest. It is over when the slice under way is.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    fn length(&self) -> u64 {
        self.part.range.end - self.part.range.start
    }

    /// Takes note of the end of a message's last copy. Counts the bytes in `done`.
    pub(super) fn collect(last: &mut Option<Arc<Self>>, done: &mut u64) -> Last {
        let Some(copying) = last else { return Last::Nothing };
        let Some(outcome) = copying.outcome.get().copied() else { return Last::UnderWay };
        if outcome.is_ok() {
            *done += copying.length();
        }
        *last = None;
        Last::Over(outcome)
    }
}
