//! Regions of the peer that this process has mapped.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};

use crate::port::device_ferry;

/// The most regions of one peer that are mapped here. What comes beyond is not mapped, and its
/// messages take other paths.
const MOST_REGIONS: usize = 128;

#[derive(Debug)]
struct Import {
    /// Where the region begins in the peer.
    address: u64,
    access: Access,
    mapping: Arc<PeerMapping>,
}

/// Memory of a peer that is mapped here. A device among the copy engines may know it until it is
/// unmapped.
#[derive(Debug)]
pub(crate) struct PeerMapping(Mapping);

impl PeerMapping {
    fn new(mapping: Mapping) -> Self {
        if let Some(ferry) = device_ferry() {
            // SAFETY: it is forgotten when this is dropped, before the mapping goes.
            unsafe { ferry.promise_to_forget(mapping.as_ptr(), mapping.len()) };
        }
        Self(mapping)
    }
}

impl std::ops::Deref for PeerMapping {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.0
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        if let Some(ferry) = device_ferry() {
            ferry.forget(self.0.as_ptr(), self.0.len());
        }
    }
}

/// The mapped regions of one peer.
#[derive(Debug, Default)]
pub(crate) struct Imported {
    regions: RwLock<HashMap<u32, Import>>,
}

/// A place in a mapped region, with the share of the mapping that keeps it there.
#[derive(Debug, Clone)]
pub(crate) struct Mapped {
    /// The address in this process.
    pub(crate) address: *mut u8,
    /// How much of it was asked for.
    pub(crate) length: usize,
    _mapping: Arc<PeerMapping>,
}

// SAFETY: an address, and the mapping that keeps it valid.
unsafe impl Send for Mapped {}

impl Imported {
    fn regions(&self) -> RwLockReadGuard<'_, HashMap<u32, Import>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions_mut(&self) -> RwLockWriteGuard<'_, HashMap<u32, Import>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a region that the peer has sent. One that is not sealed, or not of the length that was
    /// said, is an error; one too many is passed over.
    pub(crate) fn add(
        &self,
        region: u32,
        access: Access,
        address: u64,
        length: u64,
        descriptor: OwnedFd,
    ) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        if address.checked_add(length as u64).is_none() || !address.is_multiple_of(page_bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let memory = SealedMemory::from_foreign(descriptor, length)?;
        let mut regions = self.regions_mut();
        if regions.len() >= MOST_REGIONS && !regions.contains_key(&region) {
            return Ok(());
        }
        // A process that has as many mappings as it may have does without: other paths are slower,
        // and work.
        match memory.map(access) {
            Ok(mapping) => {
                let mapping = Arc::new(PeerMapping::new(mapping));
                regions.insert(region, Import { address, access, mapping });
            }
            Err(error) => tracing::warn!("a region of a peer cannot be mapped: {error}"),
        }
        Ok(())
    }

    /// Forgets a region; it is unmapped when nobody uses it any more.
    pub(crate) fn remove(&self, region: u32) {
        let removed = self.regions_mut().remove(&region);
        // Unmapped without the lock.
        drop(removed);
    }

    /// Where a page of the peer's memory is mapped here, if it is: in which mapping, how far from
    /// its beginning, for what.
    pub(crate) fn page(
        &self,
        region: u32,
        address: u64,
    ) -> Option<(Arc<PeerMapping>, u64, Access)> {
        let regions = self.regions();
        let import = regions.get(&region)?;
        let offset = address.checked_sub(import.address)?;
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let inside = offset.checked_add(page_bytes)? <= import.mapping.len() as u64;
        inside.then(|| (import.mapping.clone(), offset, import.access))
    }

    /// Where a piece of the peer's memory is mapped here, if it is.
    pub(crate) fn find(
        &self,
        region: u32,
        address: u64,
        length: u64,
        access: Access,
    ) -> Option<Mapped> {
        if region == 0 {
            return None;
        }
        let regions = self.regions();
        let import = regions.get(&region)?;
        let offset = address.checked_sub(import.address)?;
        let inside = offset.checked_add(length)? <= import.mapping.len() as u64;
        let permitted = access == Access::Read || import.access == Access::Write;
        (inside && permitted).then(|| Mapped {
            address: import.mapping.as_ptr().wrapping_add(offset as usize),
            length: length as usize,
            _mapping: import.mapping.clone(),
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::{ShareableBuffer, find};

    #[test]
    fn only_what_lies_inside_a_region_and_is_permitted_is_found() {
        let buffer = ShareableBuffer::new(8192).unwrap();
        let region = find(buffer.as_ptr(), 1).unwrap();
        let imported = Imported::default();
        let descriptor = region.descriptor(Access::Read).unwrap();
        imported.add(5, Access::Read, 1 << 40, 8192, descriptor).unwrap();
        let at = |address, length, access| imported.find(5, address, length, access).is_some();
        assert!(at(1 << 40, 8192, Access::Read));
        assert!(at((1 << 40) + 8191, 1, Access::Read));
        assert!(!at((1 << 40) + 8191, 2, Access::Read));
        assert!(!at((1 << 40) - 1, 1, Access::Read));
        assert!(!at(1 << 40, u64::MAX, Access::Read));
        assert!(!at(1 << 40, 1, Access::Write));
        assert!(imported.find(6, 1 << 40, 1, Access::Read).is_none());
        // What begins inside a page would be taken for something else than it is.
        let descriptor = region.descriptor(Access::Read).unwrap();
        assert!(imported.add(7, Access::Read, (1 << 40) - 4, 8192, descriptor).is_err());
    }
}
