//! The pinned memory of a device.
//!
//! Pages that are consecutive in this process need not be consecutive for the device. The token of a
//! pin therefore contains the IOVA of each page, so that a driver finds them in the lease of its
//! memory. The [pin cache](crate::pin_cache) in front of this module bounds how much is pinned.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use memferry_sys::device::code::{EFAULT, ENOMEM, ENOSPC};
use memferry_sys::device::{DmaDevice, DmaDirection};
use memferry_sys::residency;
use memferry_sys::sync::lock;

use crate::pinning::{Access, PageRange, PinError, PinToken, Pinner};

/// The operation in error texts.
const OPERATION: &str = "mapping memory for a device";

/// The memory of a device, or of several devices that share an address space.
#[derive(Debug)]
pub struct DmaMappings {
    device: Arc<dyn DmaDevice>,
    state: Mutex<DmaMappingState>,
    /// The device's access is revoked permanently. Set under the lock of the state.
    is_revoked: AtomicBool,
    /// Held while the device's access is revoked.
    revoking: Mutex<()>,
}

#[derive(Debug, Default)]
struct DmaMappingState {
    /// The IOVAs of each pin, by its number.
    mappings: BTreeMap<u64, Arc<[u64]>>,
    /// The number of the last pin.
    last: u64,
}

impl DmaMappings {
    /// Creates the memory of a device, without mappings.
    pub fn new(device: Arc<dyn DmaDevice>) -> Self {
        let (state, is_revoked, revoking) = Default::default();
        Self { device, state, is_revoked, revoking }
    }

    /// The number of pins and of their pages.
    pub fn mapped_counts(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.mappings.len(), state.mappings.values().map(|pages| pages.len()).sum())
    }

    /// Unmaps all memory of the device, even if pins still exist, and makes later pins fail. For a
    /// device that cannot be stopped in another way.
    pub fn revoke_access(&self) {
        let _revoking = lock(&self.revoking);
        let mappings = {
            let mut state = lock(&self.state);
            self.is_revoked.store(true, Ordering::Release);
            std::mem::take(&mut state.mappings)
        };
        mappings.values().for_each(|pages| self.unmap(pages));
    }

    /// Whether the device has lost all access: the addresses in leases are no longer valid.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Acquire)
    }

    fn unmap(&self, pages: &[u64]) {
        // SAFETY: `map` has created the mapping, for a pin that is not in the table, so that no
        // other call unmaps it.
        unsafe { self.device.unmap(pages) };
    }

    /// Maps memory for reading and writing if possible, even if the device only reads. The kernel
    /// moves a page of a private mapping that is pinned for reading when the program writes to it,
    /// and the device would continue to read the old one. Pins are independent of each other, so a
    /// wider access harms no other pin.
    fn map(&self, range: PageRange, access: Access) -> io::Result<Arc<[u64]>> {
        let mut pages = vec![0; range.pages()];
        let device = &self.device;
        // SAFETY: the device accesses pinned memory only by descriptors, whose creators guarantee
        // that the memory is valid until they are complete; pins outlive their descriptors.
        let mut map = |direction| unsafe { device.map(range.start(), &mut pages, direction) };
        match map(DmaDirection::Bidirectional) {
            Err(error) if error.raw_os_error() == Some(EFAULT) && access < Access::Write => {
                map(DmaDirection::ToDevice)?;
            }
            mapped => mapped?,
        }
        Ok(pages.into())
    }
}

impl Pinner for DmaMappings {
    fn name(&self) -> &'static str {
        "device"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        if self.is_revoked() {
            return Err(PinError::Unsupported {
                what: OPERATION,
                fix: "the device failed and its access to memory is revoked: open it again",
            });
        }
        let pages = self.map(range, access).map_err(|error| cause(range, access, &error))?;
        let mut state = lock(&self.state);
        if self.is_revoked() {
            drop(state);
            self.unmap(&pages);
            return Err(PinError::Refused { what: OPERATION, code: ENOSPC });
        }
        state.last += 1;
        let number = state.last;
        state.mappings.insert(number, pages.clone());
        Ok(PinToken::mapped(number, pages))
    }

    fn unpin(&self, _range: PageRange, token: &PinToken) {
        let pages = lock(&self.state).mappings.remove(&token.number());
        match pages {
            Some(pages) => self.unmap(&pages),
            // Another thread is revoking the access; its unmapping must be complete when this
            // returns.
            None => drop(lock(&self.revoking)),
        }
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}

fn cause(range: PageRange, access: Access, error: &io::Error) -> PinError {
    match error.raw_os_error() {
        // Some memory is valid but cannot be pinned, for example that of shared files.
        Some(EFAULT) if can_populate(range, access) => {
            PinError::Refused { what: OPERATION, code: EFAULT }
        }
        Some(EFAULT) => PinError::BadMemory { range },
        Some(ENOMEM) => match residency::lock_limit_bytes() {
            Some(limit_bytes) => PinError::MemlockLimit {
                limit_bytes,
                locked_bytes: residency::locked_bytes(),
                requested_bytes: range.bytes() as u64,
            },
            None => PinError::OutOfMemory,
        },
        Some(ENOSPC) => PinError::IovaExhausted,
        code => PinError::Refused { what: OPERATION, code: code.unwrap_or(0) },
    }
}

fn can_populate(range: PageRange, access: Access) -> bool {
    let (start, bytes) = (range.start(), range.bytes());
    match access {
        Access::Write => residency::populate_write(start, bytes).is_ok(),
        Access::Read | Access::MonitorOnly => residency::populate_read(start, bytes).is_ok(),
    }
}

#[cfg(test)]
mod tests;
