//! Backoff of threads that poll for completions: on cores that processes share, a thread that only polls leaves its
//! core to others.

use memferry_sys::clock;
use rustix::time::{ClockId, clock_gettime};

/// A thread that polls again within this much of its own CPU time, in ns, has done nothing else meanwhile.
const BUSY_POLL_NS: u64 = 20_000;
/// A thread that polls only after this much time, in ns, sleeps elsewhere: it takes no core from others.
const RARE_POLL_NS: u64 = 100_000;
/// Consecutive empty polls of such a thread before it yields the core, if processes share cores.
const YIELD_AFTER_EMPTY_POLLS: u32 = 4;
/// Polls for completions between two liveness checks.
const POLLS_PER_PEER_CHECK: u32 = 16;

/// Backoff of a thread that polls for completions.
#[derive(Debug, Default)]
pub(super) struct PollBackoff {
    polls: u32,
    pub(super) empty_polls: u32,
    /// The thread's CPU time at the last empty poll, and the time of the first of consecutive ones.
    thread_ns: u64,
    since_ns: u64,
}

/// What a thread does after an empty poll, if processes share cores.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BackoffStep {
    /// Return: the thread has other work.
    Continue,
    /// Yield the core.
    Yield,
    /// Sleep until there is an event.
    Sleep,
}

impl PollBackoff {
    /// Counts a poll. Returns whether it is time for a liveness check.
    #[inline]
    pub(super) fn count_poll(&mut self) -> bool {
        self.polls = (self.polls + 1) % POLLS_PER_PEER_CHECK;
        self.polls == 0
    }

    /// Records an empty poll. The last one returned at `returned_ns`.
    pub(super) fn on_empty_poll(&mut self, spin_ns: u64, returned_ns: u64) -> BackoffStep {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let own_ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        let now = clock::now_ns();
        let is_busy_asking = own_ns.wrapping_sub(self.thread_ns) < BUSY_POLL_NS
            && now.saturating_sub(returned_ns) < RARE_POLL_NS;
        self.thread_ns = own_ns;
        if !is_busy_asking || self.empty_polls == 0 {
            (self.empty_polls, self.since_ns) = (1, now);
            return BackoffStep::Continue;
        }
        self.empty_polls = self.empty_polls.saturating_add(1);
        match self.empty_polls {
            _ if now - self.since_ns > spin_ns => BackoffStep::Sleep,
            ..YIELD_AFTER_EMPTY_POLLS => BackoffStep::Continue,
            _ => BackoffStep::Yield,
        }
    }
}
