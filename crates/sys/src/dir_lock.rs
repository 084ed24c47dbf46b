//! A lock between processes that create files of the same name. The lock is on the directory, so no
//! lock file remains. Other programs can hold it too, so every wait has a timeout.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::fault::{Call, call};

/// An exclusive lock on a directory, released on drop.
#[derive(Debug)]
pub struct DirLock(File);

impl Drop for DirLock {
    fn drop(&mut self) {
        // Explicit unlock: a child that was forked in the meantime keeps the file open, and with it
        // the lock.
        let _ = self.0.unlock();
    }
}

/// Locks the parent directory of `file`. `None` if the directory cannot be opened, or if another
/// process holds the lock for longer than `timeout`.
pub fn lock_parent_dir(file: &Path, timeout: Duration) -> Option<DirLock> {
    const RETRY_SLEEP: Duration = Duration::from_millis(2);
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    // `O_DIRECTORY`: opening a FIFO, for example, could block forever.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK);
    let dir = dir.unwrap_or(Path::new("."));
    let dir = call(Call::Open, || options.open(dir)).ok()?;
    let start = Instant::now();
    while let Err(TryLockError::WouldBlock) = dir.try_lock() {
        if start.elapsed() >= timeout {
            return None;
        }
        std::thread::sleep(RETRY_SLEEP);
    }
    Some(DirLock(dir))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_lock() {
        let file = std::env::temp_dir().join(format!("memferry-turns-{}/x", std::process::id()));
        std::fs::create_dir(file.parent().unwrap()).unwrap();
        let first = lock_parent_dir(&file, Duration::ZERO);
        assert!(first.is_some());
        assert!(lock_parent_dir(&file, Duration::from_millis(3)).is_none());
        drop(first);
        assert!(lock_parent_dir(&file, Duration::ZERO).is_some());
        std::fs::remove_dir(file.parent().unwrap()).unwrap();
    }

    #[test]
    fn what_is_no_folder_is_not_opened() {
        let pipe = std::env::temp_dir().join(format!("memferry-no-dir-{}", std::process::id()));
        let path = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the path is a string that ends with a zero byte.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        assert!(lock_parent_dir(&pipe.join("x"), Duration::ZERO).is_none());
        std::fs::remove_file(pipe).unwrap();
    }
}
