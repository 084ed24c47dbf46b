//! The tree of installed files. Each file is written under a temporary name and then renamed, so
//! that programs that use an older version of it are not disturbed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// The kind of a file, which determines its mode and how it is stripped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Program,
    SharedLibrary,
    StaticLibrary,
    Data,
}

impl FileKind {
    fn mode(self) -> u32 {
        match self {
            Self::Program => 0o755,
            Self::SharedLibrary | Self::StaticLibrary | Self::Data => 0o644,
        }
    }

    /// The option of `strip` that keeps what linkers and loaders need.
    fn strip_option(self) -> Option<&'static str> {
        match self {
            Self::Program | Self::SharedLibrary => Some("--strip-unneeded"),
            Self::StaticLibrary => Some("--strip-debug"),
            Self::Data => None,
        }
    }
}

/// Files below a folder, with the list of added files.
#[derive(Debug)]
pub(crate) struct Tree {
    root: PathBuf,
    strip: bool,
    files: Vec<String>,
}

impl Tree {
    pub(crate) fn new(root: &Path, strip: bool) -> Self {
        Self { root: root.to_owned(), strip, files: Vec::new() }
    }

    /// Adds a copy of a file.
    pub(crate) fn copy(&mut self, from: &Path, to: &str, kind: FileKind) -> anyhow::Result<()> {
        self.add(to, kind, |file| {
            fs::copy(from, file).with_context(|| format!("{} cannot be copied", from.display()))?;
            match kind.strip_option().filter(|_| self.strip) {
                Some(option) => strip(file, option),
                None => Ok(()),
            }
        })?;
        self.files.push(to.to_owned());
        Ok(())
    }

    /// Adds a file with this text.
    pub(crate) fn write(&mut self, text: &str, to: &str) -> anyhow::Result<()> {
        self.add(to, FileKind::Data, |file| Ok(fs::write(file, text)?))?;
        self.files.push(to.to_owned());
        Ok(())
    }

    /// Adds the list of all files, including itself, and returns it.
    pub(crate) fn finish(mut self, manifest: &str) -> anyhow::Result<Vec<String>> {
        let mut files = self.files.clone();
        files.push(manifest.to_owned());
        files.sort();
        self.write(&(files.join("\n") + "\n"), manifest)?;
        Ok(files)
    }

    fn add(
        &self,
        to: &str,
        kind: FileKind,
        create: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let target = self.root.join(to);
        let folder = target.parent().context("a file is in a folder")?;
        create_folder(folder)?;
        let unfinished = tempfile::Builder::new().prefix(".memferry-").tempfile_in(folder);
        let unfinished = unfinished
            .with_context(|| format!("{} is not writable", folder.display()))?
            .into_temp_path();
        create(&unfinished)?;
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(kind.mode()))?;
        unfinished.persist(&target).with_context(|| format!("{} is not writable", target.display()))
    }
}

/// Creates a folder and its missing parents, readable for all users regardless of the umask.
fn create_folder(folder: &Path) -> anyhow::Result<()> {
    let missing: Vec<_> = folder.ancestors().take_while(|it| !it.exists()).collect();
    for folder in missing.into_iter().rev() {
        let context = || format!("{} cannot be created", folder.display());
        fs::create_dir(folder).with_context(context)?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).with_context(context)?;
    }
    Ok(())
}

fn strip(file: &Path, option: &str) -> anyhow::Result<()> {
    let status = Command::new("strip").arg(option).arg(file).status();
    let status = status.context("strip cannot be run; install binutils")?;
    ensure!(status.success(), "strip {option} failed: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_replaces_an_older_one_and_has_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        fs::write(&source, "new").unwrap();
        fs::set_permissions(&source, fs::Permissions::from_mode(0o600)).unwrap();
        let root = folder.path().join("a/b");
        let mut tree = Tree::new(&root, false);
        tree.write("old", "bin/x").unwrap();
        // A program that has the old file open continues to read the old contents.
        let opened = fs::File::open(root.join("bin/x")).unwrap();
        tree.copy(&source, "bin/x", FileKind::Program).unwrap();
        assert_eq!(std::io::read_to_string(opened).unwrap(), "old");
        assert_eq!(fs::read_to_string(root.join("bin/x")).unwrap(), "new");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&root.join("bin/x")), 0o755);
        assert_eq!(mode(&root.join("bin")), 0o755);
        assert_eq!(fs::read_dir(root.join("bin")).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_written_is_an_error_that_names_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let mut tree = Tree::new(&folder.path().join("file/below"), false);
        let error = format!("{:#}", tree.write("", "bin/x").unwrap_err());
        assert!(error.contains("file/below cannot be created"), "{error}");
    }
}
