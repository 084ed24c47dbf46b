//! Sleeping when there is nothing to do, and being woken when there is.
//!
//! The sleeper says that it sleeps and then looks once more for work; the other side provides work
//! and then looks whether anybody sleeps. With a fence between the two steps on both sides, at
//! least one of them sees the other. The fence is asymmetric: free for the side that runs often.

use std::time::Duration;

use memferry_sys::WaitWord;
use memferry_sys::fence::Asymmetric;
use memferry_sys::sync::atomic::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// A place where one thread sleeps until there is something to see.
#[derive(Debug)]
pub struct Parker {
    word: WaitWord,
    fence: Asymmetric,
}

impl Parker {
    /// A parker with nobody asleep.
    pub fn new() -> Self {
        Self { word: WaitWord::new(AWAKE), fence: Asymmetric::new() }
    }

    /// Sleeps until woken or the time is over, unless `ready` says that there is something to see.
    /// May return early: callers look again. Returns whether the thread slept.
    pub fn park(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> bool {
        // An exchange, not a store: it comes after whatever a waker wrote last, so a waker whose
        // fence follows ours cannot take its own earlier AWAKE for the newest value.
        self.word.word().swap(ASLEEP, Ordering::Relaxed);
        let timeout = bounded(timeout, self.fence.heavy());
        let sleeps = !ready();
        if sleeps {
            self.word.wait(ASLEEP, timeout);
        }
        self.word.word().store(AWAKE, Ordering::Relaxed);
        sleeps
    }

    /// Whether the thread sleeps or is about to.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.word.word().load(Ordering::Relaxed) == ASLEEP
    }

    /// Wakes the sleeper, if there is one. Call it after making visible what it waits for.
    /// Returns whether it was asleep.
    #[inline]
    pub fn unpark(&self) -> bool {
        self.fence.light();
        if self.word.word().load(Ordering::Relaxed) == AWAKE {
            return false;
        }
        self.wake()
    }

    #[cold]
    fn wake(&self) -> bool {
        let slept = self.word.word().swap(AWAKE, Ordering::AcqRel) == ASLEEP;
        if slept {
            self.word.wake_all();
        }
        slept
    }
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

/// Without an order between saying "asleep" and looking, a waker may have missed us: nap briefly.
fn bounded(timeout: Option<Duration>, ordered: bool) -> Option<Duration> {
    const NAP: Duration = Duration::from_millis(1);
    if ordered { timeout } else { Some(timeout.map_or(NAP, |timeout| timeout.min(NAP))) }
}

/// A place where any number of threads sleep until there is something to see.
#[derive(Debug)]
pub struct Crowd {
    sleepers: AtomicU32,
    epoch: WaitWord,
    fence: Asymmetric,
}

impl Crowd {
    /// A place with nobody asleep.
    pub fn new() -> Self {
        Self { sleepers: AtomicU32::new(0), epoch: WaitWord::new(0), fence: Asymmetric::new() }
    }

    /// Sleeps until woken or the time is over, unless `ready` says that there is something to see.
    /// May return early: callers look again.
    pub fn park(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let timeout = bounded(timeout, self.fence.heavy());
        let epoch = self.epoch.word().load(Ordering::Acquire);
        if !ready() {
            self.epoch.wait(epoch, timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes everybody, if there is anybody. Call it after making visible what they wait for.
    #[inline]
    pub fn unpark(&self) {
        self.fence.light();
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.epoch.word().fetch_add(1, Ordering::AcqRel);
            self.epoch.wake_all();
        }
    }
}

impl Default for Crowd {
    fn default() -> Self {
        Self::new()
    }
}
