//! Memory that several processes map: sealed memfds, which nobody can shrink under a reader.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading alone.
    Read,
    /// Reading and writing.
    Write,
}

/// A memfd of a fixed size: sealed against shrinking and growing, so that a mapping of it can
/// never lose its pages.
#[derive(Debug)]
pub struct SealedMemory {
    descriptor: OwnedFd,
    length: usize,
}

impl SealedMemory {
    /// Zeroed memory of `length` bytes, rounded up to whole pages.
    pub fn new(name: &str, length: usize) -> io::Result<Self> {
        let this = Self::unsealed(name, length)?;
        rustix::fs::fcntl_add_seals(&this.descriptor, Self::SEALS | SealFlags::SEAL)?;
        Ok(this)
    }

    fn unsealed(name: &str, length: usize) -> io::Result<Self> {
        let page = super::pages::page_bytes();
        let length =
            length.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Newer kernels warn about memfds that do not say whether they are programs.
        let descriptor = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create(name, flags))?;
        rustix::fs::ftruncate(&descriptor, length as u64)?;
        // Whoever is given it for reading must not be able to open it again for writing.
        rustix::fs::fchmod(&descriptor, rustix::fs::Mode::from_raw_mode(0o600))?;
        Ok(Self { descriptor, length })
    }

    /// The same, and mapped here for writing; whoever is given the descriptor can only read it.
    pub fn for_readers(name: &str, length: usize) -> io::Result<(Self, Mapping)> {
        let this = Self::unsealed(name, length)?;
        let mapping = this.map(Access::Write)?;
        // Before Linux 5.1 readers are only trusted not to write.
        let _ = rustix::fs::fcntl_add_seals(&this.descriptor, SealFlags::FUTURE_WRITE);
        rustix::fs::fcntl_add_seals(&this.descriptor, Self::SEALS | SealFlags::SEAL)?;
        Ok((this, mapping))
    }

    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// Takes a descriptor that came from elsewhere, if it is what it must be: memory (not a file,
    /// not huge pages that can run out under a reader), sealed, and of the length that was said.
    pub fn from_foreign(descriptor: OwnedFd, length: usize) -> io::Result<Self> {
        const TMPFS: u64 = 0x0102_1994;
        let refuse = |why: &'static str| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let seals = rustix::fs::fcntl_get_seals(&descriptor)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not a memfd"))?;
        if !seals.contains(Self::SEALS) {
            return refuse("a memfd that is not sealed against shrinking");
        }
        if rustix::fs::fstatfs(&descriptor)?.f_type as u64 != TMPFS {
            return refuse("a memfd that is not on ordinary pages");
        }
        if rustix::fs::fstat(&descriptor)?.st_size != length as i64 || length == 0 {
            return refuse("a memfd of another length than was said");
        }
        Ok(Self { descriptor, length })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: it has at least a page.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// A second descriptor of the same memory through which it can only be read.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Maps all of it.
    pub fn map(&self, access: Access) -> io::Result<Mapping> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        let (fd, length) = (&self.descriptor, self.length);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0) }?;
        // SAFETY: advice on a mapping just made; a refusal changes nothing but speed.
        let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A mapping of shared memory, released on drop. Others may change the bytes at any time, so it
/// lends pointers and never references.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to this value and is reached through raw pointers only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes are mapped.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: a mapping has at least a page.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether a stretch of this process's memory lies in it.
    pub fn contains(&self, address: usize, length: usize) -> bool {
        let offset = address.checked_sub(self.start.as_ptr() as usize);
        offset.and_then(|offset| offset.checked_add(length)).is_some_and(|end| end <= self.length)
    }

    /// Lets go of what it takes to reach a stretch of whole pages: the bytes stay in the shared
    /// memory, and whoever touches the stretch again gets to them again.
    pub fn let_go(&self, address: usize, length: usize) {
        assert!(self.contains(address, length), "a stretch of this mapping");
        // SAFETY: inside this mapping, which is shared, so that no byte depends on its page tables.
        let _ = unsafe { madvise(address as *mut _, length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: what mmap returned, unmapped once; whoever holds a pointer holds the mapping too.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn duplicate(memory: &SealedMemory) -> OwnedFd {
        memory.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let memory = SealedMemory::new("test", 5000).unwrap();
        let (first, second) =
            (memory.map(Access::Write).unwrap(), memory.map(Access::Read).unwrap());
        // SAFETY: both mappings have at least 5000 bytes, and only this thread touches them.
        unsafe {
            first.as_ptr().add(4999).write_volatile(7);
            assert_eq!(second.as_ptr().add(4999).read_volatile(), 7);
        }
    }

    #[test]
    fn sealed_memory_cannot_be_shrunk() {
        let memory = SealedMemory::new("test", 8192).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    }

    #[test]
    fn only_sealed_memory_of_the_said_length_is_taken_from_others() {
        let memory = SealedMemory::new("test", 8192).unwrap();
        assert!(SealedMemory::from_foreign(duplicate(&memory), 8192).is_ok());
        assert!(SealedMemory::from_foreign(duplicate(&memory), 4096).is_err());
        let open =
            rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let open = open.unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert!(SealedMemory::from_foreign(open, 8192).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(SealedMemory::from_foreign(file.into(), 8192).is_err());
    }

    #[test]
    fn memory_for_readers_is_written_by_its_maker_alone() {
        let (memory, own) = SealedMemory::for_readers("test", 8192).unwrap();
        let theirs = SealedMemory::from_foreign(duplicate(&memory), 8192).unwrap();
        assert!(theirs.map(Access::Write).is_err());
        let view = theirs.map(Access::Read).unwrap();
        // SAFETY: both mappings have at least a page, and only this thread touches them.
        unsafe {
            own.as_ptr().write_volatile(7);
            assert_eq!(view.as_ptr().read_volatile(), 7);
        }
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_for_writing() {
        let memory = SealedMemory::new("test", 8192).unwrap();
        let shared = SealedMemory::from_foreign(memory.read_only().unwrap(), 8192).unwrap();
        assert!(shared.map(Access::Write).is_err());
        assert!(shared.map(Access::Read).is_ok());
    }
}
