//! Waiting for other ranks: spinning, yielding, sleeping; and what a rank does meanwhile.
//!
//! A rank spins only if every rank has a core. Otherwise it yields at once: the awaited rank may need this core. A
//! rank that has waited for longer than that sleeps. It wakes up every few milliseconds to see whether the
//! awaited processes are alive.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::futex::futex_wait_shared;

use crate::error::Error;
use crate::line::Awaited;
use crate::shared::Shared;

/// Ends an operation on all ranks: what [`Progress::poll`], or a function that combines elements, returns to give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop;

/// What a rank does while it waits for others.
pub trait Progress {
    /// Called from time to time by a waiting rank. Returns how long it may sleep at most until the next call; zero
    /// means that it must not sleep.
    ///
    /// # Errors
    /// [`Stop`] ends the operation on all ranks, and breaks the team. It has no effect if what is awaited has arrived
    /// meanwhile.
    fn poll(&mut self) -> Result<Duration, Stop>;
}

impl<F: FnMut() -> Result<Duration, Stop>> Progress for F {
    fn poll(&mut self) -> Result<Duration, Stop> {
        self()
    }
}

/// Nothing to do but to wait.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    #[inline]
    fn poll(&mut self) -> Result<Duration, Stop> {
        Ok(Duration::MAX)
    }
}

/// Polls of a rank that has a core for itself, before it yields: some 20 us.
const SPINS: u32 = 1 << 10;
/// Polls between two calls of the progress function, while spinning.
const SPINS_PER_PROGRESS: u32 = 1 << 7;
/// Yields before a rank sleeps.
const YIELDS: u32 = 200;
/// Yields between two looks at the clock.
const YIELDS_PER_CLOCK: u32 = 32;
/// Interval between checks whether the awaited ranks are alive; also the longest sleep.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

impl Shared {
    /// Waits until what is awaited has been published.
    #[inline]
    pub(crate) fn wait(
        &self,
        awaited: Awaited,
        phase: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let mut first = 0;
        if self.has_arrived(awaited, phase, &mut first) {
            return Ok(());
        }
        self.wait_long(awaited, phase, first, progress)
    }

    fn wait_long(
        &self,
        awaited: Awaited,
        phase: u64,
        mut first: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if !self.is_crowded {
            for spin in 1..=SPINS {
                std::hint::spin_loop();
                if self.has_arrived(awaited, phase, &mut first) {
                    return Ok(());
                }
                if spin % SPINS_PER_PROGRESS == 0
                    && self.poll(awaited, phase, &mut first, progress)?.is_none()
                {
                    return Ok(());
                }
            }
        }
        let mut checked = Instant::now();
        let mut round = 0u32;
        while let Some(longest) = self.poll(awaited, phase, &mut first, progress)? {
            round = round.saturating_add(1);
            if round <= YIELDS || longest.is_zero() {
                std::thread::yield_now();
            } else {
                self.sleep(awaited, phase, &mut first, longest.min(CHECK_INTERVAL));
            }
            if self.has_arrived(awaited, phase, &mut first) {
                return Ok(());
            }
            let is_due = round > YIELDS || round.is_multiple_of(YIELDS_PER_CLOCK);
            if is_due && checked.elapsed() >= CHECK_INTERVAL {
                self.check_awaited(awaited, phase, first)?;
                checked = Instant::now();
            }
        }
        Ok(())
    }

    /// Makes progress. Returns how long the rank may sleep; `None` if what is awaited has arrived.
    fn poll(
        &self,
        awaited: Awaited,
        phase: u64,
        first: &mut usize,
        progress: &mut dyn Progress,
    ) -> Result<Option<Duration>, Error> {
        let broken = self.check_broken().err();
        if broken.is_none()
            && let Ok(longest) = self.run_user_code(|| progress.poll())
        {
            return Ok(Some(longest));
        }
        // A rank that has published the phase may have left since, for the best of reasons.
        if self.has_arrived(awaited, phase, first) {
            return Ok(None);
        }
        Err(broken.unwrap_or_else(|| self.break_with(Error::Stopped(self.rank))))
    }

    fn sleep(&self, awaited: Awaited, phase: u64, first: &mut usize, longest: Duration) {
        let (line, header) = (self.line(self.rank), self.header());
        line.arm(header, awaited, phase);
        let is_broken = header.broken.load(Ordering::Relaxed) != 0;
        if !is_broken && !self.has_arrived(awaited, phase, first) {
            futex_wait_shared(&[line.sleep_word()], longest);
        }
        line.disarm(header);
    }

    #[cold]
    fn check_awaited(&self, awaited: Awaited, phase: u64, first: usize) -> Result<(), Error> {
        self.check_own_line().map_err(|error| self.break_with(error))?;
        let ranks = match awaited {
            Awaited::Rank(rank) => rank..rank + 1,
            Awaited::All => first..self.layout.size,
        };
        for rank in ranks {
            if !self.line(rank).has_published(phase) {
                self.check_rank(rank, phase).map_err(|error| self.break_with(error))?;
            }
        }
        Ok(())
    }
}
