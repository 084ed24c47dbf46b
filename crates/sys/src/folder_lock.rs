//! Taking turns among processes that make files of the same name. The lock is on the folder, so that
//! nothing is left behind.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

/// Locks the folder of a file until the returned handle is dropped. `None` if the folder cannot be
/// opened, or if somebody else keeps the lock for longer than the patience.
pub fn lock_folder_of(file: &Path, patience: Duration) -> Option<File> {
    const NAP: Duration = Duration::from_millis(2);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new("."))).ok()?;
    let began = Instant::now();
    while let Err(TryLockError::WouldBlock) = folder.try_lock() {
        if began.elapsed() >= patience {
            return None;
        }
        std::thread::sleep(NAP);
    }
    Some(folder)
}
