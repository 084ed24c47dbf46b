//! Cuts what is wanted of files into blocks, which the reader threads take one by one.

use std::collections::BTreeMap;

use crate::FileSource;
use crate::error::LoadError;

/// A range of a file, and the memory it goes to.
///
/// ```
/// use memferry::load::Placement;
///
/// let mut target = [0u8; 16];
/// // The bytes 100..116 of the first file.
/// let placement = Placement::new(0, 100, target.as_mut_ptr(), target.len());
/// assert_eq!(placement.length, 16);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// The number of the file among those of the load.
    pub file: usize,
    /// Where the range begins in the file.
    pub offset: u64,
    /// The target, in host or device memory.
    pub target: *mut u8,
    /// The length in bytes.
    pub length: usize,
}

impl Placement {
    /// The range of `length` bytes at `offset` of a file goes to `target`.
    pub fn new(file: usize, offset: u64, target: *mut u8, length: usize) -> Self {
        Self { file, offset, target, length }
    }
}

/// A part of a placement that lies in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Where it begins, counted from the start of the block.
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) target: TargetAddress,
}

/// An address that threads pass on. Whoever started the load keeps the memory valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TargetAddress(pub(crate) *mut u8);

// SAFETY: it is a number to the threads that pass it on; the contract of `Loader::start_raw` makes
// the memory accessible to all of them until the load is over.
unsafe impl Send for TargetAddress {}
// SAFETY: as above.
unsafe impl Sync for TargetAddress {}

/// A block of a file: the unit of reading.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) file: usize,
    /// Where the block begins in the file, a multiple of the block size.
    pub(crate) offset: u64,
    pub(crate) parts: Vec<Part>,
}

impl Block {
    /// The wanted bytes of the block, from the first to the last, counted from its start.
    pub(crate) fn wanted(&self) -> std::ops::Range<usize> {
        let start = self.parts.iter().map(|part| part.start).min().unwrap_or(0);
        let end = self.parts.iter().map(|part| part.start + part.length).max().unwrap_or(0);
        start..end
    }

    /// How many bytes are delivered from this block.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.length as u64).sum()
    }
}

/// Cuts placements into blocks of `block_bytes`, in the order of the files.
pub(crate) fn cut(
    files: &[FileSource],
    placements: &[Placement],
    block_bytes: usize,
) -> Result<Vec<Block>, LoadError> {
    let mut blocks: BTreeMap<(usize, u64), Vec<Part>> = BTreeMap::new();
    for placement in placements {
        let file = files.get(placement.file).ok_or(LoadError::OutOfRange {
            path: format!("file {}", placement.file).into(),
            from: placement.offset,
            to: placement.offset,
            length: 0,
        })?;
        let end = placement.offset.saturating_add(placement.length as u64);
        if end > file.len() {
            let (path, from, length) = (file.path().to_owned(), placement.offset, file.len());
            return Err(LoadError::OutOfRange { path, from, to: end, length });
        }
        let mut position = placement.offset;
        while position < end {
            let number = position / block_bytes as u64;
            let start = (position % block_bytes as u64) as usize;
            let length = ((end - position) as usize).min(block_bytes - start);
            let done = (position - placement.offset) as usize;
            let target = TargetAddress(placement.target.wrapping_add(done));
            let part = Part { start, length, target };
            blocks.entry((placement.file, number)).or_default().push(part);
            position += length as u64;
        }
    }
    let block = |((file, number), parts): ((usize, u64), Vec<Part>)| Block {
        file,
        offset: number * block_bytes as u64,
        parts,
    };
    Ok(blocks.into_iter().map(block).collect())
}

impl FileSource {
    /// One placement of the whole file.
    pub fn whole(&self, file: usize, target: *mut u8) -> Placement {
        Placement::new(file, 0, target, self.len() as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(bytes: usize) -> FileSource {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; bytes]).unwrap();
        FileSource::open(file.path()).unwrap()
    }

    #[test]
    fn a_range_is_cut_at_the_edges_of_blocks() {
        let base = std::ptr::without_provenance_mut::<u8>(1 << 20);
        let blocks = cut(&[file_of(100)], &[Placement::new(0, 5, base, 90)], 32).unwrap();
        let seen: Vec<_> = blocks.iter().map(|b| (b.offset, b.wanted(), b.bytes())).collect();
        assert_eq!(seen, [(0, 5..32, 27), (32, 0..32, 32), (64, 0..31, 31)]);
        assert_eq!(blocks[1].parts[0].target.0, base.wrapping_add(27));
    }

    #[test]
    fn several_ranges_in_a_block_are_read_once() {
        let base = std::ptr::without_provenance_mut::<u8>(1 << 20);
        let wanted = [Placement::new(0, 40, base, 4), Placement::new(0, 50, base, 10)];
        let blocks = cut(&[file_of(100)], &wanted, 32).unwrap();
        assert_eq!(blocks.len(), 1);
        assert_eq!((blocks[0].wanted(), blocks[0].bytes()), (8..28, 14));
    }

    #[test]
    fn a_range_past_the_end_of_the_file_is_refused() {
        let wanted = Placement::new(0, 90, std::ptr::null_mut(), 20);
        let refused = cut(&[file_of(100)], &[wanted], 32).unwrap_err();
        assert!(matches!(refused, LoadError::OutOfRange { from: 90, to: 110, length: 100, .. }));
    }

    #[test]
    fn an_empty_range_needs_no_block() {
        let wanted = Placement::new(0, 100, std::ptr::null_mut(), 0);
        assert!(cut(&[file_of(100)], &[wanted], 32).unwrap().is_empty());
    }
}
