//! Shareable memory: allocations that peers map once, so that large messages out of them and into
//! them need no system call at all.
//!
//! [`ShareableBuffer`] is what an application allocates; this process keeps a list of them by
//! address ([`find`]), so that a message can tell whether its memory is shareable. A connection
//! remembers which it has shared with its peer ([`exported`]) and which of the peer's it has
//! mapped ([`imported`]).

pub(crate) mod exported;
pub(crate) mod imported;

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use memferry_copy::{OwnedSource, OwnedTarget};
use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};

/// A shareable allocation of this process.
#[derive(Debug)]
pub(crate) struct Region {
    /// Its number, never used twice by a process. Never 0.
    pub(crate) number: u32,
    memory: SealedMemory,
    mapping: Mapping,
}

impl Region {
    /// The first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// How many bytes are mapped.
    pub(crate) fn length(&self) -> usize {
        self.mapping.len()
    }

    /// A descriptor for a peer.
    pub(crate) fn descriptor(&self, access: Access) -> io::Result<OwnedFd> {
        use std::os::fd::AsFd;
        match access {
            Access::Read => self.memory.read_only(),
            Access::Write => self.memory.as_fd().try_clone_to_owned(),
        }
    }
}

/// All shareable allocations of this process, by address.
static REGIONS: RwLock<BTreeMap<usize, Arc<Region>>> = RwLock::new(BTreeMap::new());

/// How many there are: most programs have none, and learn that by one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The shareable allocation in which a piece of memory lies, if it lies in one.
pub(crate) fn find(address: *const u8, length: usize) -> Option<Arc<Region>> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let (start, region) = regions.range(..=address as usize).next_back()?;
    let end = (address as usize).checked_add(length)?;
    (end <= start + region.length()).then(|| region.clone())
}

/// How many shareable allocations have been dropped: when it changes, peers must be told.
pub(crate) fn drops() -> usize {
    DROPS.load(Ordering::Relaxed)
}

static DROPS: AtomicUsize = AtomicUsize::new(0);

/// Whether a region still exists.
pub(crate) fn exists(region: &Region) -> bool {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let found = regions.get(&(region.address() as usize));
    found.is_some_and(|found| found.number == region.number)
}

/// Memory that peers can map: messages out of it and into it move without system calls.
///
/// A message out of it gives the peer the right to read the whole allocation from then on, a
/// message into it the right to write it, until it is dropped.
#[derive(Debug)]
pub struct ShareableBuffer {
    region: Arc<Region>,
    length: usize,
}

impl ShareableBuffer {
    /// `length` zeroed bytes, on huge pages where the system grants them for shared memory.
    pub fn new(length: usize) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        const HUGE: usize = 2 << 20;
        let whole =
            if length >= HUGE { length.checked_next_multiple_of(HUGE) } else { Some(length) };
        let whole = whole.filter(|&whole| whole <= isize::MAX as usize);
        let whole = whole.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = SealedMemory::new("memferry-shareable", whole)?;
        let mapping = memory.map(Access::Write)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number == 0 || number == u32::MAX {
            NEXT.store(u32::MAX, Ordering::Relaxed);
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "this process has made four billion shareable buffers: reuse them",
            ));
        }
        let region = Arc::new(Region { number, memory, mapping });
        let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
        regions.insert(region.address() as usize, region.clone());
        COUNT.store(regions.len(), Ordering::Relaxed);
        Ok(Self { region, length })
    }
}

impl Drop for ShareableBuffer {
    fn drop(&mut self) {
        let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
        regions.remove(&(self.region.address() as usize));
        DROPS.fetch_add(1, Ordering::Relaxed);
        COUNT.store(regions.len(), Ordering::Relaxed);
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

// SAFETY: a mapping stays where it is until it is dropped.
unsafe impl OwnedSource for ShareableBuffer {
    fn source(&self) -> (*const u8, usize) {
        (self.region.address(), self.length)
    }
}

// SAFETY: as above, and in this process the mapping is the buffer's alone.
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
