//! A writer of cpio archives in the "newc" format, which Linux unpacks into its memory at boot.
//! Every entry is a text header, a name and the contents; header with name, and contents, are each
//! padded to four bytes.

use std::collections::BTreeSet;
use std::io::{self, Write};

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// A writer of archives. Paths may begin with a slash; missing parent folders are added.
#[derive(Debug)]
pub struct Archive<W: Write> {
    output: W,
    entries: u32,
    folders: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// Creates an archive without entries.
    pub fn new(output: W) -> Self {
        Self { output, entries: 0, folders: BTreeSet::new() }
    }

    /// Adds a folder, unless the archive already has it.
    pub fn folder(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/');
        if path.is_empty() || self.folders.contains(path) {
            return Ok(());
        }
        self.parent_folders(path)?;
        self.folders.insert(path.to_owned());
        self.entry(path, FOLDER | 0o755, (0, 0), &[])
    }

    /// Adds a regular file.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.parent_folders(path)?;
        self.entry(path, FILE | mode, (0, 0), bytes)
    }

    /// Adds a symbolic link to a path in the archive.
    pub fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parent_folders(path)?;
        let target = format!("/{}", target.trim_start_matches('/'));
        self.entry(path, LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    pub fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        major: u32,
        minor: u32,
    ) -> io::Result<()> {
        self.parent_folders(path)?;
        self.entry(path, CHARACTER_DEVICE | mode, (major, minor), &[])
    }

    /// Writes the trailer and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.output.flush()?;
        Ok(self.output)
    }

    fn parent_folders(&mut self, path: &str) -> io::Result<()> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((folder, _)) => self.folder(folder),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), bytes: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let name_length = u32::try_from(path.len() + 1).map_err(io::Error::other)?;
        self.entries += 1;
        // The fields of the "newc" header: ino, mode, uid, gid, nlink, mtime, filesize, devmajor,
        // devminor, rdevmajor, rdevminor, namesize, check.
        let fields =
            [self.entries, mode, 0, 0, 1, 0, length, 0, 0, device.0, device.1, name_length, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        header.push_str(path);
        header.push('\0');
        self.padded(header.as_bytes())?;
        self.padded(bytes)
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.output.write_all(bytes)?;
        self.output.write_all(&[0; 3][..bytes.len().next_multiple_of(4) - bytes.len()])
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq)]
    pub(in super::super) struct ArchiveEntry {
        pub(in super::super) name: String,
        pub(in super::super) mode: u32,
        pub(in super::super) device: (u32, u32),
        pub(in super::super) bytes: Vec<u8>,
    }

    /// Reads an archive as the kernel's documentation describes the format.
    pub(in super::super) fn read(mut archive: &[u8]) -> Vec<ArchiveEntry> {
        let mut entries = Vec::new();
        let mut take = |length: usize| {
            let (taken, rest) = archive.split_at(length);
            archive = rest;
            taken.to_vec()
        };
        loop {
            let header = String::from_utf8(take(110)).unwrap();
            assert_eq!(&header[..6], "070701");
            let field = |number: usize| {
                let digits = &header[6 + 8 * number..][..8];
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (length, name_length) = (field(6) as usize, field(11) as usize);
            let name = take((110 + name_length).next_multiple_of(4) - 110);
            assert!(name[name_length - 1..].iter().all(|&byte| byte == 0));
            let name = String::from_utf8(name[..name_length - 1].to_vec()).unwrap();
            let mut bytes = take(length.next_multiple_of(4));
            bytes.truncate(length);
            if name == "TRAILER!!!" {
                return entries;
            }
            entries.push(ArchiveEntry {
                name,
                mode: field(1),
                device: (field(9), field(10)),
                bytes,
            });
        }
    }

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.file("/lib/x/libfour.so", 0o755, b"four").unwrap();
        archive.file("lib/x/odd", 0o644, b"seven b").unwrap();
        archive.folder("lib").unwrap();
        archive.link("/programs/0-a", "init").unwrap();
        archive.character_device("dev/console", 0o600, 5, 1).unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn an_archive_holds_what_was_put_in_with_folders_before_what_is_in_them() {
        let entries = read(&sample());
        let names: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.mode)).collect();
        assert_eq!(
            names,
            [
                ("lib", 0o040_755),
                ("lib/x", 0o040_755),
                ("lib/x/libfour.so", 0o100_755),
                ("lib/x/odd", 0o100_644),
                ("programs", 0o040_755),
                ("programs/0-a", 0o120_777),
                ("dev", 0o040_755),
                ("dev/console", 0o020_600),
            ]
        );
        assert_eq!(entries[3].bytes, b"seven b");
        assert_eq!(entries[5].bytes, b"/init");
        assert_eq!(entries[7].device, (5, 1));
    }

    #[test]
    fn the_program_cpio_reads_an_archive_of_ours() {
        use std::process::{Command, Stdio};
        let command = |name: &str, first: &str| {
            let mut command = Command::new(name);
            if !first.is_empty() {
                command.arg(first);
            }
            command.args(["-i", "-t"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.stderr(Stdio::null()).spawn()
        };
        let mut reader = match command("cpio", "").or_else(|_| command("busybox", "cpio")) {
            Ok(reader) => reader,
            Err(error) => {
                let why = format!("neither cpio nor busybox runs: {error}: apt install cpio");
                return memferry_testing::skip(memferry_testing::Requirement::Cpio, why);
            }
        };
        reader.stdin.take().unwrap().write_all(&sample()).unwrap();
        let output = reader.wait_with_output().unwrap();
        assert!(output.status.success());
        let names = String::from_utf8(output.stdout).unwrap();
        assert!(names.contains("lib/x/odd\n") && names.contains("dev/console\n"), "{names}");
    }

    #[test]
    fn the_same_files_make_the_same_archive() {
        assert_eq!(sample(), sample());
    }
}
