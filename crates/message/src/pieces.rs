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

    pub(crate) fn stretch(self) -> Stretch {
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
}

impl<T> Pieces<T> {
    /// Something else for every piece.
    pub fn map<U>(&self, mut each: impl FnMut(&T) -> U) -> Pieces<U> {
        match self {
            Self::One(piece) => Pieces::One(each(piece)),
            Self::Many(pieces) => Pieces::Many(pieces.iter().map(each).collect()),
        }
    }

    /// Something else for every piece, if there is something for all of them.
    pub fn try_map<U>(&self, mut each: impl FnMut(&T) -> Option<U>) -> Option<Pieces<U>> {
        Some(match self {
            Self::One(piece) => Pieces::One(each(piece)?),
            Self::Many(pieces) => Pieces::Many(pieces.iter().map(each).collect::<Option<_>>()?),
        })
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

/// Stretches for one system call. What does not fit waits for the next call.
pub(crate) struct Batch {
    stretches: [Stretch; Self::MOST],
    count: usize,
}

impl Batch {
    const MOST: usize = 16;

    /// The first of these.
    pub(crate) fn new(from: impl Iterator<Item = Stretch>) -> Self {
        let mut batch =
            Self { stretches: [Stretch { address: 0, length: 0 }; Self::MOST], count: 0 };
        for (to, from) in batch.stretches.iter_mut().zip(from) {
            *to = from;
            batch.count += 1;
        }
        batch
    }

    pub(crate) fn as_slice(&self) -> &[Stretch] {
        &self.stretches[..self.count]
    }
}

/// The bytes of all pieces together.
pub(crate) fn total(pieces: &[Piece]) -> Option<u64> {
    pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.length as u64))
}

/// The most bytes that [`copy_short`] copies.
const SHORT: usize = 64;

/// Copies a few bytes: in less time than it takes to call for a copy of any length.
///
/// # Safety
/// `from` must be valid for reads of `length` bytes, `to` for writes; they must not overlap.
#[inline]
unsafe fn copy_short(from: *const u8, to: *mut u8, length: usize) {
    /// Whole words from the front, and one that ends with the last byte.
    ///
    /// # Safety
    /// As for [`copy_short`]; the length must be that of a word or more.
    #[inline]
    unsafe fn words<T: Copy>(from: *const u8, to: *mut u8, length: usize) {
        let last = length - size_of::<T>();
        let mut at = 0;
        // SAFETY: every word lies inside the length, and may lie at any address.
        unsafe {
            while at < last {
                to.add(at).cast::<T>().write_unaligned(from.add(at).cast::<T>().read_unaligned());
                at += size_of::<T>();
            }
            to.add(last).cast::<T>().write_unaligned(from.add(last).cast::<T>().read_unaligned());
        }
    }
    // SAFETY: passed on.
    unsafe {
        match length {
            0 => {}
            1..=3 => words::<u8>(from, to, length),
            4..=7 => words::<u32>(from, to, length),
            _ => words::<u64>(from, to, length),
        }
    }
}

/// Copies `length` bytes to the pieces from `offset` on.
///
/// # Safety
/// The pieces must be valid for writes there, and `source` for reads; they must not overlap.
#[inline]
pub(crate) unsafe fn scatter(pieces: &[Piece], offset: u64, source: *const u8, length: usize) {
    if let [piece] = pieces
        && length <= SHORT
        && offset == 0
        && length <= piece.length
    {
        // SAFETY: the caller's promise, for a length that the piece has.
        return unsafe { copy_short(source, piece.address, length) };
    }
    // SAFETY: passed on.
    unsafe { scatter_long(pieces, offset, source, length) };
}

unsafe fn scatter_long(pieces: &[Piece], offset: u64, source: *const u8, length: usize) {
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
#[inline]
pub(crate) unsafe fn gather(pieces: &[Piece], offset: u64, target: *mut u8, length: usize) {
    if let [piece] = pieces
        && length <= SHORT
        && offset == 0
        && length <= piece.length
    {
        // SAFETY: as in `scatter`.
        return unsafe { copy_short(piece.address, target, length) };
    }
    // SAFETY: passed on.
    unsafe { gather_long(pieces, offset, target, length) };
}

unsafe fn gather_long(pieces: &[Piece], offset: u64, target: *mut u8, length: usize) {
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

    #[test]
    fn short_copies_copy_every_byte_and_no_other() {
        let bytes: Vec<u8> = (1..=SHORT as u8).collect();
        for length in 0..=SHORT {
            let mut target = [0; SHORT + 2];
            // SAFETY: both have room for the length, and are apart.
            unsafe { copy_short(bytes.as_ptr(), target.as_mut_ptr().add(1), length) };
            assert_eq!(target[1..=length], bytes[..length]);
            assert!(target[0] == 0 && target[length + 1..].iter().all(|byte| *byte == 0));
        }
    }
}
