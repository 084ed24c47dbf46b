//! Forks: the parent's threads do not exist in a child, so a child uses nothing that needs them.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::descriptor_cell::DescriptorCell;

mod statics;

pub use statics::{ForkSafe, PerProcess};

/// The number of this process among its ancestors: 0 before the handler is installed, 1 in the process
/// that installs it, and one more in each child.
static GENERATION: AtomicU64 = AtomicU64::new(NO_HANDLER);
const NO_HANDLER: u64 = 0;

extern "C" fn child_handler() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    crate::stats::after_fork();
    for descriptor in CLOSE_ON_FORK.iter().filter_map(DescriptorCell::take) {
        // SAFETY: the number refers to the file that was stored in the parent. No value of the child
        // owns this copy: its owner closes it in the parent only. `close` would be a place where a
        // thread is cancelled.
        unsafe { libc::syscall(libc::SYS_close, descriptor) };
    }
}

/// Installs the fork handler. Threads that call this at the same time install it once each, and each fork counts
/// as several: a thread that waited for another one would wait for ever in a child.
#[cold]
fn install_handler() -> OwnerProcess {
    // SAFETY: the handler uses atomics and system calls, which are async-signal-safe, and a function
    // pointer is valid for the life of the process.
    let _ = unsafe { libc::pthread_atfork(None, None, Some(child_handler)) };
    let (first, relaxed) = (NO_HANDLER + 1, Ordering::Relaxed);
    let generation = GENERATION.compare_exchange(NO_HANDLER, first, relaxed, relaxed);
    OwnerProcess { generation: generation.map_or_else(|known| known, |_| first) }
}

/// The process that created a value.
///
/// Threads, peers, devices and the kernel know that process only. A forked child has a copy of the
/// value, but must neither use nor release what the value stands for: it fails with an error, or
/// leaves the copy alone. Every value that a child can inherit and that stands for more than memory
/// has an owner, and asks it first.
///
/// A child is noticed if it was made by `fork`, not by a bare `clone` system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerProcess {
    generation: u64,
}

impl OwnerProcess {
    /// The calling process. One relaxed load, after the first call.
    #[inline]
    pub fn current() -> Self {
        match GENERATION.load(Ordering::Relaxed) {
            NO_HANDLER => install_handler(),
            generation => Self { generation },
        }
    }

    /// Whether the calling process is the owner. One relaxed load.
    #[inline]
    pub fn is_current(self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }
}

/// Maximum number of close-on-fork descriptors of a process.
pub const MAX_CLOSE_ON_FORK: usize = 256;
static CLOSE_ON_FORK: [DescriptorCell; MAX_CLOSE_ON_FORK] =
    [const { DescriptorCell::empty() }; MAX_CLOSE_ON_FORK];

/// A descriptor that forked children close. An inherited copy would keep the kernel object alive
/// after the parent has closed its own. A file that the program has put at its number stays open.
#[derive(Debug)]
pub struct CloseOnFork {
    descriptor: ManuallyDrop<OwnedFd>,
    slot: &'static DescriptorCell,
    owner: OwnerProcess,
}

impl CloseOnFork {
    /// Takes ownership of a descriptor.
    ///
    /// # Errors
    /// `EMFILE` if the process has [`MAX_CLOSE_ON_FORK`] of them.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let owner = OwnerProcess::current();
        let number = descriptor.as_raw_fd();
        let slot = CLOSE_ON_FORK.iter().find(|slot| slot.set(number));
        let slot = slot.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(Self { descriptor: ManuallyDrop::new(descriptor), slot, owner })
    }

    /// Whether this process created the value. In a child the number may refer to another file.
    #[inline]
    pub fn is_owner_process(&self) -> bool {
        self.owner.is_current()
    }
}

impl AsFd for CloseOnFork {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for CloseOnFork {
    fn drop(&mut self) {
        // In a child the slot may be that of another descriptor.
        if self.is_owner_process() && self.slot.take().is_some() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::EventFd;

    #[test]
    fn a_child_is_not_the_owner_of_what_its_parent_made() {
        let owner = OwnerProcess::current();
        assert!(owner.is_current());
        // SAFETY: the child reads atomics and exits without using the heap.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_right = !owner.is_current() && OwnerProcess::current().is_current();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child created above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(owner.is_current());
    }

    /// Whether a number is open in a forked child, which is not the owner of the descriptor.
    fn is_open_in_a_child(number: i32, descriptor: &CloseOnFork) -> bool {
        // SAFETY: the child reads descriptor flags and exits without using the heap.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                let is_open = libc::fcntl(number, libc::F_GETFD) != -1;
                libc::_exit(i32::from(is_open) + 2 * i32::from(descriptor.is_owner_process()));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child created above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(descriptor.is_owner_process());
        let code = libc::WEXITSTATUS(status);
        assert!(libc::WIFEXITED(status) && code < 2, "{status}");
        code == 1
    }

    #[test]
    fn a_descriptor_of_the_parent_is_closed_in_a_child() {
        let event = EventFd::new().unwrap();
        let descriptor = CloseOnFork::new(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(!is_open_in_a_child(descriptor.as_fd().as_raw_fd(), &descriptor));
    }

    #[test]
    fn a_file_that_the_program_puts_at_the_number_stays_open() {
        let descriptor = CloseOnFork::new(tempfile::tempfile().unwrap().into()).unwrap();
        let (number, file) = (descriptor.as_fd().as_raw_fd(), tempfile::tempfile().unwrap());
        // SAFETY: the number belongs to this test, and refers to an open file again afterwards.
        unsafe { libc::dup2(file.as_raw_fd(), number) };
        assert!(is_open_in_a_child(number, &descriptor));
        drop(descriptor);
        // SAFETY: the copy of the file is this test's, and is closed once.
        assert_eq!(unsafe { libc::close(number) }, 0);
    }
}
