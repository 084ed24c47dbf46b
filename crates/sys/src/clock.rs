//! Time in nanoseconds.

#[cfg(not(loom))]
use std::{sync::OnceLock, time::Instant};

/// Lets short sleeps of the calling thread end when they should, and not up to 50 microseconds later.
pub fn sharpen_timers() {
    // SAFETY: sets a number of the calling thread; a kernel that refuses changes nothing.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
}

/// Nanoseconds since the first call in this process.
#[cfg(not(loom))]
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Time stands still in a model.
#[cfg(loom)]
pub fn now_ns() -> u64 {
    1
}

/// Nanoseconds since some moment in the past, in steps of a few milliseconds: for what happens so
/// often that the exact time would cost more than it is worth. Not to be compared with [`now_ns`].
pub fn coarse_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Processor time used so far by the calling thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Processor time used so far by the whole process, in nanoseconds.
pub fn process_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
