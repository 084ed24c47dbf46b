//! Memory that several processes map: memfds that are sealed so that no process can shrink them
//! under a reader.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fault::{Call, call};
use crate::fork::ForkSafe;

/// Access rights of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// Read only.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

/// A memfd that is sealed against shrinking, so that a mapping of it never loses its pages. Unless
/// it was created as growable, it is also sealed against growing.
#[derive(Debug)]
pub struct SealedMemory {
    descriptor: OwnedFd,
    length: usize,
}

impl SealedMemory {
    /// Creates zeroed memory of `length` bytes, rounded up to whole pages.
    pub fn new(name: &str, length: usize) -> io::Result<Self> {
        let this = Self::unsealed(name, length)?;
        add_seals(&this.descriptor, Self::SEALS | SealFlags::SEAL)?;
        Ok(this)
    }

    fn unsealed(name: &str, length: usize) -> io::Result<Self> {
        let length = whole_pages(length)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Linux 6.3 and later log a warning about memfds without an explicit executable setting.
        let create = |flags| call(Call::MemfdCreate, || rustix::fs::memfd_create(name, flags));
        let descriptor = create(flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| create(flags))?;
        grow(&descriptor, length)?;
        // A process that receives a read-only descriptor must not be able to reopen it for writing.
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        call(Call::Fchmod, || rustix::fs::fchmod(&descriptor, mode))?;
        Ok(Self { descriptor, length })
    }

    /// Creates memory of `first` bytes that can grow up to `max_length`, and maps it for writing.
    /// Other processes can only read it through its descriptor. The mapping reserves `max_length`
    /// bytes of addresses; only the bytes that the memory has grown to are backed.
    pub fn new_growable_read_only_export(
        name: &str,
        first: usize,
        max_length: usize,
    ) -> io::Result<(Self, Mapping)> {
        let this = Self::unsealed(name, first)?;
        let mapping = this.map_reserved(Protection::ReadWrite, whole_pages(max_length)?)?;
        // Before Linux 5.1 the seal does not exist, and readers are trusted not to write.
        let _ = add_seals(&this.descriptor, SealFlags::FUTURE_WRITE);
        add_seals(&this.descriptor, SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok((this, mapping))
    }

    /// Grows the memory to at least `length` bytes; fails on memory that is not growable.
    /// [`SealedMemory::len`] remains the initial length.
    pub fn grow_to(&self, length: usize) -> io::Result<()> {
        let length = whole_pages(length)?;
        // Other holders of the descriptor can grow the memory too, so it may already be long
        // enough. No process can shrink it.
        if (stat(&self.descriptor)?.st_size as u64) < length as u64 {
            grow(&self.descriptor, length)?;
        }
        Ok(())
    }

    /// Maps the first page of memory of another process, which may grow there, for reading.
    /// [`Mapping::extend`] maps more of it.
    pub fn map_first_page_of_untrusted_fd(descriptor: OwnedFd) -> io::Result<Mapping> {
        check_untrusted(&descriptor, SealFlags::SHRINK)?;
        let length = super::pages::page_bytes();
        if stat(&descriptor)?.st_size < length as i64 {
            return Err(invalid_memfd("memfd shorter than one page"));
        }
        Self { descriptor, length }.map_reserved(Protection::ReadOnly, length)
    }

    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// Validates a descriptor that was received from another process: it must be a sealed memfd of
    /// `length` bytes on ordinary pages. (Huge pages can run out while a reader accesses them.)
    pub fn from_untrusted_fd(descriptor: OwnedFd, length: usize) -> io::Result<Self> {
        check_untrusted(&descriptor, Self::SEALS)?;
        if stat(&descriptor)?.st_size != length as i64 || length == 0 {
            return Err(invalid_memfd("memfd length differs from the announced length"));
        }
        Ok(Self { descriptor, length })
    }

    /// The initial length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: the memory has at least one page.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Opens a second descriptor of the same memory, for reading only.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        self.open_again(rustix::fs::OFlags::RDONLY)
    }

    /// Opens the memory again, as another open file with its own locks.
    pub fn reopen(&self) -> io::Result<OwnedFd> {
        self.open_again(rustix::fs::OFlags::RDWR)
    }

    fn open_again(&self, access: rustix::fs::OFlags) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        let flags = access | OFlags::CLOEXEC;
        Ok(call(Call::Open, || rustix::fs::open(path, flags, Mode::empty()))?)
    }

    /// Maps all of the memory.
    pub fn map(&self, access: Protection) -> io::Result<Mapping> {
        const HUGE_PAGE: usize = 2 << 20;
        let mapping = self.map_reserved(access, self.length)?;
        if self.length >= HUGE_PAGE {
            let (start, length) = (mapping.as_ptr().cast(), mapping.len());
            // SAFETY: the advice concerns the mapping created above; a refusal affects only speed.
            let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        }
        Ok(mapping)
    }

    /// Maps `length` bytes of addresses, which may be more than the memory has.
    fn map_reserved(&self, access: Protection, length: usize) -> io::Result<Mapping> {
        let protection = match access {
            Protection::ReadOnly => ProtFlags::READ,
            Protection::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let fd = &self.descriptor;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let map =
            || unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0) };
        let start = call(Call::Mmap, map)?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }
}

fn whole_pages(length: usize) -> io::Result<usize> {
    let page = super::pages::page_bytes();
    Ok(length.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)?)
}

fn grow(descriptor: &OwnedFd, length: usize) -> io::Result<()> {
    super::file_size::grow(|| {
        Ok(call(Call::Ftruncate, || rustix::fs::ftruncate(descriptor, length as u64))?)
    })
}

fn add_seals(descriptor: &OwnedFd, seals: SealFlags) -> rustix::io::Result<()> {
    call(Call::AddSeals, || rustix::fs::fcntl_add_seals(descriptor, seals))
}

fn stat(descriptor: &OwnedFd) -> rustix::io::Result<rustix::fs::Stat> {
    call(Call::Fstat, || rustix::fs::fstat(descriptor))
}

fn invalid_memfd(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Checks that a descriptor is a memfd on ordinary pages with the seals `needed`. (Huge pages can
/// run out while a reader accesses them.)
fn check_untrusted(descriptor: &OwnedFd, needed: SealFlags) -> io::Result<()> {
    use rustix::io::Errno;
    const TMPFS: u64 = 0x0102_1994;
    let seals = call(Call::GetSeals, || rustix::fs::fcntl_get_seals(descriptor));
    let seals = seals.map_err(|error| match error {
        Errno::INVAL | Errno::BADF => invalid_memfd("not a memfd"),
        error => error.into(),
    })?;
    if !seals.contains(needed) {
        return Err(invalid_memfd("memfd not sealed against shrinking"));
    }
    let is_ordinary = match call(Call::Fstatfs, || rustix::fs::fstatfs(descriptor)) {
        Ok(filesystem) => filesystem.f_type as u64 == TMPFS,
        // Seccomp filters may refuse `fstatfs`. All memfds on ordinary pages are on one device.
        Err(_) => stat(descriptor)?.st_dev == device_of_memfds()?,
    };
    if is_ordinary { Ok(()) } else { Err(invalid_memfd("memfd not on ordinary pages")) }
}

/// The device number of memfds on ordinary pages.
fn device_of_memfds() -> io::Result<u64> {
    static DEVICE: ForkSafe<u64> = ForkSafe::new();
    if let Some(device) = DEVICE.get() {
        return Ok(*device);
    }
    let own = SealedMemory::unsealed("memferry-device", 1)?;
    let device = stat(&own.descriptor)?.st_dev;
    Ok(*DEVICE.get_or_init(|| device))
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A mapping of shared memory, unmapped on drop. Other processes may change the bytes at any time,
/// so it provides pointers and never references.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: this value owns the mapping, and all access is through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A mapping that another part of this process has made. It is unmapped when this is dropped.
    ///
    /// # Safety
    /// The range must be one mapping of shared memory that nobody else unmaps.
    pub unsafe fn from_raw(start: NonNull<u8>, length: usize) -> Self {
        Self { start, length }
    }

    /// The address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The number of mapped bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Maps the same memory again, from its first byte, with `length` bytes of addresses. They may be
    /// more than the memory has ([`Mapping::exists`]). Needs no descriptor.
    pub fn extend(&self, length: usize) -> io::Result<Mapping> {
        use rustix::mm::{MremapFlags, mremap};
        let (length, flags) = (whole_pages(length)?, MremapFlags::MAYMOVE);
        // SAFETY: with an old size of 0 the kernel leaves this mapping as it is, and maps the same
        // shared memory at an address of its choice, which overlaps nothing.
        let remap = || unsafe { mremap(self.start.as_ptr().cast(), 0, length, flags) };
        let start = call(Call::Mmap, remap)?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }

    /// Whether the mapping contains the range of this process's memory.
    pub fn contains(&self, address: usize, length: usize) -> bool {
        let offset = address.checked_sub(self.start.as_ptr() as usize);
        offset.and_then(|offset| offset.checked_add(length)).is_some_and(|end| end <= self.length)
    }

    /// Whether the page that contains the byte at `offset` is backed. Queries the kernel; used for
    /// mappings that are longer than their memory, where an access to a page that is not backed
    /// raises `SIGBUS`.
    pub fn exists(&self, offset: usize) -> bool {
        if offset >= self.length {
            return false;
        }
        let page = super::pages::page_bytes();
        let word = self.start.as_ptr().wrapping_add(offset - offset % page).cast::<u32>();
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the kernel reads a word of this mapping, or returns `EFAULT`. If the word happens
        // to equal the expected value, the wait times out at once. The time is a local variable.
        let result =
            unsafe { libc::syscall(libc::SYS_futex, word, operation, 0x5EED_5EEDu32, &now) };
        result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    }

    /// Drops the page-table entries of a range of whole pages. The bytes stay in the shared memory,
    /// and the next access maps them again.
    pub fn drop_ptes(&self, address: usize, length: usize) {
        assert!(self.contains(address, length), "range outside of the mapping");
        // SAFETY: the range is inside this mapping, which is shared, so no byte depends on its page
        // tables.
        let _ = unsafe { madvise(address as *mut _, length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `mmap` returned this range, and it is unmapped once; every user of a pointer into
        // it keeps the mapping alive.
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
            (memory.map(Protection::ReadWrite).unwrap(), memory.map(Protection::ReadOnly).unwrap());
        // SAFETY: both mappings have at least 5000 bytes, and only this thread accesses them.
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
        assert!(SealedMemory::from_untrusted_fd(duplicate(&memory), 8192).is_ok());
        assert!(SealedMemory::from_untrusted_fd(duplicate(&memory), 4096).is_err());
        let open =
            rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let open = open.unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert!(SealedMemory::from_untrusted_fd(open, 8192).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(SealedMemory::from_untrusted_fd(file.into(), 8192).is_err());
    }

    #[test]
    fn memory_for_readers_is_written_by_its_maker_alone() {
        let (memory, own) =
            SealedMemory::new_growable_read_only_export("test", 8192, 1 << 20).unwrap();
        let theirs = SealedMemory { descriptor: duplicate(&memory), length: 8192 };
        assert!(theirs.map(Protection::ReadWrite).is_err());
        let view = SealedMemory::map_first_page_of_untrusted_fd(duplicate(&memory)).unwrap();
        assert_eq!(view.len(), super::super::pages::page_bytes());
        // SAFETY: both mappings have at least one page, and only this thread accesses them.
        unsafe {
            own.as_ptr().write_volatile(7);
            assert_eq!(view.as_ptr().read_volatile(), 7);
        }
    }

    #[test]
    fn what_its_maker_grows_exists_for_readers_too() {
        let max_length = 1 << 20;
        let (memory, own) =
            SealedMemory::new_growable_read_only_export("test", 4096, max_length).unwrap();
        let first = SealedMemory::map_first_page_of_untrusted_fd(duplicate(&memory)).unwrap();
        let view = first.extend(max_length).unwrap();
        drop(first);
        for mapping in [&own, &view] {
            assert!(mapping.exists(0) && mapping.exists(4095));
            assert!(
                !mapping.exists(4096)
                    && !mapping.exists(max_length - 1)
                    && !mapping.exists(max_length)
            );
        }
        // Growing by a reader does not affect the owner.
        rustix::fs::ftruncate(&memory, 8192).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 4096).is_err());
        for length in [4096, 16384] {
            memory.grow_to(length).unwrap();
        }
        // SAFETY: both mappings are backed up to this offset, and only this thread accesses them.
        unsafe {
            own.as_ptr().add(16383).write_volatile(7);
            assert_eq!(view.as_ptr().add(16383).read_volatile(), 7);
        }
        assert!(view.exists(16383) && !view.exists(16384));
    }

    #[test]
    fn memory_that_can_be_shrunk_or_is_empty_is_not_taken_from_others() {
        let memfd = |length, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memory = rustix::fs::memfd_create("test", flags).unwrap();
            rustix::fs::ftruncate(&memory, length).unwrap();
            rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
            memory
        };
        for (length, seals) in [(8192, SealFlags::GROW), (0, SealFlags::SHRINK)] {
            let memory = memfd(length, seals);
            assert!(SealedMemory::map_first_page_of_untrusted_fd(memory).is_err());
        }
    }

    #[test]
    fn a_view_that_is_extended_cannot_be_written() {
        let (memory, _own) =
            SealedMemory::new_growable_read_only_export("test", 4096, 1 << 20).unwrap();
        let first = SealedMemory::map_first_page_of_untrusted_fd(duplicate(&memory)).unwrap();
        let view = first.extend(1 << 20).unwrap();
        let protection = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        // SAFETY: nothing accesses the page, whether or not its protection changes.
        let changed = unsafe { rustix::mm::mprotect(view.as_ptr().cast(), 4096, protection) };
        assert!(changed.is_err());
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_for_writing() {
        let memory = SealedMemory::new("test", 8192).unwrap();
        let shared = SealedMemory::from_untrusted_fd(memory.read_only().unwrap(), 8192).unwrap();
        assert!(shared.map(Protection::ReadWrite).is_err());
        assert!(shared.map(Protection::ReadOnly).is_ok());
    }
}
