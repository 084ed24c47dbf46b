//! Folder for the files of candidates: compiled programs, sockets, service files. It is removed
//! when the bench ends, with all shared memory that is named after it. A bench that is killed
//! cannot remove it, so a janitor process waits for the end of the bench.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "memferry-bench-";
/// Directory of named shared memory.
const SHARED_MEMORY: &str = "/dev/shm";
/// Script of the janitor: reads until the bench ends in any manner, and waits 1 s for its children
/// to exit.
const JANITOR: &str = "trap '' HUP INT TERM; read end; sleep 1; rm -rf -- \"$1\" \"$2\".*";

/// Folder with a unique name, and the shared memory whose names begin with the same name.
#[derive(Debug)]
pub(crate) struct TempWorkspace {
    folder: PathBuf,
    name: String,
    dir_count: AtomicU32,
    janitor: Child,
}

/// Subfolder for one group, and a unique name for it.
#[derive(Debug)]
pub(crate) struct GroupDir {
    pub(crate) folder: PathBuf,
    pub(crate) name: String,
}

impl TempWorkspace {
    /// Creates a folder among the temporary files.
    pub(crate) fn new() -> io::Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("{PREFIX}{}-{number}", std::process::id());
            let folder = std::env::temp_dir().join(&name);
            match DirBuilder::new().mode(0o700).create(&folder) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            let janitor = spawn_janitor(&folder, &name).inspect_err(|_| remove(&folder, &name))?;
            return Ok(Self { folder, name, dir_count: AtomicU32::new(0), janitor });
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates a subfolder and a name for one group.
    pub(crate) fn group_dir(&self) -> io::Result<GroupDir> {
        let number = self.dir_count.fetch_add(1, Ordering::Relaxed).to_string();
        let room =
            GroupDir { folder: self.folder.join(&number), name: format!("{}.{number}", self.name) };
        fs::create_dir(&room.folder)?;
        Ok(room)
    }
}

impl Drop for TempWorkspace {
    fn drop(&mut self) {
        remove(&self.folder, &self.name);
        let _ = self.janitor.kill().and_then(|()| self.janitor.wait());
    }
}

fn spawn_janitor(folder: &Path, name: &str) -> io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", JANITOR, "janitor"])
        .args([folder, &Path::new(SHARED_MEMORY).join(name)])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A process group of its own, so that the terminal's signals to the bench do not reach the
        // janitor.
        .process_group(0)
        .spawn()
}

fn remove(folder: &Path, name: &str) {
    let is_ours = |file: &str| file.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    for entry in fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_ours) {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir_all(folder);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_scratch_folder_goes_with_its_owner() {
        let scratch = TempWorkspace::new().unwrap();
        let (first, second) = (scratch.group_dir().unwrap(), scratch.group_dir().unwrap());
        assert_ne!(first.name, second.name);
        fs::write(first.folder.join("something"), "left").unwrap();
        let folder = scratch.folder().to_owned();
        assert!(first.folder.starts_with(&folder));
        drop(scratch);
        assert!(!folder.exists());
    }

    #[test]
    fn the_janitor_tidies_up_after_an_owner_that_cannot() {
        let mut scratch = TempWorkspace::new().unwrap();
        let room = scratch.group_dir().unwrap();
        let shared = Path::new(SHARED_MEMORY).join(format!("{}_segment", room.name));
        let has_shared_memory = fs::write(&shared, "left").is_ok();
        // Closes the pipe, as the kernel does when a bench is killed.
        drop(scratch.janitor.stdin.take());
        let deadline = Instant::now() + Duration::from_secs(60);
        while scratch.folder().exists() || (has_shared_memory && shared.exists()) {
            assert!(Instant::now() < deadline, "nobody came");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
