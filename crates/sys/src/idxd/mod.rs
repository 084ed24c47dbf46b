//! The work queues of the kernel's `idxd` driver: character devices such as `/dev/dsa/wq0.0`.
//!
//! A queue that is open shares the address space of its process with the device, so that addresses
//! in descriptors are those of the program, and nothing is pinned. Descriptors go to a mapped
//! portal; or through `write`, where the kernel does not permit the mapping: since an advisory of
//! 2024 (INTEL-SA-01084) it demands `CAP_SYS_RAWIO` for devices of the first generations.
//!
//! [`IdxdFiles`] is the seam for tests: models of a device implement it too.

mod obstacle;
pub mod sysfs;

use std::fmt::Debug;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, mmap, munmap};

use crate::fork::{CloseOnFork, OwnerProcess};
use crate::pages::page_bytes;
use crate::portal::{self, Portal, PortalWords};

pub use obstacle::QueueObstacle;

/// Error numbers of the calls below.
pub mod code {
    /// A shared queue has no space, or a dedicated queue has no space in the kernel's view.
    pub const EAGAIN: i32 = libc::EAGAIN;
    /// The user may not open the file.
    pub const EACCES: i32 = libc::EACCES;
    /// The dedicated queue is open in another process, or twice in this one.
    pub const EBUSY: i32 = libc::EBUSY;
    /// The kernel refuses the descriptor, such as a batch.
    pub const EINVAL: i32 = libc::EINVAL;
    /// The kernel refuses the mapping, or the process is a child of the one that opened the queue.
    pub const EPERM: i32 = libc::EPERM;
}

/// Opens queues.
pub trait IdxdFiles: Send + Sync + Debug {
    /// Opens a queue by the path of its file.
    fn open(&self, path: &Path) -> io::Result<Box<dyn IdxdFile>>;

    /// The name of a queue for display, such as `wq0.0`.
    fn name(&self, path: &Path) -> String {
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// How long a driver waits; see [`DmaDevice::patience`].
    ///
    /// [`DmaDevice::patience`]: crate::device::DmaDevice::patience
    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// An open queue. A portal keeps it open, too: the last drop of the two closes it, and waits for
/// everything that was submitted. After that, the device accesses no memory of the process for this
/// queue.
pub trait IdxdFile: Send + Debug {
    /// Maps the portal, for stores to a dedicated queue or for submissions to a shared one.
    ///
    /// # Errors
    /// `EPERM` if the kernel demands a capability for it; or the processor does not have the
    /// instruction.
    fn map_portal(&mut self, is_dedicated: bool) -> io::Result<Arc<Portal>>;

    /// Submits descriptors by a call of the kernel; returns how many were accepted, at least one.
    ///
    /// # Errors
    /// `EAGAIN` if the queue has no space; `EINVAL` if the kernel refuses the first descriptor.
    ///
    /// # Safety
    /// As for [`Portal::store`].
    unsafe fn write(&mut self, descriptors: &[PortalWords]) -> io::Result<usize>;
}

/// The files of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct KernelIdxdFiles;

impl IdxdFiles for KernelIdxdFiles {
    fn open(&self, path: &Path) -> io::Result<Box<dyn IdxdFile>> {
        // `std` opens files close-on-exec. A child must not keep the queue open: its close waits for
        // the device only when it is the last.
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Box::new(KernelIdxdFile(CloseOnFork::new(file.into())?)))
    }
}

#[derive(Debug)]
struct KernelIdxdFile(CloseOnFork);

impl IdxdFile for KernelIdxdFile {
    fn map_portal(&mut self, is_dedicated: bool) -> io::Result<Arc<Portal>> {
        portal::check_instruction(is_dedicated)?;
        let (rights, bytes) = (ProtFlags::WRITE, page_bytes());
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let page = unsafe {
            mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, self.0.as_fd(), 0)
        }?;
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mapping = MappedPage { page, owner: OwnerProcess::current() };
        // The driver excludes its mappings from children itself; this does not rely on it, because a
        // child that had the mapping would keep the queue open.
        // SAFETY: the mapping is this value's, and no child needs it.
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), bytes, Advice::LinuxDontFork) }?;
        // SAFETY: a page that is mapped for writing as long as the mapping exists; the instruction was
        // checked above.
        Ok(Arc::new(unsafe { Portal::mapped(page, bytes, is_dedicated, Box::new(mapping)) }))
    }

    unsafe fn write(&mut self, descriptors: &[PortalWords]) -> io::Result<usize> {
        const BYTES: usize = size_of::<PortalWords>();
        if !self.0.is_owner_process() {
            return Err(io::Error::from_raw_os_error(code::EPERM));
        }
        // SAFETY: the kernel reads the descriptors during the call; the caller guarantees what the
        // device does with them.
        let written = unsafe {
            libc::write(
                self.0.as_fd().as_raw_fd(),
                descriptors.as_ptr().cast(),
                descriptors.len() * BYTES,
            )
        };
        match usize::try_from(written) {
            Ok(written) if written >= BYTES => Ok(written / BYTES),
            Ok(_) => Err(io::Error::from_raw_os_error(code::EAGAIN)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

/// One page of the device. It is not mapped in forked children.
#[derive(Debug)]
struct MappedPage {
    page: NonNull<u8>,
    owner: OwnerProcess,
}

// SAFETY: this value owns the mapping, and does nothing but unmap it.
unsafe impl Send for MappedPage {}
// SAFETY: as above.
unsafe impl Sync for MappedPage {}

impl Drop for MappedPage {
    fn drop(&mut self) {
        if self.owner.is_current() {
            // SAFETY: this value owns the mapping, and no pointer into it exists.
            let _ = unsafe { munmap(self.page.as_ptr().cast(), page_bytes()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portal::PORTAL_STRIDE;

    #[test]
    fn a_queue_that_is_not_there_cannot_be_opened() {
        let error = KernelIdxdFiles.open(Path::new("/dev/dsa/wq250.250")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn descriptors_are_written_whole_and_counted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut queue = KernelIdxdFiles.open(file.path()).unwrap();
        let descriptors = [[1; 8], [2; 8], [3; 8]];
        // SAFETY: no device reads the file.
        assert_eq!(unsafe { queue.write(&descriptors) }.unwrap(), 3);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!((bytes.len(), bytes[0], bytes[64], bytes[128]), (192, 1, 2, 3));
    }

    #[test]
    fn a_portal_is_a_page_that_needs_no_file_and_no_child_has() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(page_bytes() as u64).unwrap();
        let mut queue = KernelIdxdFiles.open(file.path()).unwrap();
        if portal::check_instruction(true).is_err() {
            assert!(queue.map_portal(true).is_err());
            return;
        }
        let portal = queue.map_portal(true).unwrap();
        // The mapping needs no file, and no child inherits it.
        drop(queue);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let name = file.path().to_str().unwrap();
        let mut mapping = maps.lines().skip_while(|line| !line.ends_with(name));
        let flags = mapping.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
        // SAFETY: no device reads the file.
        unsafe { portal.store(2 * PORTAL_STRIDE, &[7; 8]) };
        drop(portal);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!((bytes[127], bytes[128], bytes[184], bytes[192]), (0, 7, 7, 0));
    }
}
