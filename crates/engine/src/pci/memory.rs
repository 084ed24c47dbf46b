//! Memory that a driver and its device share: rings, headers, words that the device writes back.
//!
//! It is mapped while it exists, independent of the pin cache. No element crosses a page, so pages
//! need not be contiguous for the device.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memferry_sys::Pages;
use memferry_sys::device::{DmaDevice, DmaDirection};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::user_wait::UserWait;

use crate::runtime::try_collect;

/// Memory that the processor and the device read and write.
#[derive(Debug)]
pub(crate) struct CoherentMemory {
    pages: Pages,
    addresses: Box<[u64]>,
    /// The length of all pages in bytes.
    bytes: usize,
    /// `None` if the device uses the addresses of this process.
    device: Option<Arc<dyn DmaDevice>>,
}

/// An array of elements of one size in coherent memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DmaArray {
    /// The offset of the first element in bytes.
    start: usize,
    /// The size of an element in bytes.
    stride: usize,
}

impl DmaArray {
    /// Creates an array of elements of `stride` bytes, a power of two of at most a page, from a
    /// page boundary on.
    pub(crate) fn new(start: usize, stride: usize) -> Self {
        assert!(start.is_multiple_of(page_bytes()) && stride.is_power_of_two());
        assert!(stride <= page_bytes(), "no element crosses a page");
        Self { start, stride }
    }

    /// The offset of an element.
    pub(crate) fn offset(self, index: usize) -> usize {
        self.start + index * self.stride
    }

    /// The index of the element that starts at an offset, if one does.
    pub(crate) fn index(self, offset: usize) -> Option<usize> {
        let inside = offset.checked_sub(self.start)?;
        inside.is_multiple_of(self.stride).then_some(inside / self.stride)
    }
}

impl CoherentMemory {
    /// Allocates at least `bytes`, all zero, and maps them for a device.
    pub(crate) fn new(device: Arc<dyn DmaDevice>, bytes: usize) -> io::Result<Self> {
        let pages = Pages::new(bytes)?;
        // A child would share the pages, and the next write would give this process copies that the
        // device does not see.
        pages.exclude_from_fork()?;
        let count = bytes.div_ceil(page_bytes());
        let mut addresses = try_collect(count, |_| 0)?;
        // SAFETY: its own pages, which are accessed as memory that a device writes to, and are
        // unmapped before they are freed.
        unsafe {
            device.map(pages.as_ptr() as usize, &mut addresses, DmaDirection::Bidirectional)
        }?;
        Ok(Self { pages, addresses, bytes: count * page_bytes(), device: Some(device) })
    }

    /// Allocates at least `bytes`, all zero, for a device that shares the address space of this
    /// process.
    pub(crate) fn shared_virtual(bytes: usize) -> io::Result<Self> {
        let pages = Pages::new(bytes)?;
        pages.exclude_from_fork()?;
        let start = pages.as_ptr() as usize;
        // Resident, as far as the system permits it: the device would report faults.
        let _ = residency::populate_write(start, bytes.next_multiple_of(page_bytes()));
        let count = bytes.div_ceil(page_bytes());
        let addresses = try_collect(count, |page| (start + page * page_bytes()) as u64)?;
        Ok(Self { pages, addresses, bytes: count * page_bytes(), device: None })
    }

    /// Whether all bytes have contiguous addresses for the device.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.device.as_ref().is_none_or(|device| device.is_contiguous())
    }

    /// The IOVA of the byte at an offset.
    pub(crate) fn address(&self, offset: usize) -> u64 {
        // A page is a power of two; the compiler does not know, and would divide.
        let page = page_bytes();
        self.addresses[offset >> page.trailing_zeros()] + (offset & (page - 1)) as u64
    }

    /// The offset of an IOVA, which is probably that of a byte shortly after the offset `near`.
    pub(crate) fn offset(&self, address: u64, near: usize) -> Option<usize> {
        let page = page_bytes();
        let first = address & !(page as u64 - 1);
        let (before, behind) = self.addresses.split_at(near >> page.trailing_zeros());
        let index = match behind.iter().position(|page_address| *page_address == first) {
            Some(index) => before.len() + index,
            None => before.iter().position(|page_address| *page_address == first)?,
        };
        Some(index * page + (address - first) as usize)
    }

    /// A pointer to the aligned word of `bytes` at an offset.
    fn word(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= self.bytes && offset.is_multiple_of(bytes));
        // SAFETY: inside the mapping, as was just asserted.
        unsafe { self.pages.as_ptr().add(offset) }
    }

    /// Loads a word of 64 bits; everything that the device wrote before it is visible.
    pub(crate) fn load64(&self, offset: usize) -> u64 {
        // SAFETY: aligned and inside the mapping, which is only accessed by atomic or volatile
        // accesses and by the device.
        unsafe { AtomicU64::from_ptr(self.word(offset, 8).cast()) }.load(Ordering::Acquire)
    }

    /// Loads a word of 32 bits; everything that the device wrote before it is visible.
    pub(crate) fn load32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.word(offset, 4).cast()) }.load(Ordering::Acquire)
    }

    /// Waits for a moment, or until the device may have changed a word that was `seen`.
    pub(crate) fn wait_for_change(&self, wait: UserWait, offset: usize, seen: u64) {
        // SAFETY: as above.
        wait.wait(unsafe { AtomicU64::from_ptr(self.word(offset, 8).cast()) }, seen);
    }

    /// Writes words of 64 bits, in order.
    pub(crate) fn store64(&self, offset: usize, words: &[u64]) {
        assert!(offset + size_of_val(words) <= self.bytes);
        let first: *mut u64 = self.word(offset, 8).cast();
        for (index, word) in words.iter().enumerate() {
            // SAFETY: as above, for all words, as was just asserted; a later register write makes the
            // device read them.
            unsafe { ptr::write_volatile(first.add(index), *word) };
        }
    }

    /// Requests the line at an offset for writing.
    #[inline]
    pub(crate) fn request(&self, offset: usize) {
        memferry_sys::copy::prefetch_for_write(self.pages.as_ptr().wrapping_add(offset));
    }

    /// Writes zero to a range.
    pub(crate) fn clear(&self, range: Range<usize>) {
        range.step_by(8).for_each(|offset| self.store64(offset, &[0]));
    }
}

impl Drop for CoherentMemory {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            // Unmapped before the pages are freed.
            // SAFETY: `new` mapped these addresses.
            unsafe { device.unmap(&self.addresses) };
        }
    }
}
