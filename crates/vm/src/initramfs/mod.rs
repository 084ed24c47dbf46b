//! The files that the machine finds in its memory when it starts: programs and what they need.

mod cpio;
mod elf;
mod libraries;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::{env, fs};

use thiserror::Error;

pub use cpio::Archive;

/// The list of libraries that the host's loader keeps, and the guest's needs to find the same.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// The only user of the machine.
const USERS: &str = "root:x:0:0:root:/tmp:/bin/false\n";

/// A program could not be packed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A file could not be read, or the archive could not be written.
    #[error("{path} could not be packed for the virtual machine: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It is no program, or one for another kind of machine.
    #[error("{path} is no program for x86-64 Linux")]
    NoProgram {
        /// The file.
        path: PathBuf,
    },
    /// A program needs a library that is not here.
    #[error("{path} cannot be packed for the virtual machine: {said}")]
    NoLibrary {
        /// The program.
        path: PathBuf,
        /// What the loader said about it.
        said: String,
    },
    /// A name or an argument is no text.
    #[error("{0:?} is not UTF-8, which the virtual machine needs")]
    NoText(std::ffi::OsString),
}

/// An archive that programs are packed into.
#[derive(Debug)]
pub struct Initramfs<W: Write> {
    archive: Archive<W>,
    /// Programs that are packed, and where.
    programs: BTreeMap<PathBuf, String>,
    libraries: BTreeSet<PathBuf>,
}

impl<W: Write> Initramfs<W> {
    /// An archive with the folders that a machine needs.
    pub fn new(output: W) -> io::Result<Self> {
        let mut archive = Archive::new(output);
        for folder in ["dev", "etc", "proc", "sys", "tmp"] {
            archive.folder(folder)?;
        }
        archive.character_device("dev/console", 0o600, 5, 1)?;
        archive.file("etc/passwd", 0o644, USERS.as_bytes())?;
        Ok(Self { archive, programs: BTreeMap::new(), libraries: BTreeSet::new() })
    }

    /// Packs a file as it is.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.archive.file(path, mode, bytes)
    }

    /// Packs a program, with the libraries it needs at the places where they are here. A program
    /// that is packed already becomes a link. What is not loaded to run it stays here: names for
    /// debuggers are often most of the file.
    pub fn program(&mut self, program: &Path, at: &str) -> Result<(), PackError> {
        let failed = |error| PackError::File { path: program.to_owned(), error };
        let program = fs::canonicalize(program).map_err(failed)?;
        if let Some(first) = self.programs.get(&program) {
            return self.archive.link(at, first).map_err(failed);
        }
        let mut bytes = fs::read(&program).map_err(failed)?;
        let loaded = elf::Loaded::of(&bytes)
            .ok_or_else(|| PackError::NoProgram { path: program.clone() })?;
        if let Some(loader) = &loaded.loader {
            for library in libraries::of(&program, loader)? {
                self.library(&library)?;
            }
        }
        loaded.cut(&mut bytes);
        self.archive.file(at, 0o755, &bytes).map_err(failed)?;
        self.programs.insert(program, at.to_owned());
        Ok(())
    }

    /// Ends the archive.
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

/// The program that runs now.
pub(crate) fn this_program() -> Result<PathBuf, PackError> {
    let failed = |error| PackError::File { path: "this program".into(), error };
    env::current_exe().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::initramfs::cpio::tests::{Entry, read};

    fn entry<'a>(entries: &'a [Entry], name: &str) -> &'a Entry {
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
        let loader = elf::Loaded::of(&whole).unwrap().loader.unwrap();
        let loader = loader.to_str().unwrap().trim_start_matches('/');
        assert!(!entry(&entries, loader).bytes.is_empty());
        let is_libc = |entry: &&Entry| entry.name.contains("/libc.");
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
