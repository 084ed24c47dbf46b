//! The initial file system (initramfs) of the virtual machine: programs and the files that they
//! need.

mod cpio;
mod elf;
mod libraries;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::{env, fs};

use thiserror::Error;

pub use cpio::Archive;

/// The host's cache of library paths. The guest's loader needs it to find the same libraries.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// The `passwd` file of the machine, with its only user.
const USERS: &str = "root:x:0:0:root:/tmp:/bin/false\n";

/// An error while packing a program.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A file could not be read, or the archive could not be written.
    #[error("{path} could not be packed for the virtual machine: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// The file is not a program, or is a program for another platform.
    #[error("{path} is no program for x86-64 Linux")]
    NoProgram {
        /// The file.
        path: PathBuf,
    },
    /// A program needs a library that is not installed on this host.
    #[error("{path} cannot be packed for the virtual machine: {said}")]
    NoLibrary {
        /// The program.
        path: PathBuf,
        /// The loader's error.
        said: String,
    },
    /// A name or an argument is not valid UTF-8.
    #[error("{0:?} is not UTF-8, which the virtual machine needs")]
    NoText(std::ffi::OsString),
}

/// An archive of programs and their files.
#[derive(Debug)]
pub struct Initramfs<W: Write> {
    archive: Archive<W>,
    /// The packed programs, with their paths in the archive.
    programs: BTreeMap<PathBuf, String>,
    libraries: BTreeSet<PathBuf>,
}

impl<W: Write> Initramfs<W> {
    /// Creates an archive with the folders that a machine needs.
    pub fn new(output: W) -> io::Result<Self> {
        let mut archive = Archive::new(output);
        for folder in ["dev", "etc", "proc", "sys", "tmp"] {
            archive.folder(folder)?;
        }
        archive.character_device("dev/console", 0o600, 5, 1)?;
        archive.file("etc/passwd", 0o644, USERS.as_bytes())?;
        Ok(Self { archive, programs: BTreeMap::new(), libraries: BTreeSet::new() })
    }

    /// Adds a file without changes.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.archive.file(path, mode, bytes)
    }

    /// Adds a program, and the libraries that it needs at the same paths as on this host. A program
    /// that is already packed becomes a link. Parts of the file that are not loaded at run time,
    /// such as debug information, are left out, because they are often most of the file.
    pub fn program(&mut self, program: &Path, at: &str) -> Result<(), PackError> {
        let failed = |error| PackError::File { path: program.to_owned(), error };
        let program = fs::canonicalize(program).map_err(failed)?;
        if let Some(first) = self.programs.get(&program) {
            return self.archive.link(at, first).map_err(failed);
        }
        let mut bytes = fs::read(&program).map_err(failed)?;
        let loaded = elf::ElfImage::of(&bytes)
            .ok_or_else(|| PackError::NoProgram { path: program.clone() })?;
        if let Some(loader) = &loaded.loader {
            for library in libraries::of(&program, loader)? {
                self.library(&library)?;
            }
        }
        loaded.truncate(&mut bytes);
        self.archive.file(at, 0o755, &bytes).map_err(failed)?;
        self.programs.insert(program, at.to_owned());
        Ok(())
    }

    /// Completes the archive and returns the output.
    pub fn finish(self) -> io::Result<W> {
        self.archive.finish()
    }

    fn library(&mut self, path: &Path) -> Result<(), PackError> {
        if self.libraries.is_empty() && Path::new(LOADER_CACHE).exists() {
            self.copy(Path::new(LOADER_CACHE), 0o644)?;
        }
        match self.libraries.insert(path.to_owned()) {
            true => self.copy(path, 0o755),
            false => Ok(()),
        }
    }

    fn copy(&mut self, path: &Path, mode: u32) -> Result<(), PackError> {
        let name = path.to_str().ok_or_else(|| PackError::NoText(path.into()))?;
        let bytes = fs::read(path);
        let packed = bytes.and_then(|bytes| self.archive.file(name, mode, &bytes));
        packed.map_err(|error| PackError::File { path: path.to_owned(), error })
    }
}

/// The path of the running program.
pub(crate) fn this_program() -> Result<PathBuf, PackError> {
    let failed = |error| PackError::File { path: "this program".into(), error };
    env::current_exe().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::initramfs::cpio::tests::{ArchiveEntry, read};

    fn entry<'a>(entries: &'a [ArchiveEntry], name: &str) -> &'a ArchiveEntry {
        entries.iter().find(|entry| entry.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn a_program_is_packed_with_its_libraries_and_only_once() {
        let program = this_program().unwrap();
        let mut pack = Initramfs::new(Vec::new()).unwrap();
        pack.program(&program, "init").unwrap();
        pack.program(&program, "programs/0-same").unwrap();
        let entries = read(&pack.finish().unwrap());
        let init = entry(&entries, "init");
        assert_eq!(init.mode, 0o100_755);
        let whole = fs::read(&program).unwrap();
        assert!(init.bytes.len() < whole.len(), "no debugger comes along");
        assert_eq!(init.bytes[64..4096], whole[64..4096]);
        let link = entry(&entries, "programs/0-same");
        assert_eq!((link.mode, link.bytes.as_slice()), (0o120_777, b"/init".as_slice()));
        let loader = elf::ElfImage::of(&whole).unwrap().loader.unwrap();
        let loader = loader.to_str().unwrap().trim_start_matches('/');
        assert!(!entry(&entries, loader).bytes.is_empty());
        let is_libc = |entry: &&ArchiveEntry| entry.name.contains("/libc.");
        assert_eq!(entries.iter().filter(is_libc).count(), 1);
        assert_eq!(entry(&entries, "dev/console").device, (5, 1));
    }

    #[test]
    fn a_packed_program_still_runs() {
        let folder = tempfile::tempdir().unwrap();
        let mut pack = Initramfs::new(Vec::new()).unwrap();
        pack.program(&this_program().unwrap(), "init").unwrap();
        let entries = read(&pack.finish().unwrap());
        let copy = folder.path().join("copy");
        memferry_testing::write_program(&copy, &entry(&entries, "init").bytes);
        let output = std::process::Command::new(copy).arg("--list").output().unwrap();
        let list = String::from_utf8(output.stdout).unwrap();
        assert!(list.contains("a_packed_program_still_runs: test"), "{list}");
    }

    #[test]
    fn what_is_no_program_is_refused() {
        let mut pack = Initramfs::new(Vec::new()).unwrap();
        let script = tempfile::NamedTempFile::new().unwrap();
        fs::write(script.path(), "#!/bin/sh\n").unwrap();
        let refused = pack.program(script.path(), "init");
        assert!(matches!(refused, Err(PackError::NoProgram { .. })), "{refused:?}");
        let refused = pack.program(Path::new("/no/such/program"), "init");
        assert!(matches!(refused, Err(PackError::File { .. })), "{refused:?}");
    }
}
