//! An ELF reader for packing: which part of a program's file is loaded, and by which loader.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

const X86_64: u16 = 62;
const LOAD: u32 = 1;
const INTERPRETER: u32 = 3;

/// The part of a program's file that is needed to run the program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ElfImage {
    /// The dynamic loader of the program; `None` for a static program.
    pub(super) loader: Option<PathBuf>,
    /// The file offset at which the last loaded segment ends.
    end: usize,
}

impl ElfImage {
    /// Reads the headers. `None` if the file is not a program for x86-64 Linux.
    pub(super) fn of(file: &[u8]) -> Option<Self> {
        let is_64_bit_little_endian = file.get(..6)? == b"\x7fELF\x02\x01";
        if !is_64_bit_little_endian || u16_at(file, 18)? != X86_64 {
            return None;
        }
        let table = usize_at(file, 32)?;
        let (header_bytes, headers) = (u16_at(file, 54)?, u16_at(file, 56)?);
        let mut end = table.checked_add(usize::from(header_bytes) * usize::from(headers))?;
        let mut loader = None;
        for number in 0..usize::from(headers) {
            let header = file.get(table.checked_add(number * usize::from(header_bytes))?..)?;
            let part = part_of(header)?;
            let kind = u32::from_le_bytes(header.get(..4)?.try_into().ok()?);
            if kind == LOAD || kind == INTERPRETER {
                end = end.max(part.end);
            }
            if kind == INTERPRETER {
                let path = file.get(part)?.split(|&byte| byte == 0).next()?;
                loader = Some(PathBuf::from(OsStr::from_bytes(path)));
            }
        }
        (end <= file.len()).then_some(Self { loader, end })
    }

    /// Removes everything after the loaded segments, such as sections for linkers and debuggers,
    /// and clears their fields in the header.
    pub(super) fn truncate(&self, file: &mut Vec<u8>) {
        file.truncate(self.end);
        file[40..48].fill(0);
        file[58..64].fill(0);
    }
}

/// The range of the file that a program header describes.
fn part_of(header: &[u8]) -> Option<Range<usize>> {
    let (start, length) = (usize_at(header, 8)?, usize_at(header, 32)?);
    Some(start..start.checked_add(length)?)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_beginning_of_a_program_is_read_beyond_its_end() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let whole = ElfImage::of(&file).unwrap();
        for length in (0..2000).chain([whole.end - 1]) {
            assert_eq!(ElfImage::of(&file[..length]), None, "{length}");
        }
        assert_eq!(ElfImage::of(&file[..whole.end]), Some(whole));
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for at in [32, 64 + 8, 64 + 32] {
            let mut broken = file[..4096].to_vec();
            broken[at..at + 8].fill(0xff);
            assert_eq!(ElfImage::of(&broken), None, "{at}");
        }
    }
}
