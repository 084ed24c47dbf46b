//! One rank's view of the memory of its team: mapping, lines, staging, liveness.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Instant;

use memferry_sys::file_lock;
use memferry_sys::fork::CloseOnFork;
use memferry_sys::futex::futex_wake_shared;
use memferry_sys::pages::page_bytes;
use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

use crate::element::Combine;
use crate::error::Error;
use crate::line::{Awaited, Header, Line, NO_PHASE, SLOTS, must_look_for_sleepers};
use crate::waiting::Stop;

/// The rank has not registered yet.
pub(crate) const ABSENT: u32 = 0;
/// The rank is a member, and holds the lock of its byte while its process exists.
pub(crate) const JOINED: u32 = 1;
/// The rank has dropped its team.
pub(crate) const LEFT: u32 = 2;

/// Maximum number of ranks.
pub(crate) const MAX_RANKS: usize = 1 << 16;
/// Maximum length of one of the two halves of a rank's staging.
pub(crate) const MAX_HALF: usize = 1 << 30;

const PAGE: usize = 4096;
const LINES: usize = size_of::<Header>();

/// Where the parts of the memory are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) size: usize,
    /// The length of one of the two halves of a rank's staging.
    pub(crate) half: usize,
}

impl Layout {
    /// A layout; `None` if the numbers make no sense.
    pub(crate) fn new(size: usize, half: usize) -> Option<Self> {
        let is_valid = (1..=MAX_RANKS).contains(&size)
            && (PAGE..=MAX_HALF).contains(&half)
            && half.is_multiple_of(PAGE);
        let layout = is_valid.then_some(Self { size, half })?;
        // On machines of 32 bits not every layout fits into the memory.
        let bytes = size.checked_mul(2)?.checked_mul(half)?.checked_add(layout.staging())?;
        let bytes = bytes.checked_next_multiple_of(page_bytes())?;
        isize::try_from(bytes).is_ok().then_some(layout)
    }

    fn staging(self) -> usize {
        (LINES + self.size * size_of::<Line>()).next_multiple_of(PAGE)
    }

    /// The length of the memory: whole pages, which may be longer than those of the layout.
    pub(crate) fn bytes(self) -> usize {
        (self.staging() + self.size * 2 * self.half).next_multiple_of(page_bytes())
    }
}

/// The memory of a team, as one rank sees it.
#[derive(Debug)]
pub(crate) struct Shared {
    mapping: Mapping,
    pub(crate) layout: Layout,
    pub(crate) rank: usize,
    /// An open file of the memory with the lock of this rank's byte.
    lock: CloseOnFork,
    /// Whether there are more ranks than cores, so that a rank that spins keeps another one from running.
    pub(crate) is_crowded: bool,
    /// The last phase that this rank has published.
    published: AtomicU64,
    /// The error that this rank got: its copy in the shared memory may be overwritten.
    failed: OnceLock<Error>,
    /// While the team is created: when ranks that are awaited count as missing.
    pub(crate) join_deadline: Option<Instant>,
}

impl Shared {
    /// Maps the memory and locks the byte of a rank.
    pub(crate) fn attach(
        memory: &SealedMemory,
        layout: Layout,
        rank: usize,
    ) -> Result<Self, Error> {
        let mapping = memory.map(Protection::ReadWrite)?;
        if mapping.len() < layout.bytes() || rank >= layout.size {
            return Err(Error::Corrupt);
        }
        // A child that another thread forks meanwhile must not hold the lock.
        let lock = CloseOnFork::new(memory.reopen()?)?;
        file_lock::lock_byte(lock.as_fd(), rank as u64)?;
        Ok(Self {
            mapping,
            layout,
            rank,
            lock,
            is_crowded: true,
            published: AtomicU64::new(NO_PHASE),
            failed: OnceLock::new(),
            join_deadline: None,
        })
    }

    pub(crate) fn is_owner_process(&self) -> bool {
        self.lock.is_owner_process()
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, which consists of atomics, so that other processes may change it
        // under the reference; a page is aligned enough.
        unsafe { &*self.mapping.as_ptr().cast::<Header>() }
    }

    /// The line of a rank.
    #[inline]
    pub(crate) fn line(&self, rank: usize) -> &Line {
        assert!(rank < self.layout.size, "a rank of the team");
        // SAFETY: the mapping has `size` lines from `LINES` on (`attach` checks its length), aligned because the
        // header's size is a multiple of the alignment; a line consists of atomics.
        unsafe { &*self.mapping.as_ptr().add(LINES).cast::<Line>().add(rank) }
    }

    /// One half of the staging of a rank: `half` bytes, aligned to pages.
    pub(crate) fn staging(&self, rank: usize, half: usize) -> *mut u8 {
        assert!(rank < self.layout.size && half < 2, "a half of a rank of the team");
        let offset = self.layout.staging() + (2 * rank + half) * self.layout.half;
        // SAFETY: `Layout::bytes` counts two halves for each rank, and the mapping is at least as long.
        unsafe { self.mapping.as_ptr().add(offset) }
    }

    /// Publishes a phase of this rank, and wakes those that it was the last to be awaited by.
    #[inline]
    pub(crate) fn publish(&self, phase: u64) {
        self.published.store(phase, Ordering::Relaxed);
        self.line(self.rank).publish(phase);
        if must_look_for_sleepers(self.header()) {
            self.wake_ready();
        }
    }

    #[cold]
    fn wake_ready(&self) {
        let mut complete = 0;
        for rank in (0..self.layout.size).filter(|rank| *rank != self.rank) {
            let is_there = |awaited, phase| match awaited {
                Awaited::All if phase <= complete => true,
                Awaited::All => {
                    let is_complete = self.has_arrived(Awaited::All, phase, &mut 0);
                    complete = if is_complete { phase } else { complete };
                    is_complete
                }
                Awaited::Rank(_) => self.has_arrived(awaited, phase, &mut 0),
            };
            let line = self.line(rank);
            if line.take_sleeper(is_there) {
                futex_wake_shared(line.sleep_word().0);
            }
        }
    }

    /// Whether what is awaited has been published. `first` is the first rank that has not, of all.
    #[inline]
    pub(crate) fn has_arrived(&self, awaited: Awaited, phase: u64, first: &mut usize) -> bool {
        match awaited {
            Awaited::Rank(rank) => rank < self.layout.size && self.line(rank).has_published(phase),
            Awaited::All => {
                while *first < self.layout.size && self.line(*first).has_published(phase) {
                    *first += 1;
                }
                *first == self.layout.size
            }
        }
    }

    /// The error of a broken team.
    #[inline]
    pub(crate) fn check_broken(&self) -> Result<(), Error> {
        match self.header().broken.load(Ordering::Acquire) {
            0 => Ok(()),
            word => {
                let error = Error::from_word(word, self.layout.size).unwrap_or(Error::Corrupt);
                let _ = self.failed.set(error.clone());
                Err(error)
            }
        }
    }

    /// Breaks the team: all ranks get the error. Returns that of the rank which was first.
    #[cold]
    pub(crate) fn break_with(&self, error: Error) -> Error {
        let word = error.to_word(self.rank);
        let broken = &self.header().broken;
        let first = match broken.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => error,
            Err(word) => Error::from_word(word, self.layout.size).unwrap_or(Error::Corrupt),
        };
        let _ = self.failed.set(first.clone());
        // A rank that goes to sleep now sees the word.
        fence(Ordering::SeqCst);
        self.wake_everyone();
        first
    }

    /// Runs code of the application. A panic in it breaks the team, so that no rank waits for this one.
    #[inline]
    pub(crate) fn run_user_code<R>(&self, run: impl FnOnce() -> R) -> R {
        struct BreakOnUnwind<'a>(&'a Shared);
        impl Drop for BreakOnUnwind<'_> {
            fn drop(&mut self) {
                self.0.break_with(Error::Stopped(self.0.rank));
            }
        }
        let guard = BreakOnUnwind(self);
        let result = run();
        std::mem::forget(guard);
        result
    }

    /// Combines `count` elements. If the function of the caller fails, the team breaks here, before anything of the
    /// result is published.
    ///
    /// # Safety
    /// As [`Combine::apply`].
    #[inline]
    pub(crate) unsafe fn combine(
        &self,
        combine: &mut Combine<'_>,
        into: *mut u8,
        from: *const u8,
        count: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees the same.
        let applied = self.run_user_code(|| unsafe { combine.apply(into, from, count) });
        applied.map_err(|Stop| self.break_with(Error::Stopped(self.rank)))
    }

    /// The error that this rank got before. Tells it again to the others, who may not have heard of it.
    #[inline]
    pub(crate) fn check_failed(&self) -> Result<(), Error> {
        match self.failed.get() {
            None => Ok(()),
            Some(error) => Err(self.break_with(error.clone())),
        }
    }

    /// Fails if the line of this rank is not what it has written: then others may wait for what it has published.
    pub(crate) fn check_own_line(&self) -> Result<(), Error> {
        let (line, last) = (self.line(self.rank), self.published.load(Ordering::Relaxed));
        let first = last.saturating_sub(SLOTS as u64 - 1).max(NO_PHASE + 1);
        let is_whole = (first..=last).all(|phase| line.stamp(phase) == phase);
        if is_whole && (last == NO_PHASE || line.state.load(Ordering::Relaxed) == JOINED) {
            return Ok(());
        }
        Err(Error::Corrupt)
    }

    fn wake_everyone(&self) {
        for rank in (0..self.layout.size).filter(|rank| *rank != self.rank) {
            let line = self.line(rank);
            if line.take_sleeper(|_, _| true) {
                futex_wake_shared(line.sleep_word().0);
            }
        }
    }

    /// Fails if a rank that has not published a phase never will.
    pub(crate) fn check_rank(&self, rank: usize, phase: u64) -> Result<(), Error> {
        let line = self.line(rank);
        let is_late = self.join_deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let error = match line.state.load(Ordering::Acquire) {
            _ if rank == self.rank => return Ok(()),
            ABSENT if self.join_deadline.is_some() && !is_late => return Ok(()),
            ABSENT => Error::RankMissing(rank),
            JOINED => match file_lock::is_byte_locked(self.lock.as_fd(), rank as u64) {
                Ok(false) => Error::RankDied(rank),
                // It lives, but its process may be stopped.
                _ if is_late => Error::RankMissing(rank),
                // An error here (interrupted, no memory) says nothing about the rank.
                _ => return Ok(()),
            },
            LEFT => Error::RankLeft(rank),
            _ => Error::Corrupt,
        };
        // It may have published the phase just before.
        match line.has_published(phase) {
            true => Ok(()),
            false => Err(error),
        }
    }

    /// Registers this rank: from now on its lock tells whether it is alive.
    pub(crate) fn register(&self, probe: (u64, u64)) {
        let line = self.line(self.rank);
        line.pid.store(std::process::id(), Ordering::Relaxed);
        line.probe_address.store(probe.0, Ordering::Relaxed);
        line.probe_value.store(probe.1, Ordering::Relaxed);
        line.state.store(JOINED, Ordering::Release);
    }

    pub(crate) fn state(&self) -> &AtomicU32 {
        &self.line(self.rank).state
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A forked child is no member.
        if self.is_owner_process() {
            self.state().store(LEFT, Ordering::Release);
            fence(Ordering::SeqCst);
            self.wake_everyone();
        }
    }
}
