//! Asymmetric fences: a cheap end and an expensive end that together order like two full fences.
//! See [`AsymmetricFence`].
//!
//! A submitter publishes a descriptor and then reads whether the channel's thread sleeps; the
//! thread publishes that it sleeps and then polls for descriptors. Without a full fence between the
//! two steps on both sides, each may miss the other. Submissions are far more frequent than sleeps,
//! so the cost is shifted: where the kernel offers `membarrier`, the thread that goes to sleep
//! interrupts the other cores, and the submitter needs only a compiler fence. Elsewhere both sides
//! execute a full fence.

#[cfg(not(loom))]
use crate::fault::{Call, call};
#[cfg(not(loom))]
use crate::fork::ForkSafe;
use crate::sync::atomic::{Ordering, fence};

#[cfg(not(loom))]
fn expedited() -> bool {
    use rustix::thread::{MembarrierCommand, membarrier};
    static REGISTERED: ForkSafe<bool> = ForkSafe::new();
    let register = || membarrier(MembarrierCommand::RegisterPrivateExpedited);
    *REGISTERED.get_or_init(|| call(Call::Membarrier, register).is_ok())
}

/// The two ends of an asymmetric fence. The method is chosen once per process.
#[derive(Debug, Clone, Copy)]
pub struct AsymmetricFence {
    #[cfg(not(loom))]
    expedited: bool,
}

impl AsymmetricFence {
    /// Registers with the kernel on the first call, and remembers whether that succeeded.
    pub fn new() -> Self {
        Self {
            #[cfg(not(loom))]
            expedited: expedited(),
        }
    }

    /// Returns whether the light end is cheaper than a full fence.
    pub fn is_asymmetric(self) -> bool {
        #[cfg(not(loom))]
        return self.expedited;
        #[cfg(loom)]
        true
    }

    /// The cheap end, for the frequent side.
    #[inline]
    pub fn light(self) {
        #[cfg(not(loom))]
        if self.expedited {
            return std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// The expensive end, for the rare side. Returns `false` if the kernel refuses the barrier,
    /// which happens only if a system-call filter was installed after the registration. Then the
    /// other side may be missed, and the caller must poll again instead of relying on a wakeup.
    #[must_use]
    pub fn heavy(self) -> bool {
        #[cfg(not(loom))]
        if self.expedited {
            use rustix::thread::{MembarrierCommand, membarrier};
            let barrier = || membarrier(MembarrierCommand::PrivateExpedited);
            return call(Call::Membarrier, barrier).is_ok();
        }
        fence(Ordering::SeqCst);
        true
    }
}

impl AsymmetricFence {
    /// As [`AsymmetricFence::heavy`], for callers that cannot poll again: where the kernel refuses the
    /// barrier, this thread runs on every core once, which takes milliseconds.
    pub fn heavy_always(self) {
        if !self.heavy() {
            barrier_by_migration();
        }
    }
}

impl Default for AsymmetricFence {
    fn default() -> Self {
        Self::new()
    }
}

/// A barrier on all cores that run this process, for a process that was forbidden `membarrier` after
/// it was registered: this thread runs on each core once, so that any other thread there was
/// switched out.
#[cfg(not(loom))]
#[cold]
fn barrier_by_migration() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(own) = sched_getaffinity(None) else { std::process::abort() };
    let mut visited = 0;
    for core in 0..CpuSet::MAX_CPU {
        let mut only = CpuSet::new();
        only.set(core);
        // Cores that this process may not use are refused; no thread of it runs there.
        visited += usize::from(sched_setaffinity(None, &only).is_ok());
    }
    // Without any barrier, the other side may be missed, and its memory freed while it is in use.
    if visited == 0 || sched_setaffinity(None, &own).is_err() {
        std::process::abort();
    }
}

#[cfg(loom)]
fn barrier_by_migration() {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_membarrier_has_another_barrier_and_keeps_its_cores() {
        let cores = crate::affinity::allowed_cores();
        barrier_by_migration();
        assert_eq!(crate::affinity::allowed_cores(), cores);
    }
}
