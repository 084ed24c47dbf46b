//! Queues of the kernel's `idxd` driver: the device uses the addresses of this process, and page
//! faults are resolved by touching the page.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::idxd::sysfs::{IdxdDevice, IdxdQueue};
use memferry_sys::idxd::{IdxdFile, IdxdFiles, code};
use memferry_sys::pages::page_bytes;
use memferry_sys::portal::{PORTAL_LINES, PORTAL_STRIDE, Portal, PortalWords};
use memferry_sys::residency;

use super::descriptor::opcode;
use super::work_queue::{FaultResolution, QueueCheck, QueueLimits, QueueStop, WorkQueue};
use crate::contract::PinnedLocation;
use crate::pci::{ChannelSlot, CoherentMemory};

/// The maximum length of a descriptor in bytes: longer ones are not faster, and would exceed the
/// stall timeout of a queue.
const MAX_BYTES: u64 = 2 << 20;
/// The maximum length of a batch.
const MAX_BATCH: u32 = 64;
/// The maximum number of bytes that are made resident after a page fault.
pub(super) const MAX_TOUCH_BYTES: usize = 256 << 10;
/// The opcodes of every device, for kernels that do not print them.
const BASIC_OPCODES: u64 = 1 << opcode::NOOP
    | 1 << opcode::BATCH
    | 1 << opcode::DRAIN
    | 1 << opcode::MEMMOVE
    | 1 << opcode::FILL
    | 1 << opcode::COMPARE;
/// The major version from which on the kernel takes batches through `write`.
const BATCH_WRITE_VERSION: u32 = 0x200;

/// A queue that an engine opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdxdQueueChoice {
    path: PathBuf,
    is_dedicated: bool,
    limits: QueueLimits,
    /// Whether batches can be submitted through `write` too.
    writes_batches: bool,
}

/// More entries than any device has: sysfs may say anything.
const MAX_QUEUE_SIZE: u32 = 1024;

impl IdxdQueueChoice {
    /// Describes a queue by what sysfs says of it; `None` if programs cannot use it.
    pub fn of(device: &IdxdDevice, queue: &IdxdQueue) -> Option<Self> {
        let is_dedicated = queue.is_dedicated?;
        let max_bytes = queue.max_transfer_bytes.min(MAX_BYTES);
        // Without address spaces the device would take virtual addresses for those of the bus.
        if queue.size == 0 || max_bytes == 0 || !device.has_address_spaces {
            return None;
        }
        let opcodes = device.opcodes.unwrap_or(BASIC_OPCODES);
        let has_batches = opcodes & (1 << opcode::BATCH) != 0;
        let limits = QueueLimits {
            size: queue.size.min(MAX_QUEUE_SIZE) as usize,
            max_bytes,
            max_batch: if has_batches { queue.max_batch.clamp(1, MAX_BATCH) as usize } else { 1 },
            opcodes,
            // Every device has it; the flag is a hint.
            cache_control: true,
        };
        let writes_batches = device.version.is_some_and(|version| version >= BATCH_WRITE_VERSION);
        Some(Self { path: queue.path.clone(), is_dedicated, limits, writes_batches })
    }

    /// The file of the queue.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn limits(&self) -> QueueLimits {
        self.limits
    }
}

/// How descriptors get to an open queue, which is closed when this is dropped.
#[derive(Debug)]
enum IdxdWay {
    /// Through the portal. Its mapping keeps the queue open, and no child inherits it; so the file
    /// is closed, which a child that is just being forked would keep open.
    Portal(Arc<Portal>),
    /// Through `write`.
    File(Box<dyn IdxdFile>),
}

/// An open queue.
#[derive(Debug)]
pub(super) struct IdxdWorkQueue {
    /// `None` after the queue has failed and could not be opened again.
    way: Option<IdxdWay>,
    files: Arc<dyn IdxdFiles>,
    choice: IdxdQueueChoice,
    is_dedicated: bool,
    limits: QueueLimits,
    /// The number of writes to the portal since it was mapped: its lines are used in turn.
    stores: usize,
    _slot: ChannelSlot,
}

/// Opens a queue. Where the kernel does not permit the portal, descriptors are submitted through
/// `write`.
pub(super) fn open(
    files: &Arc<dyn IdxdFiles>,
    choice: &IdxdQueueChoice,
    slot: ChannelSlot,
) -> io::Result<IdxdWorkQueue> {
    let mut queue = IdxdWorkQueue {
        way: None,
        files: files.clone(),
        choice: choice.clone(),
        is_dedicated: choice.is_dedicated,
        limits: choice.limits,
        stores: 0,
        _slot: slot,
    };
    queue.open_file()?;
    if !queue.has_portal() && !choice.writes_batches {
        queue.limits.max_batch = 1;
    }
    Ok(queue)
}

impl IdxdWorkQueue {
    fn open_file(&mut self) -> io::Result<()> {
        let mut file = self.files.open(&self.choice.path).map_err(explain_open)?;
        self.stores = 0;
        self.way = Some(match file.map_portal(self.is_dedicated) {
            Ok(portal) => IdxdWay::Portal(portal),
            Err(error) => {
                tracing::debug!(%error, "descriptors are submitted through write");
                IdxdWay::File(file)
            }
        });
        Ok(())
    }

    fn has_portal(&self) -> bool {
        matches!(self.way, Some(IdxdWay::Portal(_)))
    }
}

impl IdxdQueueChoice {
    /// The queues that can be opened now. A dedicated queue of another program, for example, is left
    /// out, and the reason is logged.
    pub fn keep_free(files: &dyn IdxdFiles, queues: Vec<Self>) -> Vec<Self> {
        let is_free = |queue: &Self| match files.open(&queue.path).map_err(explain_open) {
            Ok(_) => true,
            Err(error) => {
                tracing::info!(queue = %queue.path.display(), %error, "a work queue is not used");
                false
            }
        };
        queues.into_iter().filter(is_free).collect()
    }
}

fn explain_open(error: io::Error) -> io::Error {
    let fix = match error.raw_os_error() {
        Some(code::EBUSY) => "another program has this dedicated queue: use a shared one",
        Some(code::EACCES) => "this user may not open it: change the owner or mode of the file",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}: {fix}"))
}

const REFUSED: &str = "the kernel refused a descriptor";
const CLOSED: &str = "the work queue is closed";

// SAFETY: a queue that is restarted or dropped is closed, and the kernel waits for its descriptors
// before the close returns. The device uses the page tables of the process, so it accesses what the
// process could access.
unsafe impl WorkQueue for IdxdWorkQueue {
    fn limits(&self) -> QueueLimits {
        self.limits
    }

    fn allocate(&self, bytes: usize) -> io::Result<CoherentMemory> {
        CoherentMemory::shared_virtual(bytes)
    }

    fn address(
        &self,
        _pinned: Option<PinnedLocation<'_>>,
        address: u64,
        length: u64,
    ) -> Option<u64> {
        address.checked_add(length).map(|_| address)
    }

    unsafe fn submit(&mut self, descriptors: &[PortalWords]) -> Result<usize, QueueStop> {
        let portal = match &mut self.way {
            Some(IdxdWay::Portal(portal)) => portal,
            Some(IdxdWay::File(file)) => {
                // SAFETY: the caller's guarantee.
                return match unsafe { file.write(descriptors) } {
                    Ok(accepted) => Ok(accepted.min(descriptors.len())),
                    Err(error) if error.raw_os_error() == Some(code::EAGAIN) => Ok(0),
                    Err(error) => {
                        tracing::debug!(%error, REFUSED);
                        Err(QueueStop::Failed(REFUSED))
                    }
                };
            }
            None => return Err(QueueStop::Failed(CLOSED)),
        };
        for (count, descriptor) in descriptors.iter().enumerate() {
            let line = self.stores % PORTAL_LINES * PORTAL_STRIDE;
            self.stores = self.stores.wrapping_add(1);
            // SAFETY: the caller's guarantee. A dedicated queue has no other opener.
            let is_accepted = unsafe {
                if self.is_dedicated {
                    portal.store(line, descriptor);
                    true
                } else {
                    portal.enqueue(line, descriptor)
                }
            };
            if !is_accepted {
                return Ok(count);
            }
        }
        Ok(descriptors.len())
    }

    fn check(&mut self) -> Result<QueueCheck, QueueStop> {
        match self.way {
            Some(_) => Ok(QueueCheck::Running),
            None => Err(QueueStop::Failed(CLOSED)),
        }
    }

    /// Closes the queue, because a program has no other way to abort its descriptors, and opens it
    /// again.
    fn restart(&mut self) -> bool {
        self.way = None;
        let had_batches = self.limits.max_batch > 1;
        if let Err(error) = self.open_file() {
            tracing::warn!(queue = %self.choice.path.display(), %error, "a work queue is lost");
        }
        // The driver has batches in its plans that only a portal takes.
        self.has_portal() || self.way.is_some() && (!had_batches || self.choice.writes_batches)
    }

    fn resolve_fault(&self, address: u64, is_write: bool, bytes: u64) -> FaultResolution {
        let page = address as usize & !(page_bytes() - 1);
        let touch = if is_write { residency::populate_write } else { residency::populate_read };
        let ahead = (bytes as usize).min(MAX_TOUCH_BYTES).next_multiple_of(page_bytes());
        // The later pages may not exist: only the first counts.
        match touch(page, ahead).or_else(|_| touch(page, page_bytes())) {
            Ok(()) => FaultResolution::Resolved,
            // Memory of a device, or of the kernel, which only the processor can access. Other errors mean
            // that nobody can: the processor would get a signal behind the end of a file.
            Err(error)
                if error.kind() == std::io::ErrorKind::InvalidInput
                    && residency::permits(page, is_write) =>
            {
                FaultResolution::Unsupported
            }
            Err(_) if residency::can_populate() => FaultResolution::BadMemory,
            Err(_) => FaultResolution::Unsupported,
        }
    }
    fn find_bad_memory(&self, address: u64, is_write: bool, bytes: u64) -> Option<u64> {
        let page = page_bytes();
        let (first, end) = (address as usize & !(page - 1), (address + bytes) as usize);
        let touch = if is_write { residency::populate_write } else { residency::populate_read };
        if bytes == 0 || touch(first, (end - first).next_multiple_of(page)).is_ok() {
            return None;
        }
        let is_bad = |at: &usize| {
            let resolution = self.resolve_fault(*at as u64, is_write, page as u64);
            resolution == FaultResolution::BadMemory
        };
        let bad = (first..end).step_by(page).find(is_bad)?;
        Some((bad as u64).max(address))
    }

    fn patience(&self) -> Duration {
        self.files.patience()
    }
}
