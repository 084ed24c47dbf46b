//! Shareable memory: allocations that peers map once, so that large messages from and to them need
//! no system call.
//!
//! [`ShareableBuffer`] is allocated by the application; this process has a list of them by address
//! ([`find`]), so that a message can determine whether its memory is shareable. A connection
//! records which regions it has shared with its peer ([`exported`]) and which of the peer's it has
//! mapped ([`imported`]). The heap of a program that `memferry run --shared-heap` has started is such a
//! region too ([`heap`]).

pub(crate) mod exported;
pub(crate) mod heap;
pub(crate) mod imported;

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use memferry_copy::{OwnedSource, OwnedTarget};
use memferry_sys::fork::{OwnerProcess, PerProcess};
use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

/// A shareable allocation of this process.
#[derive(Debug)]
pub(crate) struct SharedAllocation {
    /// Its number, which a process never reuses. Never 0.
    pub(crate) id: u32,
    memory: SealedMemory,
    mapping: Mapping,
    /// The process whose heap it is, if it is a heap: no child has it.
    heap_owner: Option<OwnerProcess>,
}

impl SharedAllocation {
    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// The mapped length in bytes.
    pub(crate) fn length(&self) -> usize {
        self.mapping.len()
    }

    /// Returns whether it is the heap of the program, which only peers of the same user may map.
    pub(crate) fn is_heap(&self) -> bool {
        self.heap_owner.is_some()
    }

    /// Creates a descriptor for a peer.
    pub(crate) fn descriptor(&self, access: Protection) -> io::Result<OwnedFd> {
        use std::os::fd::AsFd;
        match access {
            Protection::ReadOnly => self.memory.read_only(),
            Protection::ReadWrite => self.memory.as_fd().try_clone_to_owned(),
        }
    }
}

type Regions = BTreeMap<usize, Arc<SharedAllocation>>;

/// All shareable allocations of this process, by address.
static REGIONS: PerProcess<RwLock<Regions>> = PerProcess::new();

/// The list of this process. A child takes its parent's, unless a thread was changing it at the fork: then messages
/// of the child take the memory of its parent's buffers for ordinary memory.
fn regions() -> &'static RwLock<Regions> {
    REGIONS.get_or_make(|inherited| {
        let list = inherited.and_then(|inherited| inherited.try_write().ok());
        RwLock::new(list.map(|mut list| std::mem::take(&mut *list)).unwrap_or_default())
    })
}

/// The number of allocations: most programs have none, and find that out by one load.
static REGION_COUNT: AtomicUsize = AtomicUsize::new(0);

/// The shareable allocation that contains a range, if there is one.
pub(crate) fn find(address: *const u8, length: usize) -> Option<Arc<SharedAllocation>> {
    if REGION_COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let regions = regions().read().unwrap_or_else(PoisonError::into_inner);
    let (start, region) = regions.range(..=address as usize).next_back()?;
    let end = (address as usize).checked_add(length)?;
    let is_here = region.heap_owner.is_none_or(OwnerProcess::is_current);
    (end <= start + region.length() && is_here).then(|| region.clone())
}

/// The number of shareable allocations dropped so far: when it changes, peers must be notified.
pub(crate) fn released_epoch() -> usize {
    RELEASED_EPOCH.load(Ordering::Relaxed)
}

static RELEASED_EPOCH: AtomicUsize = AtomicUsize::new(0);

/// Returns whether a region still exists.
pub(crate) fn exists(region: &SharedAllocation) -> bool {
    let regions = regions().read().unwrap_or_else(PoisonError::into_inner);
    let found = regions.get(&(region.address() as usize));
    found.is_some_and(|found| found.id == region.id)
}

/// Memory that peers can map: messages from and to it need no system calls.
///
/// A message out of it gives the peer the right to read the whole allocation from then on, a
/// message into it the right to write it, until it is dropped.
///
/// ```
/// use memferry::message::ShareableBuffer;
///
/// let mut buffer = ShareableBuffer::new(4096)?;
/// buffer[0] = 7;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShareableBuffer {
    region: Arc<SharedAllocation>,
    length: usize,
}

impl ShareableBuffer {
    /// Allocates `length` zeroed bytes, on huge pages where the system grants them for shared
    /// memory.
    pub fn new(length: usize) -> io::Result<Self> {
        const HUGE: usize = 2 << 20;
        let whole =
            if length >= HUGE { length.checked_next_multiple_of(HUGE) } else { Some(length) };
        let whole = whole.filter(|&whole| whole <= isize::MAX as usize);
        let whole = whole.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = SealedMemory::new("memferry-shareable", whole)?;
        let mapping = memory.map(Protection::ReadWrite)?;
        let region = SharedAllocation { id: next_id()?, memory, mapping, heap_owner: None };
        Ok(Self { region: insert(region), length })
    }
}

/// A number for a new region.
fn next_id() -> io::Result<u32> {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    if number == 0 || number == u32::MAX {
        NEXT.store(u32::MAX, Ordering::Relaxed);
        return Err(io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "this process has created four billion shareable buffers: reuse them",
        ));
    }
    Ok(number)
}

/// Adds a region to the list.
fn insert(region: SharedAllocation) -> Arc<SharedAllocation> {
    let region = Arc::new(region);
    let mut regions = regions().write().unwrap_or_else(PoisonError::into_inner);
    regions.insert(region.address() as usize, region.clone());
    REGION_COUNT.store(regions.len(), Ordering::Relaxed);
    region
}

impl Drop for ShareableBuffer {
    fn drop(&mut self) {
        let mut regions = regions().write().unwrap_or_else(PoisonError::into_inner);
        regions.remove(&(self.region.address() as usize));
        RELEASED_EPOCH.fetch_add(1, Ordering::Relaxed);
        REGION_COUNT.store(regions.len(), Ordering::Relaxed);
    }
}

impl Deref for ShareableBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `length` bytes and lives as long as self. A peer writes
        // only while a receive of this process has lent it the memory.
        unsafe { std::slice::from_raw_parts(self.region.address(), self.length) }
    }
}

impl DerefMut for ShareableBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.region.address(), self.length) }
    }
}

// SAFETY: a mapping does not move until it is dropped.
unsafe impl OwnedSource for ShareableBuffer {
    fn source(&self) -> (*const u8, usize) {
        (self.region.address(), self.length)
    }
}

// SAFETY: as above, and in this process only the buffer owns the mapping.
unsafe impl OwnedTarget for ShareableBuffer {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.region.address(), self.length)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_address_while_it_exists() {
        let mut buffer = ShareableBuffer::new(10_000).unwrap();
        buffer[9_999] = 3;
        let at = buffer.as_ptr();
        let region = find(at.wrapping_add(100), 9_900).unwrap();
        assert!(exists(&region));
        assert!(find(at.wrapping_add(100), 1 << 20).is_none());
        drop(buffer);
        assert!(find(at, 1).is_none() && !exists(&region));
    }

    #[test]
    fn ordinary_memory_is_not_shareable() {
        let ordinary = vec![0u8; 4096];
        assert!(find(ordinary.as_ptr(), 4096).is_none());
    }
}
