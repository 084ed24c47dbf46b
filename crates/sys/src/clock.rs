//! Clocks, in nanoseconds.

use std::ops::Sub;
use std::time::Duration;

/// Sets the timer slack of the calling thread to 1 us. With the default, a sleep ends up to 50 us
/// late.
pub fn minimize_timer_slack() {
    // SAFETY: the call sets a property of the calling thread and takes no pointer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
}

/// Nanoseconds since an unspecified start.
#[cfg(not(loom))]
pub fn now_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::Monotonic)
}

/// A model has no time.
#[cfg(loom)]
pub fn now_ns() -> u64 {
    1
}

/// Nanoseconds since an unspecified start, in steps of a few milliseconds. For frequent calls that
/// cannot afford the exact time. Not comparable with [`now_ns`].
#[cfg(not(loom))]
pub fn coarse_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::MonotonicCoarse)
}

/// A model has no time.
#[cfg(loom)]
pub fn coarse_ns() -> u64 {
    1
}

/// A point in time by [`coarse_ns`], for the timeouts of code that polls. Durations are wrong by a step
/// of some milliseconds in either direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CoarseInstant(u64);

impl CoarseInstant {
    /// The time now.
    #[inline]
    pub fn now() -> Self {
        Self(coarse_ns())
    }

    /// The time since this point.
    #[inline]
    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }
}

impl Sub for CoarseInstant {
    type Output = Duration;

    #[inline]
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// CPU time that the calling thread has used, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::ThreadCPUTime)
}

/// CPU time that the process has used, in nanoseconds.
pub fn process_cpu_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
