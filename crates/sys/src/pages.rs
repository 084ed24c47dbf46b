//! Page-aligned memory straight from the kernel, on huge pages where they are to be had.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::fault::{Call, call, call_c};

/// The size of an ordinary page.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// How much memory the machine has.
pub fn machine_bytes() -> usize {
    // SAFETY: asks for a number.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0) * page_bytes()
}

/// Addresses at which nobody can read or write: who tries is stopped by the processor. They are free
/// again when this is dropped.
#[derive(Debug)]
pub struct Reserved(Pages);

impl Reserved {
    /// Takes at least `length` bytes of addresses.
    pub fn new(length: usize) -> io::Result<Self> {
        let pages = Pages::new(length)?;
        // SAFETY: the mapping is these pages' own, and nobody has a slice of them.
        let protect =
            || unsafe { libc::mprotect(pages.as_ptr().cast(), pages.mapped, libc::PROT_NONE) };
        call_c(Call::Mprotect, protect)?;
        Ok(Self(pages))
    }

    /// The first address.
    pub fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

/// The pages of a file, for reading, until this is dropped.
#[derive(Debug)]
pub struct FilePages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to this value and is only read.
unsafe impl Send for FilePages {}
// SAFETY: as above.
unsafe impl Sync for FilePages {}

impl FilePages {
    /// Maps all of a file, which must not be empty.
    ///
    /// # Safety
    /// Nobody may change the file or make it shorter while it is mapped.
    pub unsafe fn map(file: &std::fs::File) -> io::Result<Self> {
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let (rights, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let map = || unsafe { mmap(std::ptr::null_mut(), length, rights, flags, file, 0) };
        let start = call(Call::Mmap, map)?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }

    /// The bytes of the file.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped for this length until the drop, and promised not to change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for FilePages {
    fn drop(&mut self) {
        // SAFETY: what mmap returned, unmapped once; every slice of it borrows this.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// An anonymous mapping that is released on drop. Starts zeroed, begins on a page boundary.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    length: usize,
    mapped: usize,
}

// SAFETY: the mapping is owned exclusively by this value and is ordinary memory.
unsafe impl Send for Pages {}
// SAFETY: shared access only ever reads (`as_slice`); writing needs `&mut` or unsafe code.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `length` bytes on ordinary pages.
    pub fn new(length: usize) -> io::Result<Self> {
        Self::map(length, false)
    }

    /// Lets forked children have no part in them.
    pub fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: advice on a mapping of our own, which changes nothing in this process.
        let advise =
            || unsafe { madvise(self.start.as_ptr().cast(), self.mapped, Advice::LinuxDontFork) };
        Ok(call(Call::Madvise, advise)?)
    }

    /// Maps at least `length` bytes and asks the kernel for huge pages, which it may not grant.
    pub fn huge(length: usize) -> io::Result<Self> {
        Self::map(length, true)
    }

    fn map(length: usize, huge: bool) -> io::Result<Self> {
        let page = if huge { 2 << 20 } else { page_bytes() };
        let mapped =
            length.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let map = || unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let start = call(Call::Mmap, map)?;
        if huge {
            // SAFETY: advice on a mapping we just made; a refusal changes nothing but speed.
            let _ = unsafe { madvise(start, mapped, Advice::LinuxHugepage) };
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length, mapped })
    }

    /// How many bytes were asked for.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no byte was asked for.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes, for reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping holds `length` initialised (zeroed) bytes and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: start and mapped are what mmap returned, and no slice outlives self.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pages_start_zeroed_and_aligned_and_can_be_written() {
        for mut pages in [Pages::new(10_000).unwrap(), Pages::huge(10_000).unwrap()] {
            assert_eq!(pages.as_ptr() as usize % page_bytes(), 0);
            assert_eq!(pages.len(), 10_000);
            assert!(pages.as_slice().iter().all(|&byte| byte == 0));
            pages.as_mut_slice().fill(7);
            assert!(pages.as_slice().iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn an_impossible_length_is_an_error() {
        assert!(Pages::new(usize::MAX - 5).is_err());
    }
}
