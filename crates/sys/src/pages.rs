//! Page-aligned memory from the kernel, on huge pages if requested and available.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::fault::{Call, call, call_c};

/// The size of an ordinary page, in bytes.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// The physical memory of the machine, in bytes.
pub fn machine_bytes() -> usize {
    // SAFETY: `sysconf` takes no pointer.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0) * page_bytes()
}

/// A reserved range of addresses (`PROT_NONE`): every access faults. Released on drop.
#[derive(Debug)]
pub struct ReservedRange(Pages);

impl ReservedRange {
    /// Reserves at least `length` bytes of addresses.
    pub fn new(length: usize) -> io::Result<Self> {
        let pages = Pages::new(length)?;
        // SAFETY: the mapping belongs to these pages, and no slice of them exists.
        let protect = || unsafe {
            libc::mprotect(pages.as_ptr().cast(), pages.mapped_length, libc::PROT_NONE)
        };
        call_c(Call::Mprotect, protect)?;
        Ok(Self(pages))
    }

    /// The first address.
    pub fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

/// A file mapped for reading, unmapped on drop.
#[derive(Debug)]
pub struct MappedFile {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: this value owns the mapping, which is only read.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps all of a file, which must not be empty.
    ///
    /// # Safety
    /// The file must not be changed or truncated while it is mapped.
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
        // SAFETY: `length` bytes stay mapped until the drop, and the caller of `map` guarantees
        // that they do not change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: `mmap` returned this range, and it is unmapped once; every slice of it borrows
        // this value.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// A zeroed, page-aligned anonymous mapping, unmapped on drop.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    length: usize,
    mapped_length: usize,
}

// SAFETY: this value owns the mapping exclusively, and it is ordinary memory.
unsafe impl Send for Pages {}
// SAFETY: shared access only reads (`as_slice`); writing needs `&mut` or unsafe code.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `length` bytes on ordinary pages.
    pub fn new(length: usize) -> io::Result<Self> {
        Self::map(length, false)
    }

    /// Excludes the pages from forked children (`MADV_DONTFORK`).
    pub fn exclude_from_fork(&self) -> io::Result<()> {
        // SAFETY: the advice concerns a mapping of this value and changes nothing in this process.
        let advise = || unsafe {
            madvise(self.start.as_ptr().cast(), self.mapped_length, Advice::LinuxDontFork)
        };
        Ok(call(Call::Madvise, advise)?)
    }

    /// Maps at least `length` bytes and requests huge pages, which the kernel may not grant.
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
            // SAFETY: the advice concerns the mapping created above; a refusal affects only speed.
            let _ = unsafe { madvise(start, mapped, Advice::LinuxHugepage) };
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length, mapped_length: mapped })
    }

    /// The requested length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the requested length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of the first byte.
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
        // SAFETY: `mmap` returned this start and mapped length, and no slice outlives this value.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_length) };
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
