//! The memory of a message: one piece or several, as addresses and lengths, never as references.

use memferry_sys::cross_memory::Stretch;

/// The most pieces that one message may have.
pub const MOST_PIECES: usize = 1024;

/// A piece of memory of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins.
    pub address: *mut u8,
    /// How many bytes it has.
    pub length: usize,
}

// SAFETY: a piece is an address; whoever uses it answers for what is there.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// A piece that is written to.
    pub fn target(address: *mut u8, length: usize) -> Self {
        Self { address, length }
    }

    /// A piece that is only read.
    pub fn source(address: *const u8, length: usize) -> Self {
        Self { address: address.cast_mut(), length }
    }

    fn stretch(self) -> Stretch {
        Stretch { address: self.address as usize, length: self.length }
    }
}

/// All pieces of a message. One is by far the most common number, and needs no allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pieces<T = Piece> {
    /// A single piece.
    One(T),
    /// Any number.
    Many(Box<[T]>),
}

impl<T: Copy> Pieces<T> {
    /// From a list.
    pub fn new(pieces: &[T]) -> Self {
        match pieces {
            [piece] => Self::One(*piece),
            _ => Self::Many(pieces.into()),
        }
    }

    /// The list.
    pub fn as_slice(&self) -> &[T] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

/// Something that has a length and can be cut.
pub(crate) trait Cut: Copy {
    /// How many bytes it has.
    fn length(&self) -> usize;
    /// The part from `offset` on, `length` bytes long.
    fn part(&self, offset: usize, length: usize) -> Self;
}

impl Cut for Piece {
    fn length(&self) -> usize {
        self.length
    }

    fn part(&self, offset: usize, length: usize) -> Self {
        Self { address: self.address.wrapping_add(offset), length }
    }
}

impl Cut for Stretch {
    fn length(&self) -> usize {
        self.length
    }

    fn part(&self, offset: usize, length: usize) -> Self {
        Self { address: self.address.wrapping_add(offset), length }
    }
}

/// The pieces, or parts of them, that make up the bytes from `offset` on, `length` of them.
pub(crate) fn range<T: Cut>(
    pieces: &[T],
    offset: u64,
    length: u64,
) -> impl Iterator<Item = T> + Clone + '_ {
    let (mut skip, mut left) = (offset, length);
    pieces.iter().filter_map(move |piece| {
        let own = piece.length() as u64;
        if skip >= own {
            skip -= own;
            return None;
        }
        let take = (own - skip).min(left);
        let part = piece.part(skip as usize, take as usize);
        (skip, left) = (0, left - take);
        (take > 0).then_some(part)
    })
}

/// The same as [`range`], for system calls.
pub(crate) fn stretches(pieces: &[Piece], offset: u64, length: u64) -> Vec<Stretch> {
    range(pieces, offset, length).map(Piece::stretch).collect()
}

/// The bytes of all pieces together.
pub(crate) fn total(pieces: &[Piece]) -> Option<u64> {
    pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.length as u64))
}

/// Copies `length` bytes to the pieces from `offset` on.
///
/// # Safety
/// The pieces must be valid for writes there, and `source` for reads; they must not overlap.
pub(crate) unsafe fn scatter(pieces: &[Piece], offset: u64, source: *const u8, length: usize) {
    let mut from = source;
    for part in range(pieces, offset, length as u64) {
        // SAFETY: the parts add up to at most `length` bytes, of memory the caller vouches for.
        unsafe {
            std::ptr::copy_nonoverlapping(from, part.address, part.length);
            from = from.add(part.length);
        }
    }
}

/// Copies `length` bytes from the pieces from `offset` on.
///
/// # Safety
/// The pieces must be valid for reads there, and `target` for writes; they must not overlap.
pub(crate) unsafe fn gather(pieces: &[Piece], offset: u64, target: *mut u8, length: usize) {
    let mut to = target;
    for part in range(pieces, offset, length as u64) {
        // SAFETY: as in `scatter`.
        unsafe {
            std::ptr::copy_nonoverlapping(part.address, to, part.length);
            to = to.add(part.length);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_from_the_pieces_it_touches() {
        let pieces: Vec<_> = [(100, 10), (200, 0), (300, 5), (400, 20)]
            .map(|(address, length)| Stretch { address, length })
            .to_vec();
        let cut = |offset, length| -> Vec<(usize, usize)> {
            range(&pieces, offset, length).map(|s| (s.address, s.length)).collect()
        };
        assert_eq!(cut(0, 35), [(100, 10), (300, 5), (400, 20)]);
        assert_eq!(cut(9, 3), [(109, 1), (300, 2)]);
        assert_eq!(cut(15, 4), [(400, 4)]);
        assert_eq!(cut(30, 100), [(415, 5)]);
        assert_eq!(cut(35, 1), []);
        assert_eq!(cut(3, 0), []);
    }

    #[test]
    fn scatter_and_gather_are_each_others_inverse() {
        let bytes: Vec<u8> = (0..100).collect();
        let mut memory = vec![0u8; 300];
        let at = memory.as_mut_ptr();
        let pieces =
            [(200, 30), (0, 50), (90, 20)].map(|(o, l)| Piece::target(at.wrapping_add(o), l));
        let mut back = vec![0u8; 60];
        // SAFETY: pieces lie in `memory`, and are apart from the other two vectors.
        unsafe {
            scatter(&pieces, 0, bytes.as_ptr(), 100);
            gather(&pieces, 20, back.as_mut_ptr(), 60);
        }
        assert_eq!(back, bytes[20..80]);
    }
}
