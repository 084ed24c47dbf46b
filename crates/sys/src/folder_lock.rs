//! Taking turns among processes that make files of the same name. The lock is on the folder, so that
//! nothing is left behind. Others can hold it too, so it is never waited for without an end.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::fault::{Call, call};

/// The lock on a folder, until it is dropped.
#[derive(Debug)]
pub struct FolderLock(File);

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Closing would not do: a child that was forked meanwhile has the file open too.
        let _ = self.0.unlock();
    }
}

/// Locks the folder of a file. `None` if the folder cannot be opened, or if somebody else keeps the
/// lock for longer than the patience.
pub fn lock_folder_of(file: &Path, patience: Duration) -> Option<FolderLock> {
    const NAP: Duration = Duration::from_millis(2);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    // Nothing but a folder: to open something else could take for ever.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK);
    let folder = folder.unwrap_or(Path::new("."));
    let folder = call(Call::Open, || options.open(folder)).ok()?;
    let began = Instant::now();
    while let Err(TryLockError::WouldBlock) = folder.try_lock() {
        if began.elapsed() >= patience {
            return None;
        }
        std::thread::sleep(NAP);
    }
    Some(FolderLock(folder))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_lock() {
        let file = std::env::temp_dir().join(format!("memferry-turns-{}/x", std::process::id()));
        std::fs::create_dir(file.parent().unwrap()).unwrap();
        let first = lock_folder_of(&file, Duration::ZERO);
        assert!(first.is_some());
        assert!(lock_folder_of(&file, Duration::from_millis(3)).is_none());
        drop(first);
        assert!(lock_folder_of(&file, Duration::ZERO).is_some());
        std::fs::remove_dir(file.parent().unwrap()).unwrap();
    }

    #[test]
    fn what_is_no_folder_is_not_opened() {
        let pipe = std::env::temp_dir().join(format!("memferry-no-folder-{}", std::process::id()));
        let path = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: a string that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        assert!(lock_folder_of(&pipe.join("x"), Duration::ZERO).is_none());
        std::fs::remove_file(pipe).unwrap();
    }
}
