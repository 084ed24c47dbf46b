//! Regions of the peer that this process has mapped.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use memferry_sys::shared_memory::{Mapping, Protection, SealedMemory};

use crate::port::device_ferry;

/// The maximum number of regions of one peer that are mapped. Messages of further regions take
/// other paths.
const MAX_REGIONS: usize = 128;

#[derive(Debug)]
struct ImportedRegion {
    /// The address of the region in the peer.
    address: u64,
    access: Protection,
    mapping: Arc<PeerMapping>,
}

/// Memory of a peer that is mapped in this process. A device among the copy engines may have it
/// registered until it is unmapped.
#[derive(Debug)]
pub(crate) struct PeerMapping(Mapping);

impl PeerMapping {
    fn new(mapping: Mapping) -> Self {
        if let Some(ferry) = device_ferry() {
            // SAFETY: the range is invalidated when this is dropped, before it is unmapped.
            unsafe { ferry.mark_unmonitored(mapping.as_ptr(), mapping.len()) };
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
            ferry.invalidate(self.0.as_ptr(), self.0.len());
        }
    }
}

/// The mapped regions of one peer.
#[derive(Debug, Default)]
pub(crate) struct ImportedRegions {
    regions: RwLock<HashMap<u32, ImportedRegion>>,
}

/// A range of a mapped region, with the reference that keeps it mapped.
#[derive(Debug, Clone)]
pub(crate) struct MappedSegment {
    /// The address in this process.
    pub(crate) address: *mut u8,
    /// The length in bytes.
    pub(crate) length: usize,
    _mapping: Arc<PeerMapping>,
}

// SAFETY: the type is an address, and the mapping that keeps the address valid.
unsafe impl Send for MappedSegment {}

impl ImportedRegions {
    fn regions(&self) -> RwLockReadGuard<'_, HashMap<u32, ImportedRegion>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions_mut(&self) -> RwLockWriteGuard<'_, HashMap<u32, ImportedRegion>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a region that the peer has sent. Fails if the region is not sealed or has another
    /// length than declared; one above the limit is ignored.
    pub(crate) fn add(
        &self,
        region: u32,
        access: Protection,
        address: u64,
        length: u64,
        descriptor: OwnedFd,
    ) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        if address.checked_add(length as u64).is_none() || !address.is_multiple_of(page_bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let memory = SealedMemory::from_untrusted_fd(descriptor, length)?;
        let mut regions = self.regions_mut();
        if regions.len() >= MAX_REGIONS && !regions.contains_key(&region) {
            return Ok(());
        }
        // A process at its limit of mappings continues without this one: other paths are slower,
        // and work.
        match memory.map(access) {
            Ok(mapping) => {
                let mapping = Arc::new(PeerMapping::new(mapping));
                regions.insert(region, ImportedRegion { address, access, mapping });
            }
            Err(error) => tracing::warn!("cannot map a region of a peer: {error}"),
        }
        Ok(())
    }

    /// Removes a region, which is unmapped when its last user has finished.
    pub(crate) fn remove(&self, region: u32) {
        let removed = self.regions_mut().remove(&region);
        // Unmapped without the lock.
        drop(removed);
    }

    /// The mapping of a page of the peer's memory, if there is one: the mapping, the offset in it,
    /// the protection.
    pub(crate) fn page(
        &self,
        region: u32,
        address: u64,
    ) -> Option<(Arc<PeerMapping>, u64, Protection)> {
        self.range(region, address, memferry_sys::pages::page_bytes() as u64)
    }

    /// As [`ImportedRegions::page`], of a range.
    pub(crate) fn range(
        &self,
        region: u32,
        address: u64,
        length: u64,
    ) -> Option<(Arc<PeerMapping>, u64, Protection)> {
        let regions = self.regions();
        let import = regions.get(&region)?;
        let offset = address.checked_sub(import.address)?;
        let inside = offset.checked_add(length)? <= import.mapping.len() as u64;
        inside.then(|| (import.mapping.clone(), offset, import.access))
    }

    /// The mapped range of a segment of the peer's memory, if it is mapped.
    pub(crate) fn find(
        &self,
        region: u32,
        address: u64,
        length: u64,
        access: Protection,
    ) -> Option<MappedSegment> {
        if region == 0 {
            return None;
        }
        let regions = self.regions();
        let import = regions.get(&region)?;
        let offset = address.checked_sub(import.address)?;
        let inside = offset.checked_add(length)? <= import.mapping.len() as u64;
        let permitted = access == Protection::ReadOnly || import.access == Protection::ReadWrite;
        (inside && permitted).then(|| MappedSegment {
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
        let imported = ImportedRegions::default();
        let descriptor = region.descriptor(Protection::ReadOnly).unwrap();
        imported.add(5, Protection::ReadOnly, 1 << 40, 8192, descriptor).unwrap();
        let at = |address, length, access| imported.find(5, address, length, access).is_some();
        assert!(at(1 << 40, 8192, Protection::ReadOnly));
        assert!(at((1 << 40) + 8191, 1, Protection::ReadOnly));
        assert!(!at((1 << 40) + 8191, 2, Protection::ReadOnly));
        assert!(!at((1 << 40) - 1, 1, Protection::ReadOnly));
        assert!(!at(1 << 40, u64::MAX, Protection::ReadOnly));
        assert!(!at(1 << 40, 1, Protection::ReadWrite));
        assert!(imported.find(6, 1 << 40, 1, Protection::ReadOnly).is_none());
        // A region that is not page-aligned would be translated wrongly.
        let descriptor = region.descriptor(Protection::ReadOnly).unwrap();
        assert!(imported.add(7, Protection::ReadOnly, (1 << 40) - 4, 8192, descriptor).is_err());
    }
}
