//! A copy between memory of this process and memory of a peer, made without the port's lock.
//!
//! A step of a message describes the next copy. The thread that made the step releases the lock,
//! runs the copy, takes the lock again and makes the next step. A system call that accesses memory
//! of a peer does not return before the pages are resident, and no signal interrupts it: the pages
//! may lie in a file of a server that has failed, or behind a userfaultfd that no thread serves. So
//! no thread makes the call with the lock held. If a peer reports that its memory is not resident,
//! the call is not made by the application's thread either, but by a thread of its own.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Protection;

use super::pinning;
use crate::connection::{CopyError, PeerBuffer};
use crate::plan::BufferEnds;
use crate::port::Port;
use crate::ring::claims::SenderProgress;
use crate::ring::layout::ConnectionMemory;
use crate::segments::Segments;

/// The number of bytes that are copied between two checks for cancellation.
const CANCEL_CHECK_BYTES: u64 = 1 << 20;

/// The memory of a message on both sides, from the view of the side that copies.
#[derive(Debug)]
pub(crate) struct MessageBuffers {
    pub(crate) peer: PeerBuffer,
    local: Segments,
}

// SAFETY: the fields are addresses, and the mappings that keep those of the peer valid. The local
// memory belongs to an operation, and the code that copies guarantees that it is valid.
unsafe impl Send for MessageBuffers {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for MessageBuffers {}

impl MessageBuffers {
    pub(crate) fn new(peer: PeerBuffer, local: &Segments) -> Arc<Self> {
        Arc::new(Self { peer, local: local.clone() })
    }

    /// Returns whether the peer's memory is mapped in this process. A copy then does not depend on
    /// the peer, so it may run with the lock held.
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.peer, PeerBuffer::Mapped { .. })
    }

    /// Copies a part.
    ///
    /// # Safety
    /// This side's memory must be valid, for writes if the peer's is read.
    pub(super) unsafe fn copy(&self, spec: &CopySpec) -> Result<(), CopyError> {
        let CopySpec { range, access, streaming, prefault, .. } = spec;
        let (peer, local) = (&self.peer, self.local.as_slice());
        // SAFETY: the caller guarantees it.
        unsafe { pinning::copy(peer, local, range.clone(), *access, *streaming, *prefault) }
    }
}

/// The sender's report of a chunk that it has copied or could not copy. It is published directly
/// after the copy: the connection may be closed before a thread takes the lock, and the receiver
/// waits.
#[derive(Debug)]
pub(super) struct ChunkReport {
    pub(super) memory: ConnectionMemory,
    pub(super) claim_slot: u16,
    pub(super) generation: u16,
    pub(super) chunk: u64,
    /// The number of chunks that were copied before.
    pub(super) done: u64,
}

impl ChunkReport {
    fn publish(&self, is_copied: bool) {
        let slot = self.memory.claims(false, self.claim_slot.into());
        slot.publish(self.generation, SenderProgress::after(self.done, self.chunk, is_copied));
    }
}

/// The description of a copy of a part of a message.
#[derive(Debug)]
pub(super) struct CopySpec {
    pub(super) range: Range<u64>,
    pub(super) access: Protection,
    pub(super) streaming: Option<Streaming>,
    /// The ends that are prefaulted first.
    pub(super) prefault: BufferEnds,
    pub(super) report: Option<ChunkReport>,
}

/// A copy, which may be in flight.
#[derive(Debug)]
pub(crate) struct ActiveCopy {
    buffers: Arc<MessageBuffers>,
    spec: CopySpec,
    is_cancelled: AtomicBool,
    outcome: OnceLock<Result<(), CopyError>>,
}

/// The status of a message's last copy.
pub(super) enum CopyStatus {
    /// No copy was started.
    NotStarted,
    InFlight,
    Done(Result<(), CopyError>),
}

impl ActiveCopy {
    /// # Safety
    /// This side's memory must be valid, for writes if the peer's is read, until the copy is
    /// complete or dropped.
    pub(super) unsafe fn new(buffers: &Arc<MessageBuffers>, spec: CopySpec) -> Arc<Self> {
        let (is_cancelled, outcome) = (AtomicBool::new(false), OnceLock::new());
        Arc::new(Self { buffers: buffers.clone(), spec, is_cancelled, outcome })
    }

    /// Runs the copy. Called once, by a thread that holds no lock.
    pub(crate) fn run(&self) {
        // A panic must not prevent the caller from taking the lock again.
        let copied = catch_unwind(AssertUnwindSafe(|| self.copy()));
        let copied = copied.unwrap_or(Err(CopyError::Refused(libc::EFAULT)));
        if let Some(report) = &self.spec.report {
            report.publish(copied.is_ok());
        }
        let _ = self.outcome.set(copied);
    }

    fn copy(&self) -> Result<(), CopyError> {
        let CopySpec { range, access, streaming, prefault, .. } = &self.spec;
        let MessageBuffers { peer, local } = &*self.buffers;
        let mut at = range.start;
        while at < range.end {
            // The bytes that are not copied are not reported as copied.
            if self.is_cancelled.load(Ordering::Relaxed) {
                return Err(CopyError::Refused(libc::ECANCELED));
            }
            let slice = at..range.end.min(at + CANCEL_CHECK_BYTES);
            at = slice.end;
            // SAFETY: the creator of this copy guarantees that the local memory is valid until the
            // outcome is set.
            unsafe {
                pinning::copy(peer, local.as_slice(), slice, *access, *streaming, *prefault)
            }?;
        }
        Ok(())
    }

    /// Runs the copy on a new thread. Returns `false` if none can be started.
    pub(crate) fn run_on_thread(self: &Arc<Self>, port: Weak<Port>) -> bool {
        let copy = self.clone();
        let run = move || {
            copy.run();
            // Progress completes the message for its waiters. This thread runs no copies of other
            // messages, which may block too.
            if let Some(port) = port.upgrade() {
                port.lock().progress_steps();
            }
        };
        memferry_sys::thread::spawn("memferry-slow", run).is_ok()
    }

    /// Returns whether a thread may still access the memory of this side.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.outcome.get().is_none()
    }

    /// Cancels the rest. The copy completes with the current slice.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    fn length(&self) -> u64 {
        self.spec.range.end - self.spec.range.start
    }

    /// Takes the outcome of a message's last copy, and adds its bytes to `done`.
    pub(super) fn poll_status(last: &mut Option<Arc<Self>>, done: &mut u64) -> CopyStatus {
        let Some(copy) = last else { return CopyStatus::NotStarted };
        let Some(outcome) = copy.outcome.get().copied() else { return CopyStatus::InFlight };
        if outcome.is_ok() {
            *done += copy.length();
        }
        *last = None;
        CopyStatus::Done(outcome)
    }
}
