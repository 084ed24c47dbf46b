//! Sleeping when there is no work, and wakeups.
//!
//! A sleeper marks itself as asleep and then checks for work once more; a waker publishes work and
//! then reads the mark. A fence separates the two steps on both sides, so at least one side
//! observes the other. The fence is asymmetric: it costs nothing on the side that runs often, the
//! waker's.

use std::time::Duration;

use memferry_sys::Futex;
use memferry_sys::fence::AsymmetricFence;
use memferry_sys::sync::atomic::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
/// Asleep, and somebody has undertaken to wake the sleeper.
const CALLED: u32 = 2;

/// A futex on which one thread sleeps until there is work.
#[derive(Debug)]
pub struct Parker {
    word: Futex,
    fence: AsymmetricFence,
}

impl Parker {
    /// Creates a parker without a sleeper.
    pub fn new() -> Self {
        Self { word: Futex::new(AWAKE), fence: AsymmetricFence::new() }
    }

    /// Sleeps until woken or the timeout expires, unless `ready` returns true. May return early, so
    /// callers check again. Returns whether the thread slept.
    pub fn park(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> bool {
        // An exchange, not a store: it is ordered after the last write of a waker, so a waker whose
        // fence follows this thread's fence cannot read its own earlier AWAKE as the newest value.
        self.word.word().swap(ASLEEP, Ordering::Relaxed);
        let timeout = bounded(timeout, self.fence.heavy());
        let sleeps = !ready();
        if sleeps {
            self.word.wait(ASLEEP, timeout);
        }
        // An exchange, so that this thread sees what whoever woke it wrote before.
        self.word.word().swap(AWAKE, Ordering::Acquire);
        sleeps
    }

    /// Whether the thread sleeps or is about to sleep, and nobody has undertaken to wake it.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.word.word().load(Ordering::Relaxed) == ASLEEP
    }

    /// As [`Parker::is_asleep`], for a thread that has published work: then it cannot miss the sleeper.
    #[inline]
    pub fn must_be_called(&self) -> bool {
        self.fence.light();
        self.is_asleep()
    }

    /// Whether somebody has undertaken to wake the sleeper and has not done it.
    pub fn is_called(&self) -> bool {
        self.word.word().load(Ordering::Relaxed) == CALLED
    }

    /// Undertakes to wake the sleeper, by a later [`Parker::wake`] of any thread; `false` if there is none,
    /// or if another thread has undertaken it.
    pub fn claim(&self) -> bool {
        let word = self.word.word();
        word.compare_exchange(ASLEEP, CALLED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Wakes the sleeper, if there is one, also if another thread has undertaken that; returns whether it
    /// was asleep. The caller must publish the work first.
    #[inline]
    pub fn unpark(&self) -> bool {
        self.fence.light();
        if self.word.word().load(Ordering::Relaxed) == AWAKE {
            return false;
        }
        self.wake()
    }

    /// Wakes the sleeper, if there is one; returns whether it was asleep.
    #[cold]
    pub fn wake(&self) -> bool {
        let slept = self.word.word().swap(AWAKE, Ordering::AcqRel) != AWAKE;
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

/// Bounds the sleep to 1 ms if the fence did not order the mark and the check: a waker may have
/// missed the sleeper.
fn bounded(timeout: Option<Duration>, ordered: bool) -> Option<Duration> {
    const UNFENCED_SLEEP: Duration = Duration::from_millis(1);
    if ordered {
        timeout
    } else {
        Some(timeout.map_or(UNFENCED_SLEEP, |timeout| timeout.min(UNFENCED_SLEEP)))
    }
}

/// A futex on which any number of threads sleep until there is work.
#[derive(Debug)]
pub struct WaitQueue {
    sleepers: AtomicU32,
    epoch: Futex,
    fence: AsymmetricFence,
}

impl WaitQueue {
    /// Creates a queue without sleepers.
    pub fn new() -> Self {
        Self { sleepers: AtomicU32::new(0), epoch: Futex::new(0), fence: AsymmetricFence::new() }
    }

    /// Sleeps until woken or the timeout expires, unless `ready` returns true. May return early, so
    /// callers check again.
    pub fn park(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let timeout = bounded(timeout, self.fence.heavy());
        let epoch = self.epoch.word().load(Ordering::Acquire);
        if !ready() {
            self.epoch.wait(epoch, timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes all sleepers, if there are any. The caller must publish the work first.
    #[inline]
    pub fn unpark(&self) {
        self.fence.light();
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.epoch.word().fetch_add(1, Ordering::AcqRel);
            self.epoch.wake_all();
        }
    }
}

impl Default for WaitQueue {
    fn default() -> Self {
        Self::new()
    }
}
