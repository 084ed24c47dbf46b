//! Regions of the peer that this process has mapped.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memferry_sys::shared_memory::{Access, Mapping, SealedMemory};

/// The most regions of one peer that are mapped here. What comes beyond is not mapped, and its
/// messages take other paths.
const MOST_REGIONS: usize = 128;

#[derive(Debug)]
struct Import {
    /// Where the region begins in the peer.
    address: u64,
    access: Access,
    mapping: Arc<Mapping>,
}

/// The mapped regions of one peer.
#[derive(Debug, Default)]
pub(crate) struct Imported {
    regions: HashMap<u32, Import>,
}

/// A place in a mapped region, with the share of the mapping that keeps it there.
#[derive(Debug, Clone)]
pub(crate) struct Mapped {
    /// The address in this process.
    pub(crate) address: *mut u8,
    /// How much of it was asked for.
    pub(crate) length: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: an address, and the mapping that keeps it valid.
unsafe impl Send for Mapped {}

impl Imported {
    /// Maps a region that the peer has sent. One that is not sealed, or not of the length that was
    /// said, is an error; one too many is passed over.
    pub(crate) fn add(
        &mut self,
        region: u32,
        access: Access,
        address: u64,
        length: u64,
        descriptor: OwnedFd,
    ) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
        if address.checked_add(length as u64).is_none() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let memory = SealedMemory::from_foreign(descriptor, length)?;
        if self.regions.len() >= MOST_REGIONS && !self.regions.contains_key(&region) {
            return Ok(());
        }
        let mapping = Arc::new(memory.map(access)?);
        self.regions.insert(region, Import { address, access, mapping });
        Ok(())
    }

    /// Forgets a region; it is unmapped when nobody uses it any more.
    pub(crate) fn remove(&mut self, region: u32) {
        self.regions.remove(&region);
    }

    /// Where a piece of the peer's memory is mapped here, if it is.
    pub(crate) fn find(
        &self,
        region: u32,
        address: u64,
        length: u64,
        access: Access,
    ) -> Option<Mapped> {
        let import = self.regions.get(&region)?;
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
        let mut imported = Imported::default();
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
    }
}
