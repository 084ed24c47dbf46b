//! Memory that a test maps, unmaps and maps again at chosen addresses.

use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use memferry_memory::pin_cache::PinCache;
use memferry_memory::pinning::Access;

use memferry_testing::RingPinner;

/// Memory mapped by a test, at an address of its choice or the kernel's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestMapping {
    pub(crate) address: usize,
    pub(crate) length: usize,
}

impl TestMapping {
    /// Maps zeroed memory at an address that the kernel chooses.
    pub(crate) fn map(length: usize) -> Self {
        Self::map_with(0, length, 0)
    }

    /// Maps zeroed memory at this address, in place of the current mapping, which must belong to
    /// the caller.
    pub(crate) fn map_again(self) {
        let again = Self::map_with(self.address, self.length, libc::MAP_FIXED);
        assert_eq!(again.address, self.address);
    }

    /// Maps zeroed memory at this address if it is free.
    pub(crate) fn map_if_free(self) -> Option<Self> {
        Self::try_map(self.address, self.length, libc::MAP_FIXED_NOREPLACE)
    }

    fn map_with(address: usize, length: usize, extra_flags: i32) -> Self {
        Self::try_map(address, length, extra_flags).expect("mmap failed")
    }

    fn try_map(address: usize, length: usize, extra_flags: i32) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the mapping is new, or replaces memory that only this test uses, by address.
        let start = unsafe { libc::mmap(address as *mut _, length, rights, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { address: start as usize, length })
    }

    pub(crate) fn unmap(self) {
        // SAFETY: the memory belongs to this test, which does not access it until it has mapped it
        // again.
        assert_eq!(unsafe { libc::munmap(self.address as *mut _, self.length) }, 0);
    }

    /// Moves the pages to another mapping of the test and replaces it.
    pub(crate) fn move_to(self, other: Self) {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both mappings belong to this test, which accesses them by address only.
        let moved = unsafe {
            let (from, to) = (self.address as *mut _, other.address as *mut libc::c_void);
            libc::mremap(from, self.length, self.length, flags, to)
        };
        assert_eq!(moved as usize, other.address);
    }

    pub(crate) fn discard(self) {
        let advice = libc::MADV_DONTNEED;
        // SAFETY: the memory belongs to this test, which does not need its contents any more.
        assert_eq!(unsafe { libc::madvise(self.address as *mut _, self.length, advice) }, 0);
    }

    /// Writes the pattern of a seed; patterns of different seeds differ.
    pub(crate) fn fill(self, seed: u64) {
        // SAFETY: the memory is mapped, belongs to this test, and consists of whole words.
        unsafe {
            let words = self.address as *mut u64;
            (0..self.length / 8).for_each(|at| words.add(at).write_volatile(word(seed, at)));
        }
    }

    /// Whether the memory contains the pattern.
    pub(crate) fn holds(self, seed: u64) -> bool {
        // SAFETY: as in `fill`.
        unsafe {
            let words = self.address as *const u64;
            (0..self.length / 8).all(|at| words.add(at).read_volatile() == word(seed, at))
        }
    }

    /// Copies the memory to a file through the cache and returns the copied words.
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

/// Creates a memfd.
pub(crate) fn memory_file() -> File {
    // SAFETY: the call creates a descriptor that no other code owns.
    unsafe {
        let descriptor = libc::memfd_create(c"copied".as_ptr(), libc::MFD_CLOEXEC);
        assert!(descriptor >= 0);
        File::from_raw_fd(descriptor)
    }
}
