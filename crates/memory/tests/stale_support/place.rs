//! Addresses that a test maps, unmaps and maps again as it likes.

use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use memferry_memory::pin_cache::PinCache;
use memferry_memory::pinning::Access;

use crate::ring::RingPinner;

/// Memory mapped by a test, at an address of its choice or the kernel's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) address: usize,
    pub(crate) length: usize,
}

impl Place {
    /// Fresh zeroed memory wherever the kernel likes.
    pub(crate) fn map(length: usize) -> Self {
        Self::map_with(0, length, 0)
    }

    /// Fresh zeroed memory here, in place of what was here. The place must be the caller's.
    pub(crate) fn map_again(self) {
        let again = Self::map_with(self.address, self.length, libc::MAP_FIXED);
        assert_eq!(again.address, self.address);
    }

    /// Fresh zeroed memory here if nothing is here.
    pub(crate) fn map_if_free(self) -> Option<Self> {
        Self::try_map(self.address, self.length, libc::MAP_FIXED_NOREPLACE)
    }

    fn map_with(address: usize, length: usize, more: i32) -> Self {
        Self::try_map(address, length, more).expect("memory can be mapped")
    }

    fn try_map(address: usize, length: usize, more: i32) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping, or one in place of memory that only this test uses, by address.
        let start = unsafe { libc::mmap(address as *mut _, length, rights, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { address: start as usize, length })
    }

    pub(crate) fn unmap(self) {
        // SAFETY: memory of this test, which it does not touch until it has mapped it again.
        assert_eq!(unsafe { libc::munmap(self.address as *mut _, self.length) }, 0);
    }

    /// Moves the pages to another place of the test, in place of what was there.
    pub(crate) fn move_to(self, other: Self) {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are memory of this test, reached by address only.
        let moved = unsafe {
            let (from, to) = (self.address as *mut _, other.address as *mut libc::c_void);
            libc::mremap(from, self.length, self.length, flags, to)
        };
        assert_eq!(moved as usize, other.address);
    }

    pub(crate) fn discard(self) {
        let advice = libc::MADV_DONTNEED;
        // SAFETY: memory of this test, whose contents it gives up.
        assert_eq!(unsafe { libc::madvise(self.address as *mut _, self.length, advice) }, 0);
    }

    /// Writes a pattern that no other seed gives.
    pub(crate) fn fill(self, seed: u64) {
        // SAFETY: mapped memory of this test, of whole words.
        unsafe {
            let words = self.address as *mut u64;
            (0..self.length / 8).for_each(|at| words.add(at).write_volatile(word(seed, at)));
        }
    }

    /// Whether every byte is that of the pattern.
    pub(crate) fn holds(self, seed: u64) -> bool {
        // SAFETY: as in `fill`.
        unsafe {
            let words = self.address as *const u64;
            (0..self.length / 8).all(|at| words.add(at).read_volatile() == word(seed, at))
        }
    }

    /// Copies the memory out through the cache and says which words came.
    pub(crate) fn copied_out(self, cache: &PinCache, ring: &RingPinner, file: &File) -> Vec<u64> {
        let lease = cache.acquire(self.address, self.length, Access::Read).unwrap();
        ring.copy_out(lease.token(), self.address, self.length, file);
        drop(lease);
        let mut bytes = vec![0; self.length];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    /// Copies a pattern into the memory through the cache.
    pub(crate) fn copy_in(self, seed: u64, cache: &PinCache, ring: &RingPinner, file: &File) {
        let bytes: Vec<u8> =
            pattern(seed, self.length).iter().flat_map(|w| w.to_ne_bytes()).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let lease = cache.acquire(self.address, self.length, Access::Write).unwrap();
        ring.copy_in(lease.token(), self.address, self.length, file);
    }
}

/// The words of a pattern.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u64> {
    (0..length / 8).map(|at| word(seed, at)).collect()
}

fn word(seed: u64, at: usize) -> u64 {
    if seed == 0 { 0 } else { (seed << 20) ^ at as u64 }
}

/// A file in memory.
pub(crate) fn memory_file() -> File {
    // SAFETY: makes a file, whose descriptor nobody else has.
    unsafe {
        let descriptor = libc::memfd_create(c"copied".as_ptr(), libc::MFD_CLOEXEC);
        assert!(descriptor >= 0);
        File::from_raw_fd(descriptor)
    }
}
