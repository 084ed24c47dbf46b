//! The registered memory of a domain by key, which peers on other hosts may read and write.
//!
//! The transport copies with the lock held, so no thread uses a registration after it was removed.
//! The lock is taken after all others, and held for at most one packet.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memferry_message::{Rights, Segment};

use crate::abi::{FI_EACCES, FI_EINVAL, FI_ENOKEY};
use crate::mr::MrRange;

#[derive(Debug, Default)]
pub(crate) struct MrTable {
    /// Memory is addressed by its virtual address, and not by the offset in the registration.
    has_virtual_addresses: bool,
    all: Mutex<HashMap<u64, MrRange>>,
}

/// A range of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RmaExtent {
    pub(crate) key: u64,
    pub(crate) address: u64,
    /// The length of the whole access: it is permitted as a whole or not at all.
    pub(crate) length: u64,
}

/// The cause of a denied access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RmaDenied {
    /// No exposed memory has this key.
    UnknownKey,
    /// The right for this access is missing.
    NoRight,
    /// The range is outside the registered memory.
    Outside { region_bytes: u64 },
}

impl RmaDenied {
    /// The error code, the same as for memory of this host.
    pub(crate) fn code(self) -> c_int {
        match self {
            Self::UnknownKey => FI_ENOKEY,
            Self::NoRight => FI_EACCES,
            Self::Outside { .. } => FI_EINVAL,
        }
    }
}

impl MrTable {
    pub(crate) fn new(has_virtual_addresses: bool) -> Self {
        Self { has_virtual_addresses, all: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, MrRange>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All registrations.
    pub(crate) fn list(&self) -> Vec<(u64, MrRange)> {
        self.lock().iter().map(|(key, region)| (*key, *region)).collect()
    }

    /// # Safety
    /// The memory must stay valid until the key is removed.
    pub(crate) unsafe fn insert(&self, key: u64, region: MrRange) {
        self.lock().insert(key, region);
    }

    /// Removes a registration. No thread accesses its memory through this table after this.
    pub(crate) fn remove(&self, key: u64) {
        self.lock().remove(&key);
    }

    /// Copies bytes to the start of an extent.
    pub(crate) fn write(&self, extent: RmaExtent, bytes: &[u8]) -> Result<(), RmaDenied> {
        let regions = self.lock();
        let at = self.find(&regions, extent, Rights::WRITE)?;
        let length = bytes.len().min(at.length);
        // SAFETY: the memory is valid while it is in the table, which the lock protects, and the
        // range lies in it. The bytes belong to this side.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.address, length) };
        Ok(())
    }

    /// Appends the first bytes of an extent.
    pub(crate) fn read(
        &self,
        extent: RmaExtent,
        length: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), RmaDenied> {
        let regions = self.lock();
        let at = self.find(&regions, extent, Rights::READ)?;
        let length = length.min(at.length);
        bytes.reserve(length);
        // SAFETY: as for `write`; `length` bytes are reserved, and then written. Other threads may
        // change the memory at the same time, so no slice of it is made.
        unsafe {
            let end = bytes.as_mut_ptr().add(bytes.len());
            std::ptr::copy_nonoverlapping(at.address.cast_const(), end, length);
            bytes.set_len(bytes.len() + length);
        }
        Ok(())
    }

    /// Calls `change` with the address of an extent, whose memory stays registered meanwhile.
    pub(crate) fn access<T>(
        &self,
        extent: RmaExtent,
        rights: Rights,
        change: impl FnOnce(*mut u8) -> T,
    ) -> Result<T, RmaDenied> {
        let regions = self.lock();
        let at = self.find(&regions, extent, rights)?;
        Ok(change(at.address))
    }

    /// Resolves an extent.
    fn find(
        &self,
        regions: &HashMap<u64, MrRange>,
        extent: RmaExtent,
        right: Rights,
    ) -> Result<Segment, RmaDenied> {
        let region = regions.get(&extent.key).ok_or(RmaDenied::UnknownKey)?;
        if !region.rights.ok_or(RmaDenied::UnknownKey)?.include(right) {
            return Err(RmaDenied::NoRight);
        }
        let Segment { address, length } = region.segment;
        let outside = RmaDenied::Outside { region_bytes: length as u64 };
        let start = if self.has_virtual_addresses { address as u64 } else { 0 };
        let offset = extent.address.checked_sub(start).ok_or(outside)?;
        if offset.checked_add(extent.length).is_none_or(|end| end > length as u64) {
            return Err(outside);
        }
        Ok(Segment::target(address.wrapping_add(offset as usize), extent.length as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mr_table(memory: &mut [u8], has_virtual_addresses: bool) -> MrTable {
        let regions = MrTable::new(has_virtual_addresses);
        let segment = Segment::target(memory.as_mut_ptr(), memory.len());
        let rights = [Some(Rights::READ_WRITE), Some(Rights::READ), Some(Rights::WRITE), None];
        for (key, rights) in (1..).zip(rights) {
            // SAFETY: the memory outlives the table.
            unsafe { regions.insert(key, MrRange { segment, rights }) };
        }
        regions
    }

    #[test]
    fn what_lies_inside_is_copied_and_nothing_else() {
        let mut memory = *b"0123456789";
        let regions = mr_table(&mut memory, false);
        let extent = |key, address, length| RmaExtent { key, address, length };
        let mut bytes = Vec::new();
        assert_eq!(regions.read(extent(1, 7, 3), 3, &mut bytes), Ok(()));
        assert_eq!(regions.read(extent(1, 10, 0), 9, &mut bytes), Ok(()));
        assert_eq!(bytes, b"789");
        let outside = Err(RmaDenied::Outside { region_bytes: 10 });
        for (address, length) in [(7, 4), (11, 0), (u64::MAX, 2), (2, u64::MAX)] {
            assert_eq!(regions.read(extent(1, address, length), 1, &mut bytes), outside);
            assert_eq!(regions.write(extent(1, address, length), b"x"), outside);
        }
        assert_eq!(regions.write(extent(2, 0, 1), b"x"), Err(RmaDenied::NoRight));
        assert_eq!(regions.read(extent(3, 0, 1), 1, &mut bytes), Err(RmaDenied::NoRight));
        assert_eq!(regions.read(extent(4, 0, 1), 1, &mut bytes), Err(RmaDenied::UnknownKey));
        assert_eq!(regions.write(extent(5, 0, 1), b"x"), Err(RmaDenied::UnknownKey));
        assert_eq!(regions.write(extent(3, 2, 2), b"abc"), Ok(()));
        regions.remove(3);
        assert_eq!(regions.write(extent(3, 2, 2), b"xy"), Err(RmaDenied::UnknownKey));
        assert_eq!((bytes.as_slice(), &memory), (&b"789"[..], b"01ab456789"));
    }

    #[test]
    fn memory_can_be_named_by_its_address() {
        let mut memory = *b"0123456789";
        let (start, regions) = (memory.as_ptr() as u64, mr_table(&mut memory, true));
        let mut bytes = Vec::new();
        let extent = |address| RmaExtent { key: 1, address, length: 2 };
        assert_eq!(regions.read(extent(start + 4), 2, &mut bytes), Ok(()));
        assert!(regions.read(extent(start - 1), 2, &mut bytes).is_err());
        assert!(regions.read(extent(start + 9), 2, &mut bytes).is_err());
        assert!(regions.read(extent(0), 2, &mut bytes).is_err());
        assert_eq!(bytes, b"45");
    }
}
