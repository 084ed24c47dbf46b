//! The number of a descriptor in a static, with the file that it refers to.
//!
//! A number belongs to the whole process: a program may close one that it did not open, as daemons
//! do, or put a file of its own there, as shell scripts do. So a library compares device and inode
//! before it uses or closes a number that it has kept. Eventfds and their like share one inode:
//! these cannot be told from each other.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

const EMPTY: i32 = -1;
/// A thread writes the file, and then the number.
const CLAIMED: i32 = -2;

/// A place for a number. Everything here is async-signal-safe.
#[derive(Debug)]
pub struct DescriptorCell {
    number: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl DescriptorCell {
    /// A cell without a number.
    pub const fn empty() -> Self {
        Self { number: AtomicI32::new(EMPTY), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Stores the number of an open descriptor. Returns false if the cell has one already.
    pub fn set(&self, number: RawFd) -> bool {
        let claimed =
            self.number.compare_exchange(EMPTY, CLAIMED, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_ok() {
            let (device, inode) = file_at(number);
            self.device.store(device, Ordering::Relaxed);
            self.inode.store(inode, Ordering::Relaxed);
            self.number.store(number, Ordering::Release);
        }
        claimed.is_ok()
    }

    /// The number, if it still refers to the file.
    pub fn get(&self) -> Option<RawFd> {
        self.checked(self.number.load(Ordering::Acquire))
    }

    /// Empties the cell. Returns the number, if it still refers to the file.
    pub fn take(&self) -> Option<RawFd> {
        self.checked(self.number.swap(EMPTY, Ordering::AcqRel))
    }

    fn checked(&self, number: RawFd) -> Option<RawFd> {
        let stored = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        (number >= 0 && file_at(number) == stored).then_some(number)
    }
}

/// Device and inode of the file behind a number; zeros if it is closed, or if a filter refuses the
/// call. Where one always does, every number counts as the stored file.
fn file_at(number: RawFd) -> (u64, u64) {
    // SAFETY: zeros are a value of the structure, which is valid for writes.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        match libc::fstat(number, &mut found) {
            0 => (found.st_dev, found.st_ino),
            _ => (0, 0),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_number_with_another_file_is_not_the_stored_one() {
        let cell = DescriptorCell::empty();
        let [own, other] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        assert_eq!((cell.get(), cell.take()), (None, None));
        assert!(cell.set(own.as_raw_fd()) && !cell.set(other.as_raw_fd()));
        assert_eq!(cell.get(), Some(own.as_raw_fd()));
        // SAFETY: both numbers belong to this test.
        unsafe { libc::dup2(other.as_raw_fd(), own.as_raw_fd()) };
        assert_eq!((cell.get(), cell.take()), (None, None));
        assert!(cell.set(own.as_raw_fd()));
        assert_eq!((cell.take(), cell.get()), (Some(own.as_raw_fd()), None));
    }

    #[test]
    fn a_closed_number_is_not_the_stored_one() {
        let cell = DescriptorCell::empty();
        // No other test opens a number this high.
        let file = tempfile::tempfile().unwrap();
        // SAFETY: the new number belongs to this test.
        let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
        assert!(high >= 900 && cell.set(high));
        assert_eq!(cell.get(), Some(high));
        // SAFETY: as above.
        unsafe { libc::close(high) };
        assert_eq!((cell.get(), cell.take()), (None, None));
    }
}
