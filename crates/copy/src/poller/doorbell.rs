//! The doorbell that the polled channels share with their poll thread.
//!
//! One word has a count of rings and how deep the poll thread sleeps. A ring that is not urgent wakes
//! only a thread that would not look by itself, and an awake one is never called. So submitting makes no
//! system call while the poll thread is awake or dozes.

use std::sync::Arc;
use std::time::Duration;

use memferry_sys::Futex;
use memferry_sys::sync::atomic::{AtomicBool, Ordering};

/// The states of the poll thread, in the lowest bits of the word.
const DEPTH: u32 = 3;
/// It sleeps for a while: only an urgent ring wakes it.
const DOZING: u32 = 1;
/// It sleeps until it is woken.
const ASLEEP: u32 = 2;
/// One ring.
const RING: u32 = 4;

/// The doorbell.
#[derive(Debug)]
pub(crate) struct PollDoorbell {
    word: Futex,
    /// A transfer is awaited by somebody who does not poll.
    pub(super) is_urgent: AtomicBool,
    /// Set when the poll thread must drain the channels and exit; submits are rejected from then
    /// on.
    pub(super) stopping: AtomicBool,
}

impl PollDoorbell {
    pub(crate) fn new() -> Arc<Self> {
        let (is_urgent, stopping) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { word: Futex::new(0), is_urgent, stopping })
    }

    /// Tells the poll thread of a submit; it looks at once if that is urgent.
    #[inline]
    pub(super) fn ring(&self, is_urgent: bool) {
        if is_urgent {
            self.is_urgent.store(true, Ordering::Release);
        }
        let before = self.word.word().fetch_add(RING, Ordering::AcqRel) & DEPTH;
        if before == ASLEEP || is_urgent && before == DOZING {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Whoever clears the depth wakes the thread; another ring finds it awake.
        if self.word.word().fetch_and(!DEPTH, Ordering::AcqRel) & DEPTH != 0 {
            self.word.wake_all();
        }
    }

    /// The word, as the awake poll thread reads it before it looks.
    pub(super) fn seen(&self) -> u32 {
        self.word.word().load(Ordering::Acquire)
    }

    /// Sleeps until the next ring, unless there was one since `seen`.
    pub(super) fn sleep(&self, seen: u32) {
        let word = self.word.word();
        let asleep = seen | ASLEEP;
        if word.compare_exchange(seen, asleep, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.word.wait(asleep, None);
            word.fetch_and(!DEPTH, Ordering::AcqRel);
        }
    }

    /// Sleeps for a while, or until an urgent ring.
    pub(super) fn doze(&self, time: Duration) {
        // A model has no time: the thread continues with its polls.
        if cfg!(loom) {
            return memferry_sys::sync::sleep(time);
        }
        let dozing = self.word.word().fetch_or(DOZING, Ordering::AcqRel) | DOZING;
        // An urgent ring sets its flag before it changes the word.
        if !self.is_urgent.load(Ordering::Acquire) && !self.stopping.load(Ordering::Acquire) {
            self.word.wait(dozing, Some(time));
        }
        self.word.word().fetch_and(!DEPTH, Ordering::AcqRel);
    }

    /// Sleeps for a while between two polls of an urgent transfer.
    pub(super) fn nap(&self, time: Duration) {
        memferry_sys::sync::sleep(time);
    }
}
