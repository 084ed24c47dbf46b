//! Locks on bytes of an open file, which the kernel releases when the last descriptor of that open file is closed:
//! when its process exits, at the latest. Any process with another descriptor of the file can ask for them, in
//! every pid namespace.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::fault::{Call, call_c};

fn one_byte(offset: u64, kind: libc::c_int) -> io::Result<libc::flock> {
    // SAFETY: all zeroes is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    lock.l_len = 1;
    Ok(lock)
}

/// Locks a byte. Fails with `WouldBlock` if another open file has locked it.
pub fn lock_byte(file: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
    let lock = one_byte(offset, libc::F_WRLCK)?;
    // SAFETY: the lock is valid for the call.
    let set = || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    call_c(Call::SetLock, set)
}

/// Whether another open file than this one has locked a byte.
pub fn is_byte_locked(file: BorrowedFd<'_>, offset: u64) -> io::Result<bool> {
    let mut lock = one_byte(offset, libc::F_WRLCK)?;
    // SAFETY: the lock is valid for the call, which writes to it.
    let get = || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    call_c(Call::GetLock, get)?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use memferry_testing::in_own_process;

    use super::*;
    use crate::shared_memory::SealedMemory;

    #[test]
    fn a_byte_is_locked_until_its_file_is_closed() {
        // Children that other tests fork would keep the file open.
        if !in_own_process() {
            return;
        }
        let memory = SealedMemory::new("test", 4096).unwrap();
        let (one, other) = (memory.reopen().unwrap(), memory.reopen().unwrap());
        lock_byte(one.as_fd(), 3).unwrap();
        assert!(is_byte_locked(other.as_fd(), 3).unwrap());
        assert!(!is_byte_locked(other.as_fd(), 2).unwrap());
        assert!(!is_byte_locked(one.as_fd(), 3).unwrap(), "the file's own lock");
        let error = lock_byte(other.as_fd(), 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(one);
        assert!(!is_byte_locked(other.as_fd(), 3).unwrap());
    }
}
