//! As much of the ELF format as `memferry run` reads: the loader and the libraries of a program, and the
//! names of its functions. Files may be damaged: whatever lies outside of the file is not there.

/// A 64-bit little-endian file for x86.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elf<'a> {
    bytes: &'a [u8],
}

/// A function or an object with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) name: String,
}

const INTERPRETER: u64 = 3;
const LOADED: u64 = 1;
const DYNAMIC: u64 = 2;
const NEEDED: u64 = 1;
const STRING_TABLE: u64 = 5;
const X86_64: u64 = 62;
const SYMBOL_TABLES: [u64; 2] = [2, 11];
const SYMBOL_BYTES: usize = 24;

impl<'a> Elf<'a> {
    /// `None` for any other file.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let elf = Self { bytes };
        let is_ours = bytes.starts_with(b"\x7fELF\x02\x01") && elf.number(18, 2)? == X86_64;
        is_ours.then_some(elf)
    }

    /// The path of the loader; `None` for a program that is linked statically.
    pub(super) fn interpreter(&self) -> Option<String> {
        let (offset, length) = self.segments().find(|it| it.kind == INTERPRETER)?.in_file();
        let text = self.part(offset, length)?;
        Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
    }

    /// The names of the libraries that the program needs.
    pub(super) fn needed(&self) -> Vec<String> {
        let Some(dynamic) = self.segments().find(|it| it.kind == DYNAMIC) else {
            return Vec::new();
        };
        let (offset, length) = dynamic.in_file();
        let entries: Vec<(u64, u64)> = (0..length / 16)
            .map_while(|index| {
                let at = offset.checked_add(16 * index)?;
                Some((self.number(at, 8)?, self.number(at.checked_add(8)?, 8)?))
            })
            .collect();
        let strings = entries.iter().find(|(tag, _)| *tag == STRING_TABLE);
        let Some(strings) = strings.and_then(|(_, address)| self.offset_of(*address)) else {
            return Vec::new();
        };
        let names = entries.iter().filter(|(tag, _)| *tag == NEEDED);
        names.filter_map(|(_, at)| self.text(strings.checked_add(*at as usize)?)).collect()
    }

    /// All defined symbols, sorted by address.
    pub(super) fn symbols(&self) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (kind, offset, length, link) in self.sections() {
            let strings = self.sections().nth(link).map(|(_, offset, ..)| offset);
            let (true, Some(strings)) = (SYMBOL_TABLES.contains(&kind), strings) else { continue };
            let count = length / SYMBOL_BYTES;
            symbols.extend(
                (0..count)
                    .map_while(|index| {
                        let at = offset.checked_add(SYMBOL_BYTES * index)?;
                        let name = self.text(strings.checked_add(self.number(at, 4)? as usize)?)?;
                        let section = self.number(at.checked_add(6)?, 2)?;
                        let start = self.number(at.checked_add(8)?, 8)?;
                        let bytes = self.number(at.checked_add(16)?, 8)?;
                        Some((section != 0 && !name.is_empty()).then_some(Symbol {
                            start,
                            bytes,
                            name,
                        }))
                    })
                    .flatten(),
            );
        }
        symbols.sort_by(|one, other| (one.start, &one.name).cmp(&(other.start, &other.name)));
        symbols
    }

    fn segments(&self) -> impl Iterator<Item = Segment> {
        let table = self.number(32, 8).unwrap_or(0) as usize;
        let count = self.number(56, 2).unwrap_or(0) as usize;
        (0..count).map_while(move |index| {
            let at = table.checked_add(56 * index)?;
            let word = |offset: usize| self.number(at.checked_add(offset)?, 8);
            let kind = self.number(at, 4)?;
            Some(Segment { kind, offset: word(8)?, address: word(16)?, length: word(32)? })
        })
    }

    /// Kind, offset, length and link of each section.
    fn sections(&self) -> impl Iterator<Item = (u64, usize, usize, usize)> {
        let table = self.number(40, 8).unwrap_or(0) as usize;
        let count = self.number(60, 2).unwrap_or(0) as usize;
        (0..count).map_while(move |index| {
            let at = table.checked_add(64 * index)?;
            let word = |offset: usize, bytes| self.number(at.checked_add(offset)?, bytes);
            let (offset, length) = (word(24, 8)? as usize, word(32, 8)? as usize);
            Some((word(4, 4)?, offset, length.min(self.bytes.len()), word(40, 4)? as usize))
        })
    }

    /// The offset in the file of an address in memory.
    fn offset_of(&self, address: u64) -> Option<usize> {
        let contains = |it: &Segment| {
            it.kind == LOADED && address.checked_sub(it.address).is_some_and(|at| at < it.length)
        };
        let segment = self.segments().find(contains)?;
        Some((address - segment.address).checked_add(segment.offset)? as usize)
    }

    fn text(&self, at: usize) -> Option<String> {
        let rest = self.bytes.get(at..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn number(&self, at: usize, bytes: usize) -> Option<u64> {
        let part = self.part(at, bytes)?;
        Some(part.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }

    fn part(&self, at: usize, bytes: usize) -> Option<&'a [u8]> {
        self.bytes.get(at..at.checked_add(bytes)?)
    }
}

/// A part of the file that is loaded or read by the loader.
struct Segment {
    kind: u64,
    offset: u64,
    address: u64,
    length: u64,
}

impl Segment {
    fn in_file(&self) -> (usize, usize) {
        (self.offset as usize, self.length as usize)
    }
}

/// The name of the place at an address, among symbols that are sorted by address.
pub(super) fn name_at(symbols: &[Symbol], address: u64) -> Option<&str> {
    let behind = symbols.partition_point(|symbol| symbol.start <= address);
    let before = symbols[..behind].iter().rev().take(16);
    before
        .clone()
        .find(|symbol| address - symbol.start < symbol.bytes)
        .map(|symbol| symbol.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_has_a_loader_libraries_and_names() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let elf = Elf::parse(&bytes).unwrap();
        assert!(elf.interpreter().unwrap().contains("ld-linux"));
        assert!(elf.needed().iter().any(|name| name.starts_with("libc.so")), "{:?}", elf.needed());
        let symbols = elf.symbols();
        let main = symbols.iter().find(|symbol| symbol.name == "main").unwrap();
        assert_eq!(name_at(&symbols, main.start + main.bytes - 1), Some("main"));
    }

    #[test]
    fn a_damaged_file_has_less_and_stops_nobody() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [0, 4, 17, 20, 64, 100, 1000, bytes.len() / 2] {
            if let Some(elf) = Elf::parse(&bytes[..length]) {
                let _ = (elf.interpreter(), elf.needed(), elf.symbols());
            }
        }
        let mut wrong = bytes[..4096].to_vec();
        wrong[32..64].fill(0xFF);
        let elf = Elf::parse(&wrong).unwrap();
        assert_eq!((elf.interpreter(), elf.needed().len()), (None, 0));
        assert!(Elf::parse(b"#!/bin/sh").is_none());
    }

    #[test]
    fn a_place_between_two_functions_has_no_name() {
        let symbol = |start, bytes, name: &str| Symbol { start, bytes, name: name.into() };
        let symbols = [symbol(100, 10, "a"), symbol(120, 30, "b"), symbol(130, 0, "label")];
        assert_eq!(name_at(&symbols, 105), Some("a"));
        assert_eq!(name_at(&symbols, 115), None);
        assert_eq!(name_at(&symbols, 140), Some("b"));
        assert_eq!(name_at(&symbols, 99), None);
    }
}
