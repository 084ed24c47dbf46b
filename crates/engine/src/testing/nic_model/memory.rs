//! The memory of the model: pages that were mapped for it, each at an IOVA of its own.

use std::collections::BTreeMap;
use std::io;

use memferry_sys::device::DmaDirection;
use memferry_sys::device::code::EFAULT;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;

/// Pages by their IOVA.
#[derive(Debug, Default)]
pub(super) struct NicModelMemory {
    pages: BTreeMap<u64, Page>,
    allocated: u64,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    start: usize,
    writable: bool,
}

impl NicModelMemory {
    pub(super) fn mapped_pages(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn map(
        &mut self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        let (bytes, writable) =
            (pages.len() * page_bytes(), direction == DmaDirection::Bidirectional);
        let populated = match writable {
            true => residency::populate_write(start, bytes),
            false => residency::populate_read(start, bytes),
        };
        if !start.is_multiple_of(page_bytes()) || populated.is_err() {
            return Err(io::Error::from_raw_os_error(EFAULT));
        }
        for (index, address) in pages.iter_mut().enumerate() {
            // Never reused, and never adjacent to the previous one.
            self.allocated += 2;
            *address = (1 << 32) + self.allocated * page_bytes() as u64;
            let start = start + index * page_bytes();
            self.pages.insert(*address, Page { start, writable });
        }
        Ok(())
    }

    /// Unmaps pages; returns whether all of them were mapped.
    pub(super) fn unmap(&mut self, pages: &[u64]) -> bool {
        pages.iter().all(|address| self.pages.remove(address).is_some())
    }

    /// The host address of the bytes, if they are in one page that allows the access.
    fn find(&self, address: u64, bytes: usize, writes: bool) -> Option<*mut u8> {
        let page = page_bytes() as u64;
        let (first, inside) = (address & !(page - 1), (address % page) as usize);
        let found = self.pages.get(&first)?;
        let is_allowed = (found.writable || !writes) && inside + bytes <= page_bytes();
        is_allowed.then_some((found.start + inside) as *mut u8)
    }

    pub(super) fn read(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let from = self.find(address, bytes, false)?;
        let mut read = vec![0; bytes];
        // SAFETY: mapped for the device, whose driver keeps it mapped and guarantees that nothing
        // writes to it while the device may read it.
        unsafe { std::ptr::copy_nonoverlapping(from, read.as_mut_ptr(), bytes) };
        Some(read)
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let to = self.find(address, bytes.len(), true)?;
        if let (8, true) = (bytes.len(), address.is_multiple_of(8)) {
            let word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            // SAFETY: aligned and mapped; concurrent readers read it atomically.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(to.cast()) }
                .store(word, std::sync::atomic::Ordering::Release);
            return Some(());
        }
        // SAFETY: mapped for the device to write, and guaranteed by its driver.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }
}
