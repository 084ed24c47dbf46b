//! A copy between memory of this process and memory of a peer, made without the lock of the port.
//!
//! A step of a message describes its next copy. Whoever made the step lets go of the lock, runs the copy,
//! takes the lock again and makes the next step. A system call that reads or writes memory of a peer does
//! not return before the pages are there, and no signal ends it: they may lie in a file of a dead server,
//! or behind a userfaultfd that nobody answers. So nobody waits for it with a lock. Where a peer says
//! that its memory is not there, not even a call of the application does: a thread of its own runs it.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

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

impl Part {
    fn nothing() -> Self {
        let (access, populates) = (Access::Read, Ends::default());
        Self { range: 0..0, access, streaming: None, populates, tell: None }
    }
}

/// Tells the receiver of a chunk that its sender has copied, or could not copy. It is told right behind
/// the copy: the connection may be gone by the time somebody holds the lock, and the receiver waits.
#[derive(Debug)]
pub(super) struct Tell {
    pub(super) record: u16,
    pub(super) generation: u16,
    pub(super) chunk: u64,
    /// Chunks that were copied before.
    pub(super) done: u64,
}

/// The copies of one message that this side makes, one part after the other: the memory of both sides, and
/// how far the part is.
pub(crate) struct Copying {
    pub(super) theirs: View,
    ours: Pieces,
    /// The memory of the connection, where the receiver of a chunk is told.
    memory: Option<Memory>,
    /// One of the stages below. Only whoever holds the lock of the port goes from `OVER` to `IDLE` to
    /// `READY`; only whoever copies goes on to `RUNNING` and `OVER`.
    stage: AtomicU8,
    /// Written by whoever holds the lock while `IDLE`; read by whoever copies while `RUNNING`, and by
    /// whoever holds the lock while `OVER`.
    part: UnsafeCell<Part>,
    /// Written by whoever copies while `RUNNING`; read by whoever holds the lock while `OVER`.
    outcome: UnsafeCell<Result<(), CopyError>>,
    is_cancelled: AtomicBool,
}

/// No part is to be copied.
const IDLE: u8 = 0;
/// One is, and nobody has begun.
const READY: u8 = 1;
/// Somebody copies.
const RUNNING: u8 = 2;
/// The part is copied, or could not be, and nobody has asked how it went.
const OVER: u8 = 3;

// SAFETY: addresses, and the mappings that keep those of the peer valid. What is ours belongs to an
// operation, and whoever makes a part ready vouches for it.
unsafe impl Send for Copying {}
// SAFETY: the cells are written and read as said beside them. Each step of the stage is an atomic store
// with release, or an exchange with acquire and release, and whoever goes on has loaded it with acquire: so
// of two accesses to a cell one happens before the other.
unsafe impl Sync for Copying {}

impl std::fmt::Debug for Copying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copying")
            .field("is_under_way", &self.is_under_way())
            .finish_non_exhaustive()
    }
}

/// What became of the last part.
pub(super) enum Last {
    /// None was made ready.
    Nothing,
    UnderWay,
    Over(Result<(), CopyError>),
}

impl Copying {
    /// Between memory of a peer and these pieces. A sender that tells its receiver of chunks does so in
    /// the memory of their connection.
    pub(crate) fn between(theirs: View, ours: &Pieces, memory: Option<Memory>) -> Arc<Self> {
        Arc::new(Self {
            theirs,
            ours: ours.clone(),
            memory,
            stage: AtomicU8::new(IDLE),
            part: UnsafeCell::new(Part::nothing()),
            outcome: UnsafeCell::new(Ok(())),
            is_cancelled: AtomicBool::new(false),
        })
    }

    /// Whether the peer's memory is mapped here. It comes without the peer, so the lock may be held.
    pub(super) fn is_near(&self) -> bool {
        matches!(self.theirs, View::Near { .. })
    }

    /// Copies a part at once.
    ///
    /// # Safety
    /// This side's memory must be valid, for writes if the peer's is read.
    pub(super) unsafe fn copy_now(&self, part: &Part) -> Result<(), CopyError> {
        // SAFETY: passed on.
        unsafe { self.copy(part, part.range.clone()) }
    }

    /// Makes a part ready to be copied by [`Copying::run`]. The last one was collected.
    ///
    /// # Safety
    /// The caller must hold the lock of the port. This side's memory must be valid, for writes if the
    /// peer's is read, until the part is over or this is dropped.
    pub(super) unsafe fn make_ready(&self, part: Part) {
        assert_eq!(self.stage.load(Ordering::Acquire), IDLE, "one part is copied at a time");
        // SAFETY: nobody else goes on from `IDLE`, by the lock, and nobody reads the part before `READY`.
        unsafe { *self.part.get() = part };
        self.stage.store(READY, Ordering::Release);
    }

    /// Copies the part that is ready, if nobody else does. For whoever holds no lock.
    pub(crate) fn run(&self) {
        let go = (Ordering::Acquire, Ordering::Relaxed);
        if self.stage.compare_exchange(READY, RUNNING, go.0, go.1).is_err() {
            return;
        }
        // SAFETY: nobody writes the part before `OVER`, which this thread alone goes on to.
        let part = unsafe { &*self.part.get() };
        // The lock is taken again behind this, whatever happens here.
        let copied = catch_unwind(AssertUnwindSafe(|| self.copy_slices(part)));
        let copied = copied.unwrap_or(Err(CopyError::Refused(libc::EFAULT)));
        if let (Some(tell), Some(memory)) = (&part.tell, &self.memory) {
            let record = memory.record(false, tell.record.into());
            let finished = Finished::after(tell.done, tell.chunk, copied.is_ok());
            record.tell(tell.generation, finished);
        }
        // SAFETY: nobody reads it before `OVER`.
        unsafe { *self.outcome.get() = copied };
        self.stage.store(OVER, Ordering::Release);
    }

    fn copy_slices(&self, part: &Part) -> Result<(), CopyError> {
        let mut at = part.range.start;
        while at < part.range.end {
            // What is not copied is not told as copied.
            if self.is_cancelled.load(Ordering::Relaxed) {
                return Err(CopyError::Refused(libc::ECANCELED));
            }
            let slice = at..part.range.end.min(at + SLICE_BYTES);
            at = slice.end;
            // SAFETY: whoever made the part ready vouches for our side's memory until it is over.
            unsafe { self.copy(part, slice) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Copying::copy_now`].
    unsafe fn copy(&self, part: &Part, range: Range<u64>) -> Result<(), CopyError> {
        let Part { access, streaming, populates, .. } = part;
        let (theirs, ours) = (&self.theirs, self.ours.as_slice());
        // SAFETY: passed on.
        unsafe { pinning::copy(theirs, ours, range, *access, *streaming, *populates) }
    }

    /// Lets a thread of its own copy what is ready. `false` if none can be had: then nothing is ready.
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
        let is_started =
            std::thread::Builder::new().name("memferry-slow".into()).spawn(run).is_ok();
        if !is_started {
            self.stage.store(IDLE, Ordering::Release);
        }
        is_started
    }

    /// Whether somebody may access the memory of this side, now or soon.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self.stage.load(Ordering::Acquire), READY | RUNNING)
    }

    /// Whether a part was made ready and not collected.
    pub(crate) fn is_begun(&self) -> bool {
        self.stage.load(Ordering::Acquire) != IDLE
    }

    /// Nobody wants the rest. It is over when the slice under way is.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Takes note of the end of the last part. Counts the bytes in `done`.
    ///
    /// # Safety
    /// The caller must hold the lock of the port.
    pub(super) unsafe fn collect(&self, done: &mut u64) -> Last {
        match self.stage.load(Ordering::Acquire) {
            IDLE => return Last::Nothing,
            OVER => {}
            _ => return Last::UnderWay,
        }
        // SAFETY: it is over, so whoever copied is out, and by the lock nobody goes on from there but this
        // thread.
        let (outcome, range) = unsafe { (*self.outcome.get(), &(*self.part.get()).range) };
        if outcome.is_ok() {
            *done += range.end - range.start;
        }
        self.stage.store(IDLE, Ordering::Release);
        Last::Over(outcome)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use memferry_sys::cross_memory::Stretch;

    use super::*;
    use crate::pieces::Piece;

    fn read(source: &[u8], target: &mut [u8]) -> Arc<Copying> {
        let stretch = Stretch { address: source.as_ptr() as usize, length: source.len() };
        let theirs = View::Cross { pid: std::process::id(), stretches: Pieces::One(stretch) };
        let ours = Pieces::new(&[Piece::target(target.as_mut_ptr(), target.len())]);
        Copying::between(theirs, &ours, None)
    }

    fn part(range: Range<u64>) -> Part {
        Part { range, ..Part::nothing() }
    }

    #[test]
    fn each_part_is_copied_once_and_collected_before_the_next() {
        let (source, mut target) = ([7u8; 64], [0u8; 64]);
        let (at, mut done) = (target.as_mut_ptr(), 0);
        let copying = read(&source, &mut target);
        for (start, end) in [(0, 16), (16, 64)] {
            // SAFETY: this thread alone uses it, and both arrays live as long.
            unsafe {
                assert!(matches!(copying.collect(&mut done), Last::Nothing));
                copying.make_ready(part(start..end));
                assert!(matches!(copying.collect(&mut done), Last::UnderWay));
            }
            assert!(copying.is_under_way() && copying.is_begun());
            copying.run();
            assert!(!copying.is_under_way() && copying.is_begun());
            // SAFETY: as above.
            unsafe { at.add(start as usize).write(9) };
            copying.run();
            // SAFETY: as above.
            assert!(matches!(unsafe { copying.collect(&mut done) }, Last::Over(Ok(()))));
            assert_eq!(done, end);
            copying.run();
        }
        assert_eq!((target[0], target[15], target[16], target[63]), (9, 7, 9, 7));
    }

    #[test]
    fn a_part_that_nobody_wants_any_more_is_not_copied() {
        let (source, mut target) = ([7u8; 64], [0u8; 64]);
        let copying = read(&source, &mut target);
        let mut done = 0;
        // SAFETY: this thread alone uses it, and both arrays live as long.
        unsafe { copying.make_ready(part(0..64)) };
        copying.cancel();
        copying.run();
        // SAFETY: as above.
        let last = unsafe { copying.collect(&mut done) };
        assert!(matches!(last, Last::Over(Err(CopyError::Refused(libc::ECANCELED)))));
        assert_eq!((done, target), (0, [0; 64]));
    }
}
