//! A work queue as the driver sees it: the same driver serves queues of VFIO and of the kernel.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::portal::PortalWords;

use crate::contract::PinnedLocation;
use crate::pci::CoherentMemory;

/// The limits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueLimits {
    /// The number of descriptors that the queue holds.
    pub(super) size: usize,
    /// The maximum length of a descriptor in bytes.
    pub(super) max_bytes: u64,
    /// The maximum number of descriptors of a batch; 1 if the queue takes no batches.
    pub(super) max_batch: usize,
    /// The supported opcodes, a bit for each.
    pub(super) opcodes: u64,
    /// Whether targets can be written to the caches.
    pub(super) cache_control: bool,
}

impl QueueLimits {
    /// Whether the device supports an opcode.
    pub(super) const fn supports(&self, opcode: u8) -> bool {
        self.opcodes & (1 << opcode) != 0
    }
}

/// The reason why a queue executes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueStop {
    /// The device was reset for another of its queues: nothing is in flight.
    WasReset,
    /// An error; what is in flight may still run until the queue is restarted.
    Failed(&'static str),
}

impl QueueStop {
    /// The reason in words.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::WasReset => "the device was reset",
            Self::Failed(reason) => reason,
        }
    }
}

/// The result of making a page resident that the device could not access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultResolution {
    /// The page is resident now.
    Resolved,
    /// The memory is not mapped, or not writable.
    BadMemory,
    /// The queue cannot resolve faults: its memory is pinned, and a fault is an error.
    Unsupported,
}

/// What a check found of a queue that has not stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueCheck {
    /// It executes descriptors.
    Running,
    /// A command for another queue of its device runs: nothing is known.
    Unknown,
}

/// The queue.
///
/// # Safety
/// After [`WorkQueue::restart`], and after the drop, the device accesses nothing for a descriptor
/// that was submitted before.
pub(super) unsafe trait WorkQueue: Send + Debug {
    /// The limits.
    fn limits(&self) -> QueueLimits;

    /// Allocates memory that the queue's driver shares with the device.
    fn allocate(&self, bytes: usize) -> io::Result<CoherentMemory>;

    /// The device's address of memory, if all of it is contiguous for the device.
    fn address(&self, pinned: Option<PinnedLocation<'_>>, address: u64, length: u64)
    -> Option<u64>;

    /// Submits descriptors; returns how many the queue accepted, none if it has no space.
    ///
    /// # Safety
    /// The descriptors must name only memory that the device may access until they end, and at most
    /// [`QueueLimits::size`] may be in flight.
    unsafe fn submit(&mut self, descriptors: &[PortalWords]) -> Result<usize, QueueStop>;

    /// Checks whether the queue still runs. Called at intervals while nothing ends.
    fn check(&mut self) -> Result<QueueCheck, QueueStop>;

    /// Aborts everything in flight and makes the queue ready again; returns whether it is. If not,
    /// it is not used any more.
    fn restart(&mut self) -> bool;

    /// Makes a page resident that the device could not access, and the pages of the next `bytes`
    /// if possible.
    fn resolve_fault(&self, address: u64, is_write: bool, bytes: u64) -> FaultResolution;

    /// The first address of a range that the process cannot access, before the processor does what
    /// the device did not. `None` for memory that is pinned.
    fn find_bad_memory(&self, address: u64, is_write: bool, bytes: u64) -> Option<u64>;

    /// The interrupt of the queue, and its handle in descriptors; `None` if it has none.
    fn interrupt(&self) -> Option<(u16, Arc<EventFd>)> {
        None
    }

    /// How long a driver waits; see [`DmaDevice::patience`].
    ///
    /// [`DmaDevice::patience`]: memferry_sys::device::DmaDevice::patience
    fn patience(&self) -> Duration;
}
