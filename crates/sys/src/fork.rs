//! Noticing that this process is a forked child, in which the parent's threads do not exist.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &PARENT_ONLY {
        let descriptor = slot.swap(FREE, Ordering::AcqRel);
        if descriptor != FREE {
            // SAFETY: the slot names a descriptor that the parent held open when it forked; this copy
            // belongs to nobody, since its owner closes it in the parent only.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// How many forks lie between the first process that asked and this one. Whoever starts threads
/// remembers the number; when it differs later, those threads are in another process.
#[inline]
pub fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Starts counting forks; call before the first [`generation`].
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler uses atomics and `close`, both allowed between fork and exec, and a
        // function is valid for the life of the process.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// How many descriptors of this kind a process can have at a time.
pub const MOST_PARENT_ONLY: usize = 256;
const FREE: i32 = -1;
static PARENT_ONLY: [AtomicI32; MOST_PARENT_ONLY] =
    [const { AtomicI32::new(FREE) }; MOST_PARENT_ONLY];

/// A descriptor that forked children close: a copy there would keep alive what it stands for after
/// the parent closed its own.
#[derive(Debug)]
pub struct ParentOnly {
    descriptor: ManuallyDrop<OwnedFd>,
    generation: u64,
}

impl ParentOnly {
    /// Takes a descriptor over.
    ///
    /// # Errors
    /// `EMFILE` where the process has [`MOST_PARENT_ONLY`] of them.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        watch();
        let number = descriptor.as_raw_fd();
        let take = |slot: &AtomicI32| {
            slot.compare_exchange(FREE, number, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if !PARENT_ONLY.iter().any(take) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        Ok(Self { descriptor: ManuallyDrop::new(descriptor), generation: generation() })
    }

    /// Whether this process opened the descriptor. In a child its number may be another file's.
    #[inline]
    pub fn is_ours(&self) -> bool {
        generation() == self.generation
    }
}

impl AsFd for ParentOnly {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for ParentOnly {
    fn drop(&mut self) {
        if self.is_ours() {
            let own = self.descriptor.as_raw_fd();
            for slot in &PARENT_ONLY {
                let _ = slot.compare_exchange(own, FREE, Ordering::AcqRel, Ordering::Relaxed);
            }
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
    fn a_descriptor_of_the_parent_is_closed_in_a_child() {
        let event = EventFd::new().unwrap();
        let descriptor = ParentOnly::new(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let number = descriptor.as_fd().as_raw_fd();
        // SAFETY: the child asks for flags of a descriptor and ends, without touching the heap.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                let closed = libc::fcntl(number, libc::F_GETFD) == -1;
                libc::_exit(i32::from(!closed || descriptor.is_ours()));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child had it");
        assert!(descriptor.is_ours());
    }
}
