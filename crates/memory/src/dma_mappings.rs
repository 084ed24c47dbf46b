//! The pinned memory of a device, and its translation to IOVAs.
//!
//! Pages that are consecutive in this process need not be consecutive for the device. Each pin
//! therefore gets a range of a linear address space that is never reused; the token of the pin is
//! the start of that range. The [`Lookup`] translates pages of the linear space to IOVAs: a small
//! cache in front of the tables of all pins. The [pin cache](crate::pin_cache) in front of this
//! module bounds how much is pinned.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_sys::device::code::{EFAULT, ENOMEM, ENOSPC};
use memferry_sys::device::{DmaDevice, DmaDirection};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

use crate::handle::{ProcessAddress, ProcessHandle};
use crate::lookup::{
    AttachError, DataPath, Geometry, LineKey, Lookup, LookupConfig, LookupCounters,
    TranslationBackend,
};
use crate::pinning::{Access, PageRange, PinError, PinToken, Pinner};

/// 4096 pages, 8 to a line, 4 lines to a set: 44 KiB for 16 MiB in flight.
const GEOMETRY: Geometry = match Geometry::new(4096, 8, 4) {
    Ok(geometry) => geometry,
    Err(_) => panic!("invalid geometry"),
};

/// The operation in error texts.
const OPERATION: &str = "mapping memory for a device";

/// The memory of a device, or of several devices that share an address space.
#[derive(Debug)]
pub struct DmaMappings {
    lookup: Lookup<Arc<DmaMappingTable>>,
    table: Arc<DmaMappingTable>,
    process: ProcessHandle,
    /// Start of the next pin in the linear space.
    next: AtomicU64,
    /// Held while the device's access is revoked.
    revoking: Mutex<()>,
}

/// All pins, by their start in the linear space.
#[derive(Debug)]
struct DmaMappingTable {
    device: Arc<dyn DmaDevice>,
    state: Mutex<DmaMappingState>,
}

#[derive(Debug, Default)]
struct DmaMappingState {
    mappings: BTreeMap<u64, Box<[u64]>>,
    /// The device's access is revoked permanently.
    is_revoked: bool,
}

/// Memory that is contiguous for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaSegment {
    /// First IOVA.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl DmaMappings {
    /// Creates the memory of a device, without mappings.
    pub fn new(device: Arc<dyn DmaDevice>) -> io::Result<Self> {
        let table = Arc::new(DmaMappingTable { device, state: Mutex::default() });
        let lookup = Lookup::new(LookupConfig::cached(GEOMETRY), table.clone())?;
        let process = lookup.add_process().map_err(io::Error::other)?;
        let (next, revoking) = (AtomicU64::new(GEOMETRY.line_bytes()), Mutex::default());
        Ok(Self { lookup, table, process, next, revoking })
    }

    /// The IOVA of the byte at `offset` of a pin, and how many bytes from there on are contiguous
    /// for the device, at most `max_bytes`. `None` if the pin does not exist or is shorter.
    pub fn find(
        &self,
        token: PinToken,
        offset: u64,
        max_bytes: u64,
        route: DataPath,
    ) -> Option<DmaSegment> {
        let page = page_bytes() as u64;
        let linear = token.0.checked_add(offset)?;
        let offset_in_page = linear % page;
        let mut segment: Option<DmaSegment> = None;
        let mut bytes = 0;
        while bytes < max_bytes {
            let handle = ProcessAddress { process: self.process, address: linear + bytes };
            let translation = match self.lookup.translate(handle, route) {
                Ok(translation) => translation,
                // The bytes found so far are returned; a later call reports the error.
                Err(_) => break,
            };
            for entry in translation.remaining() {
                let expected =
                    segment.map_or(entry + offset_in_page, |found| found.address + bytes);
                let skipped = if bytes == 0 { offset_in_page } else { 0 };
                if entry == 0 || entry + skipped != expected || bytes >= max_bytes {
                    return segment
                        .map(|found| DmaSegment { bytes: bytes.min(max_bytes), ..found });
                }
                segment.get_or_insert(DmaSegment { address: expected, bytes: 0 });
                bytes += page - skipped;
            }
        }
        segment.map(|found| DmaSegment { bytes: bytes.min(max_bytes), ..found })
    }

    /// Counters of the lookup.
    pub fn counters(&self) -> LookupCounters {
        self.lookup.counters()
    }

    /// The number of pins and of their pages.
    pub fn mapped_counts(&self) -> (usize, usize) {
        let state = lock(&self.table.state);
        (state.mappings.len(), state.mappings.values().map(|pages| pages.len()).sum())
    }

    /// Unmaps all memory of the device, even if pins still exist, and makes later pins fail. For a
    /// device that cannot be stopped in another way.
    pub fn revoke_access(&self) {
        let _revoking = lock(&self.revoking);
        lock(&self.table.state).is_revoked = true;
        let next = || lock(&self.table.state).mappings.pop_first();
        while let Some((start, pages)) = next() {
            self.unmap(start, &pages);
        }
    }

    /// Whether the device has lost all access.
    pub fn is_revoked(&self) -> bool {
        lock(&self.table.state).is_revoked
    }

    fn unmap(&self, start: u64, pages: &[u64]) {
        self.lookup.invalidate(self.process, start, (pages.len() * page_bytes()) as u64);
        // SAFETY: `map` has created the mapping for a pin that was just removed from the table.
        unsafe { self.table.device.unmap(pages) };
    }

    /// Maps memory for reading and writing if possible, even if the device only reads. The kernel
    /// moves a page of a private mapping that is pinned for reading when the program writes to it,
    /// and the device would continue to read the old one. Pins are independent of each other, so a
    /// wider access harms no other pin.
    fn map(&self, range: PageRange, access: Access) -> io::Result<Box<[u64]>> {
        let mut pages = vec![0; range.pages()].into_boxed_slice();
        let device = &self.table.device;
        // SAFETY: the device accesses pinned memory only by descriptors, whose creators guarantee
        // that the memory is valid until they are complete; pins outlive their descriptors.
        let mut map = |direction| unsafe { device.map(range.start(), &mut pages, direction) };
        match map(DmaDirection::Bidirectional) {
            Err(error) if error.raw_os_error() == Some(EFAULT) && access < Access::Write => {
                map(DmaDirection::ToDevice)?;
            }
            mapped => mapped?,
        }
        Ok(pages)
    }
}

impl Pinner for DmaMappings {
    fn name(&self) -> &'static str {
        "device"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        if lock(&self.table.state).is_revoked {
            return Err(PinError::Unsupported {
                what: OPERATION,
                fix: "the device failed and its access to memory is revoked: open it again",
            });
        }
        // Whole lines, so that no line contains pages of two pins, and one unused line after them.
        let linear =
            (range.bytes() as u64).next_multiple_of(GEOMETRY.line_bytes()) + GEOMETRY.line_bytes();
        let pages = self.map(range, access).map_err(|error| cause(range, access, &error))?;
        let start = self.next.fetch_add(linear, Ordering::Relaxed);
        let mut state = lock(&self.table.state);
        if state.is_revoked {
            drop(state);
            // SAFETY: mapped above.
            unsafe { self.table.device.unmap(&pages) };
            return Err(PinError::Refused { what: OPERATION, code: ENOSPC });
        }
        state.mappings.insert(start, pages);
        Ok(PinToken(start))
    }

    fn unpin(&self, _range: PageRange, token: PinToken) {
        let pages = lock(&self.table.state).mappings.remove(&token.0);
        match pages {
            Some(pages) => self.unmap(token.0, &pages),
            // Another thread is revoking the access; its unmapping must be complete when this
            // returns.
            None => drop(lock(&self.revoking)),
        }
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}

impl TranslationBackend for DmaMappingTable {
    fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        let state = lock(&self.state);
        let pin = state.mappings.range(..=line.address).next_back();
        let (start, pages) = pin.ok_or(io::ErrorKind::NotFound)?;
        let first = ((line.address - start) / page_bytes() as u64) as usize;
        let rest = pages.get(first..).filter(|rest| !rest.is_empty());
        for (entry, page) in entries.iter_mut().zip(rest.ok_or(io::ErrorKind::NotFound)?) {
            *entry = *page;
        }
        Ok(())
    }

    fn detach(&self, _line: LineKey, _entries: &[u64]) {}
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
