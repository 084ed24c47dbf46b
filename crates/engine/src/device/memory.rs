//! Memory that a driver and its device share: rings, headers, words that are written back.
//!
//! It is mapped for as long as it exists, beside the pin-down cache. Nothing in it crosses a page, so
//! that it does not matter whether pages lie one behind the other for the device.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memferry_sys::Pages;
use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;

/// Memory that both sides read and write.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pages: Pages,
    addresses: Box<[u64]>,
    device: Arc<dyn Device>,
}

/// A part of shared memory with things of one size in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// Where it begins.
    start: usize,
    /// How long one thing is.
    stride: usize,
}

impl Region {
    /// Things of `stride` bytes, a power of two of at most a page, from a page boundary on.
    pub(crate) fn new(start: usize, stride: usize) -> Self {
        assert!(start.is_multiple_of(page_bytes()) && stride.is_power_of_two());
        assert!(stride <= page_bytes(), "nothing crosses a page");
        Self { start, stride }
    }

    /// Where the thing of a number begins.
    pub(crate) fn offset(self, index: usize) -> usize {
        self.start + index * self.stride
    }

    /// The thing that lies at an offset, if one begins there.
    pub(crate) fn index(self, offset: usize) -> Option<usize> {
        let inside = offset.checked_sub(self.start)?;
        inside.is_multiple_of(self.stride).then_some(inside / self.stride)
    }
}

impl SharedMemory {
    /// At least `bytes`, all zero, mapped for a device.
    pub(crate) fn new(device: Arc<dyn Device>, bytes: usize) -> io::Result<Self> {
        let pages = Pages::new(bytes)?;
        // A child would share them, and the next write would give this process others.
        pages.keep_from_children()?;
        let count = bytes.div_ceil(page_bytes());
        let mut addresses = vec![0; count].into_boxed_slice();
        // SAFETY: its own pages, which are accessed as something that a device writes to, and are
        // unmapped before they are freed.
        unsafe { device.map(pages.as_ptr() as usize, &mut addresses, Direction::Writes) }?;
        Ok(Self { pages, addresses, device })
    }

    /// What the device calls the byte at an offset.
    pub(crate) fn address(&self, offset: usize) -> u64 {
        self.addresses[offset / page_bytes()] + (offset % page_bytes()) as u64
    }

    /// The offset of what the device calls by an address.
    pub(crate) fn offset(&self, address: u64) -> Option<usize> {
        let page = page_bytes() as u64;
        let first = address & !(page - 1);
        let index = self.addresses.iter().position(|known| *known == first)?;
        Some(index * page_bytes() + (address - first) as usize)
    }

    /// Where an aligned word of `bytes` lies.
    fn word(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset + bytes <= self.addresses.len() * page_bytes() && offset.is_multiple_of(bytes)
        );
        // SAFETY: inside the mapping, as was just asserted.
        unsafe { self.pages.as_ptr().add(offset) }
    }

    /// A word of 64 bits; what the device wrote before it is there to be read.
    pub(crate) fn load64(&self, offset: usize) -> u64 {
        // SAFETY: aligned and inside the mapping, which is only accessed by atomic or volatile
        // accesses and by the device.
        unsafe { AtomicU64::from_ptr(self.word(offset, 8).cast()) }.load(Ordering::Acquire)
    }

    /// A word of 32 bits; what the device wrote before it is there to be read.
    pub(crate) fn load32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.word(offset, 4).cast()) }.load(Ordering::Acquire)
    }

    /// Writes words of 64 bits, in order.
    pub(crate) fn store64(&self, offset: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate() {
            // SAFETY: as above; the device gets to know of it by a register, later.
            unsafe { ptr::write_volatile(self.word(offset + 8 * index, 8).cast(), *word) };
        }
    }

    /// Writes zero to a range.
    pub(crate) fn clear(&self, range: Range<usize>) {
        range.step_by(8).for_each(|offset| self.store64(offset, &[0]));
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Before the pages go.
        // SAFETY: mapped when this was made.
        unsafe { self.device.unmap(&self.addresses) };
    }
}
