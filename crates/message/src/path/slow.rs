//! A copy from memory of a peer that may never come: its pages lie in a file of a dead server, or
//! behind a userfaultfd that nobody answers. The system call that reads them does not return before
//! they are there, and no signal ends it. So a thread of its own makes it, and nobody waits for the
//! thread: not with a lock, and not in a call that does not wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use memferry_sys::shared_memory::Access;

use crate::connection::{CopyError, View};
use crate::pieces::Pieces;
use crate::port::Port;

/// As much is copied before it is looked whether anybody still wants the rest.
const SLICE_BYTES: u64 = 1 << 20;

/// A message whose sender says that its memory may not be there.
#[derive(Debug)]
pub(crate) enum Slow {
    /// Nobody copies it yet.
    Waiting,
    Copying(Arc<SlowCopy>),
}

/// A copy by a thread of its own.
#[derive(Debug)]
pub(crate) struct SlowCopy {
    source: View,
    target: Pieces,
    length: u64,
    is_cancelled: AtomicBool,
    outcome: OnceLock<Result<(), CopyError>>,
}

// SAFETY: the pieces belong to an operation that is not over before the copy is, wherever it runs; the
// source is addresses in another process.
unsafe impl Send for SlowCopy {}
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for SlowCopy {}

impl SlowCopy {
    /// Begins to copy the front of a message. `None` if no thread can be had now, or if the memory is
    /// mapped here: then it is there.
    ///
    /// # Safety
    /// The target must be valid for writes of `length` bytes until the copy is over.
    pub(crate) unsafe fn start(
        source: &View,
        target: &Pieces,
        length: u64,
        port: Weak<Port>,
    ) -> Option<Arc<Self>> {
        let View::Cross { pid, stretches } = source else { return None };
        let source = View::Cross { pid: *pid, stretches: stretches.clone() };
        let target = target.clone();
        let is_cancelled = AtomicBool::new(false);
        let copy =
            Arc::new(Self { source, target, length, is_cancelled, outcome: OnceLock::new() });
        let copying = copy.clone();
        let run = move || {
            let outcome = copying.run();
            let _ = copying.outcome.set(outcome);
            // Whoever waits for the message learns of it.
            if let Some(port) = port.upgrade() {
                port.enter().progress();
            }
        };
        std::thread::Builder::new().name("memferry-slow".into()).spawn(run).ok()?;
        Some(copy)
    }

    fn run(&self) -> Result<(), CopyError> {
        let mut done = 0;
        while done < self.length && !self.is_cancelled.load(Ordering::Relaxed) {
            let length = (self.length - done).min(SLICE_BYTES);
            // SAFETY: whoever started this vouches for the target until the outcome is set.
            unsafe { self.source.copy(self.target.as_slice(), done, length, Access::Read, None) }?;
            done += length;
        }
        Ok(())
    }

    /// How it ended, if it is over.
    pub(crate) fn outcome(&self) -> Option<Result<(), CopyError>> {
        self.outcome.get().copied()
    }

    /// Nobody wants the rest. It is over when the slice under way is.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}
