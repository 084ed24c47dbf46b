//! Memory that peers on other hosts may read and write: every registration of a domain, by its key.
//!
//! Whoever serves such a peer copies with the lock held, so a registration that was removed is used
//! by nobody. The lock is the last that anybody takes, and held for one packet at most.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry_message::{Piece, Rights};

use crate::memory::Region;

#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// Memory is named by its address, and not by the distance from where it begins.
    has_virtual_addresses: bool,
    all: Mutex<HashMap<u64, Region>>,
}

/// Where something is to be read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) key: u64,
    pub(crate) address: u64,
    /// From there on, all that belongs to the access: it is permitted as a whole or not at all.
    pub(crate) length: u64,
}

/// Why an access is not permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denial {
    /// Nothing that others may access has this key.
    NoKey,
    /// It may not be accessed in this way.
    NoRight,
    /// It ends before, or begins after.
    Outside { region_bytes: u64 },
}

impl Regions {
    pub(crate) fn new(has_virtual_addresses: bool) -> Self {
        Self { has_virtual_addresses, all: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Region>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that there are now.
    pub(crate) fn list(&self) -> Vec<(u64, Region)> {
        self.lock().iter().map(|(key, region)| (*key, *region)).collect()
    }

    /// # Safety
    /// The memory must stay valid until the key is removed.
    pub(crate) unsafe fn insert(&self, key: u64, region: Region) {
        self.lock().insert(key, region);
    }

    /// Nobody touches the memory by way of this list after this.
    pub(crate) fn remove(&self, key: u64) {
        self.lock().remove(&key);
    }

    /// Copies bytes to the beginning of an extent.
    pub(crate) fn write(&self, extent: Extent, bytes: &[u8]) -> Result<(), Denial> {
        let regions = self.lock();
        let at = self.find(&regions, extent, Rights::WRITE)?;
        let length = bytes.len().min(at.length);
        // SAFETY: the memory is valid while it is in the list, which the lock keeps as it is, and the
        // piece lies in it. The bytes are this side's own.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.address, length) };
        Ok(())
    }

    /// Appends the first bytes of an extent.
    pub(crate) fn read(
        &self,
        extent: Extent,
        length: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Denial> {
        let regions = self.lock();
        let at = self.find(&regions, extent, Rights::READ)?;
        let length = length.min(at.length);
        bytes.reserve(length);
        // SAFETY: as for `write`; there is room for so many, which are then written. Others may change
        // the memory meanwhile, so nobody looks at it as a slice.
        unsafe {
            let end = bytes.as_mut_ptr().add(bytes.len());
            std::ptr::copy_nonoverlapping(at.address.cast_const(), end, length);
            bytes.set_len(bytes.len() + length);
        }
        Ok(())
    }

    /// The memory of an extent.
    fn find(
        &self,
        regions: &HashMap<u64, Region>,
        extent: Extent,
        asked: Rights,
    ) -> Result<Piece, Denial> {
        let region = regions.get(&extent.key).ok_or(Denial::NoKey)?;
        if !region.rights.ok_or(Denial::NoKey)?.include(asked) {
            return Err(Denial::NoRight);
        }
        let Piece { address, length } = region.piece;
        let outside = Denial::Outside { region_bytes: length as u64 };
        let start = if self.has_virtual_addresses { address as u64 } else { 0 };
        let offset = extent.address.checked_sub(start).ok_or(outside)?;
        if offset.checked_add(extent.length).is_none_or(|end| end > length as u64) {
            return Err(outside);
        }
        Ok(Piece::target(address.wrapping_add(offset as usize), extent.length as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(memory: &mut [u8], has_virtual_addresses: bool) -> Regions {
        let regions = Regions::new(has_virtual_addresses);
        let piece = Piece::target(memory.as_mut_ptr(), memory.len());
        let rights = [Some(Rights::READ_WRITE), Some(Rights::READ), Some(Rights::WRITE), None];
        for (key, rights) in (1..).zip(rights) {
            // SAFETY: the memory outlives the list.
            unsafe { regions.insert(key, Region { piece, rights }) };
        }
        regions
    }

    #[test]
    fn what_lies_inside_is_copied_and_nothing_else() {
        let mut memory = *b"0123456789";
        let regions = regions(&mut memory, false);
        let extent = |key, address, length| Extent { key, address, length };
        let mut bytes = Vec::new();
        assert_eq!(regions.read(extent(1, 7, 3), 3, &mut bytes), Ok(()));
        assert_eq!(regions.read(extent(1, 10, 0), 9, &mut bytes), Ok(()));
        assert_eq!(bytes, b"789");
        let outside = Err(Denial::Outside { region_bytes: 10 });
        for (address, length) in [(7, 4), (11, 0), (u64::MAX, 2), (2, u64::MAX)] {
            assert_eq!(regions.read(extent(1, address, length), 1, &mut bytes), outside);
            assert_eq!(regions.write(extent(1, address, length), b"x"), outside);
        }
        assert_eq!(regions.write(extent(2, 0, 1), b"x"), Err(Denial::NoRight));
        assert_eq!(regions.read(extent(3, 0, 1), 1, &mut bytes), Err(Denial::NoRight));
        assert_eq!(regions.read(extent(4, 0, 1), 1, &mut bytes), Err(Denial::NoKey));
        assert_eq!(regions.write(extent(5, 0, 1), b"x"), Err(Denial::NoKey));
        assert_eq!(regions.write(extent(3, 2, 2), b"abc"), Ok(()));
        regions.remove(3);
        assert_eq!(regions.write(extent(3, 2, 2), b"xy"), Err(Denial::NoKey));
        assert_eq!((bytes.as_slice(), &memory), (&b"789"[..], b"01ab456789"));
    }

    #[test]
    fn memory_can_be_named_by_its_address() {
        let mut memory = *b"0123456789";
        let (start, regions) = (memory.as_ptr() as u64, regions(&mut memory, true));
        let mut bytes = Vec::new();
        let extent = |address| Extent { key: 1, address, length: 2 };
        assert_eq!(regions.read(extent(start + 4), 2, &mut bytes), Ok(()));
        assert!(regions.read(extent(start - 1), 2, &mut bytes).is_err());
        assert!(regions.read(extent(start + 9), 2, &mut bytes).is_err());
        assert!(regions.read(extent(0), 2, &mut bytes).is_err());
        assert_eq!(bytes, b"45");
    }
}
