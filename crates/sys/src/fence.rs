//! Fences of unequal cost: a light end and a heavy end together order as two full fences. See
//! [`Asymmetric`].
//!
//! A submitter publishes a descriptor and then asks whether the channel sleeps; a channel says
//! that it sleeps and then looks for descriptors. Without a full fence on both sides each may miss
//! the other. Submitting happens millions of times a second and falling asleep rarely, so the cost
//! is moved: where the kernel offers `membarrier`, the sleeper interrupts the other processors and
//! the submitter needs no instruction at all. Elsewhere both sides pay for a full fence.

#[cfg(not(loom))]
use crate::fault::{Call, call};
use crate::sync::atomic::{Ordering, fence};

#[cfg(not(loom))]
fn expedited() -> bool {
    use rustix::thread::{MembarrierCommand, membarrier};
    use std::sync::OnceLock;
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let register = || membarrier(MembarrierCommand::RegisterPrivateExpedited);
    *REGISTERED.get_or_init(|| call(Call::Membarrier, register).is_ok())
}

/// The two ends of an asymmetric fence, decided once per process.
#[derive(Debug, Clone, Copy)]
pub struct Asymmetric {
    #[cfg(not(loom))]
    expedited: bool,
}

impl Asymmetric {
    /// Registers with the kernel the first time, and remembers whether that worked.
    pub fn new() -> Self {
        Self {
            #[cfg(not(loom))]
            expedited: expedited(),
        }
    }

    /// The end that runs often.
    #[inline]
    pub fn light(self) {
        #[cfg(not(loom))]
        if self.expedited {
            return std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// The end that runs rarely. Returns `false` if the order could not be had, which happens only
    /// when a system-call filter was installed since the start: then the other side may be missed,
    /// and the caller must look again soon instead of relying on being woken.
    #[must_use]
    pub fn heavy(self) -> bool {
        #[cfg(not(loom))]
        if self.expedited {
            use rustix::thread::{MembarrierCommand, membarrier};
            let order = || membarrier(MembarrierCommand::PrivateExpedited);
            return call(Call::Membarrier, order).is_ok();
        }
        fence(Ordering::SeqCst);
        true
    }
}

impl Default for Asymmetric {
    fn default() -> Self {
        Self::new()
    }
}
