//! Memory that several processes map: sealed memfds, which nobody can shrink under a reader.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fault::{Call, call};

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading alone.
    Read,
    /// Reading and writing.
    Write,
}

/// A memfd that is sealed against shrinking, so that a mapping of it can never lose its pages, and
/// against growing, unless it was made to grow.
#[derive(Debug)]
pub struct SealedMemory {
    descriptor: OwnedFd,
    length: usize,
}

impl SealedMemory {
    /// Zeroed memory of `length` bytes, rounded up to whole pages.
    pub fn new(name: &str, length: usize) -> io::Result<Self> {
        let this = Self::unsealed(name, length)?;
        add_seals(&this.descriptor, Self::SEALS | SealFlags::SEAL)?;
        Ok(this)
    }

    fn unsealed(name: &str, length: usize) -> io::Result<Self> {
        let length = whole_pages(length)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Newer kernels warn about memfds that do not say whether they are programs.
        let create = |flags| call(Call::MemfdCreate, || rustix::fs::memfd_create(name, flags));
        let descriptor = create(flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| create(flags))?;
        grow(&descriptor, length)?;
        // Whoever is given it for reading must not be able to open it again for writing.
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        call(Call::Fchmod, || rustix::fs::fchmod(&descriptor, mode))?;
        Ok(Self { descriptor, length })
    }

    /// Memory that begins with `first` bytes and can grow up to `most`, mapped here for writing;
    /// whoever is given the descriptor can only read it. The mapping has room for `most` bytes, of
    /// which only those exist that the memory has been grown to.
    pub fn growing_for_readers(
        name: &str,
        first: usize,
        most: usize,
    ) -> io::Result<(Self, Mapping)> {
        let this = Self::unsealed(name, first)?;
        let mapping = this.map_ahead(Access::Write, whole_pages(most)?)?;
        // Before Linux 5.1 readers are only trusted not to write.
        let _ = add_seals(&this.descriptor, SealFlags::FUTURE_WRITE);
        add_seals(&this.descriptor, SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok((this, mapping))
    }

    /// Makes it at least `length` bytes long, if it was made to grow. [`SealedMemory::len`] says
    /// what it began with.
    pub fn grow_to(&self, length: usize) -> io::Result<()> {
        let length = whole_pages(length)?;
        // Whoever has the descriptor can grow it too, and nobody can shrink it.
        if (stat(&self.descriptor)?.st_size as u64) < length as u64 {
            grow(&self.descriptor, length)?;
        }
        Ok(())
    }

    /// Maps memory that came from elsewhere and may grow there, for reading. The mapping has room
    /// for `most` bytes; returned with it is how many of them exist now.
    pub fn map_growing_foreign(descriptor: OwnedFd, most: usize) -> io::Result<(Mapping, usize)> {
        check_foreign(&descriptor, SealFlags::SHRINK)?;
        let most = whole_pages(most)?;
        let length = stat(&descriptor)?.st_size;
        let length = usize::try_from(length).unwrap_or(0).min(most);
        if length < super::pages::page_bytes() {
            return Err(refuse("a memfd without a page"));
        }
        let mapping = Self { descriptor, length }.map_ahead(Access::Read, most)?;
        Ok((mapping, length))
    }

    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// Takes a descriptor that came from elsewhere, if it is what it must be: memory (not a file,
    /// not huge pages that can run out under a reader), sealed, and of the length that was said.
    pub fn from_foreign(descriptor: OwnedFd, length: usize) -> io::Result<Self> {
        check_foreign(&descriptor, Self::SEALS)?;
        if stat(&descriptor)?.st_size != length as i64 || length == 0 {
            return Err(refuse("a memfd of another length than was said"));
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
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(call(Call::Open, || rustix::fs::open(path, flags, Mode::empty()))?)
    }

    /// Maps all of it.
    pub fn map(&self, access: Access) -> io::Result<Mapping> {
        let mapping = self.map_ahead(access, self.length)?;
        // SAFETY: advice on a mapping just made; a refusal changes nothing but speed.
        let _ = unsafe { madvise(mapping.as_ptr().cast(), mapping.len(), Advice::LinuxHugepage) };
        Ok(mapping)
    }

    /// Maps it with room for `length` bytes, though it may not have as many yet.
    fn map_ahead(&self, access: Access, length: usize) -> io::Result<Mapping> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
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

fn refuse(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Whether a descriptor is of memory (not a file, not huge pages that can run out under a reader)
/// with these seals.
fn check_foreign(descriptor: &OwnedFd, needed: SealFlags) -> io::Result<()> {
    use rustix::io::Errno;
    const TMPFS: u64 = 0x0102_1994;
    let seals = call(Call::GetSeals, || rustix::fs::fcntl_get_seals(descriptor));
    let seals = seals.map_err(|error| match error {
        Errno::INVAL | Errno::BADF => refuse("not a memfd"),
        error => error.into(),
    })?;
    if !seals.contains(needed) {
        return Err(refuse("a memfd that is not sealed against shrinking"));
    }
    let is_ordinary = match call(Call::Fstatfs, || rustix::fs::fstatfs(descriptor)) {
        Ok(found) => found.f_type as u64 == TMPFS,
        // Filters of system calls may refuse it. All memfds on ordinary pages are on one device.
        Err(_) => stat(descriptor)?.st_dev == device_of_memfds()?,
    };
    if is_ordinary { Ok(()) } else { Err(refuse("a memfd that is not on ordinary pages")) }
}

/// The device that the kernel keeps memfds on.
fn device_of_memfds() -> io::Result<u64> {
    static DEVICE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
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

    /// Whether the page of a byte exists: asked of the kernel, for mappings with room for more than
    /// there is. Touching a byte that does not exist ends the process.
    pub fn exists(&self, offset: usize) -> bool {
        if offset >= self.length {
            return false;
        }
        let page = super::pages::page_bytes();
        let word = self.start.as_ptr().wrapping_add(offset - offset % page).cast::<u32>();
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the kernel reads a word of this mapping, or says that it cannot; it waits for no
        // time if the value happens to be this one. The time is a local variable.
        let result =
            unsafe { libc::syscall(libc::SYS_futex, word, operation, 0x5EED_5EEDu32, &now) };
        result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
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
        let (memory, own) = SealedMemory::growing_for_readers("test", 8192, 1 << 20).unwrap();
        let theirs = SealedMemory { descriptor: duplicate(&memory), length: 8192 };
        assert!(theirs.map(Access::Write).is_err());
        let (view, length) =
            SealedMemory::map_growing_foreign(duplicate(&memory), 1 << 20).unwrap();
        assert_eq!(length, 8192);
        // SAFETY: both mappings have at least a page, and only this thread touches them.
        unsafe {
            own.as_ptr().write_volatile(7);
            assert_eq!(view.as_ptr().read_volatile(), 7);
        }
    }

    #[test]
    fn what_its_maker_grows_exists_for_readers_too() {
        let most = 1 << 20;
        let (memory, own) = SealedMemory::growing_for_readers("test", 4096, most).unwrap();
        let (view, _) = SealedMemory::map_growing_foreign(duplicate(&memory), most).unwrap();
        for mapping in [&own, &view] {
            assert!(mapping.exists(0) && mapping.exists(4095));
            assert!(!mapping.exists(4096) && !mapping.exists(most - 1) && !mapping.exists(most));
        }
        // A reader that grows it changes nothing for its maker.
        rustix::fs::ftruncate(&memory, 8192).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 4096).is_err());
        for length in [4096, 16384] {
            memory.grow_to(length).unwrap();
        }
        // SAFETY: both mappings exist up to there now, and only this thread touches them.
        unsafe {
            own.as_ptr().add(16383).write_volatile(7);
            assert_eq!(view.as_ptr().add(16383).read_volatile(), 7);
        }
        assert!(view.exists(16383) && !view.exists(16384));
        let sealed = SealedMemory::new("test", 8192).unwrap();
        assert_eq!(SealedMemory::map_growing_foreign(duplicate(&sealed), most).unwrap().1, 8192);
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
            assert!(SealedMemory::map_growing_foreign(memfd(length, seals), 1 << 20).is_err());
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
