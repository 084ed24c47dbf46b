//! What a model reaches: pages that were mapped for it, each at an address of its own.

use std::collections::BTreeMap;
use std::io;

use memferry_sys::device::Direction;
use memferry_sys::device::code::EFAULT;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;

/// Pages by the address at which the device finds them.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pages: BTreeMap<u64, Page>,
    given: u64,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    start: usize,
    writable: bool,
}

impl Memory {
    pub(super) fn mapped_pages(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn map(
        &mut self,
        start: usize,
        pages: &mut [u64],
        direction: Direction,
    ) -> io::Result<()> {
        let (bytes, writable) = (pages.len() * page_bytes(), direction == Direction::Writes);
        let populated = match writable {
            true => residency::populate_for_writing(start, bytes),
            false => residency::populate_for_reading(start, bytes),
        };
        if !start.is_multiple_of(page_bytes()) || populated.is_err() {
            return Err(io::Error::from_raw_os_error(EFAULT));
        }
        for (index, address) in pages.iter_mut().enumerate() {
            // Never used again, and never beside the one before.
            self.given += 2;
            *address = (1 << 32) + self.given * page_bytes() as u64;
            let start = start + index * page_bytes();
            self.pages.insert(*address, Page { start, writable });
        }
        Ok(())
    }

    /// Whether all of them were mapped.
    pub(super) fn unmap(&mut self, pages: &[u64]) -> bool {
        pages.iter().all(|address| self.pages.remove(address).is_some())
    }

    /// Where the bytes at an address are, if they are in one page that allows the access.
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
        // SAFETY: mapped for the device, whose driver keeps it mapped; only the device's memory is
        // written meanwhile, and by nobody that the driver vouched for.
        unsafe { std::ptr::copy_nonoverlapping(from, read.as_mut_ptr(), bytes) };
        Some(read)
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let to = self.find(address, bytes.len(), true)?;
        if let (8, true) = (bytes.len(), address.is_multiple_of(8)) {
            let word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            // SAFETY: aligned and mapped; whoever reads it meanwhile does so atomically.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(to.cast()) }
                .store(word, std::sync::atomic::Ordering::Release);
            return Some(());
        }
        // SAFETY: mapped for the device to write, and vouched for by its driver.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }
}
