//! The memory of a message: one segment or several, as addresses and lengths, never as references.

use memferry_sys::cross_memory::IoVec;

/// The maximum number of segments of one message.
///
/// ```
/// use std::io::IoSlice;
///
/// use memferry::message::{Endpoint, MAX_SEGMENTS};
///
/// let endpoint = Endpoint::open("segments-doc")?;
/// let own = endpoint.self_peer()?;
/// let many = [IoSlice::new(b"x"); MAX_SEGMENTS + 1];
/// assert!(endpoint.send(own, 0, &many[..]).is_err());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub const MAX_SEGMENTS: usize = 1024;

/// A contiguous range of memory of this process.
///
/// ```
/// use memferry::message::Segment;
///
/// let bytes = [1u8; 8];
/// let segment = Segment::source(bytes.as_ptr(), bytes.len());
/// assert_eq!(segment.length, 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The address of the first byte.
    pub address: *mut u8,
    /// The length in bytes.
    pub length: usize,
}

// SAFETY: a segment is an address and a length; code that dereferences it is responsible for the
// memory.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A segment that is written.
    pub fn target(address: *mut u8, length: usize) -> Self {
        Self { address, length }
    }

    /// A segment that is only read.
    pub fn source(address: *const u8, length: usize) -> Self {
        Self { address: address.cast_mut(), length }
    }

    pub(crate) fn iovec(self) -> IoVec {
        IoVec { address: self.address as usize, length: self.length }
    }
}

/// The segments of a message. One segment, the common case, needs no allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segments<T = Segment> {
    /// One segment.
    One(T),
    /// Any other number of segments.
    Many(Box<[T]>),
}

impl<T: Copy> Segments<T> {
    /// Creates the list from a slice.
    pub fn new(segments: &[T]) -> Self {
        match segments {
            [segment] => Self::One(*segment),
            _ => Self::Many(segments.into()),
        }
    }
}

impl<T> Segments<T> {
    /// Applies a function to every segment.
    pub fn map<U>(&self, mut each: impl FnMut(&T) -> U) -> Segments<U> {
        match self {
            Self::One(segment) => Segments::One(each(segment)),
            Self::Many(segments) => Segments::Many(segments.iter().map(each).collect()),
        }
    }

    /// Applies a function to every segment. Returns `None` if the function does so for any of them.
    pub fn try_map<U>(&self, mut each: impl FnMut(&T) -> Option<U>) -> Option<Segments<U>> {
        Some(match self {
            Self::One(segment) => Segments::One(each(segment)?),
            Self::Many(segments) => {
                Segments::Many(segments.iter().map(each).collect::<Option<_>>()?)
            }
        })
    }

    /// The segments as a slice.
    pub fn as_slice(&self) -> &[T] {
        match self {
            Self::One(segment) => std::slice::from_ref(segment),
            Self::Many(segments) => segments,
        }
    }
}

/// A range that has a length and can be sliced.
pub(crate) trait Sliceable: Copy {
    /// The length in bytes.
    fn length(&self) -> usize;
    /// The subrange of `length` bytes from `offset`.
    fn slice(&self, offset: usize, length: usize) -> Self;
}

impl Sliceable for Segment {
    fn length(&self) -> usize {
        self.length
    }

    fn slice(&self, offset: usize, length: usize) -> Self {
        Self { address: self.address.wrapping_add(offset), length }
    }
}

impl Sliceable for IoVec {
    fn length(&self) -> usize {
        self.length
    }

    fn slice(&self, offset: usize, length: usize) -> Self {
        Self { address: self.address.wrapping_add(offset), length }
    }
}

/// The segments, or parts of them, that contain `length` bytes from `offset`.
pub(crate) fn range<T: Sliceable>(
    segments: &[T],
    offset: u64,
    length: u64,
) -> impl Iterator<Item = T> + Clone + '_ {
    let (mut skip, mut left) = (offset, length);
    segments.iter().filter_map(move |segment| {
        let own = segment.length() as u64;
        if skip >= own {
            skip -= own;
            return None;
        }
        let take = (own - skip).min(left);
        let part = segment.slice(skip as usize, take as usize);
        (skip, left) = (0, left - take);
        (take > 0).then_some(part)
    })
}

/// The vectors of one system call, at most [`IoVecBatch::MAX`]. The rest waits for the next call.
pub(crate) struct IoVecBatch {
    iovecs: [IoVec; Self::MAX],
    count: usize,
}

impl IoVecBatch {
    const MAX: usize = 16;

    /// Takes the first [`IoVecBatch::MAX`] vectors.
    pub(crate) fn new(from: impl Iterator<Item = IoVec>) -> Self {
        let mut batch = Self { iovecs: [IoVec { address: 0, length: 0 }; Self::MAX], count: 0 };
        for (to, from) in batch.iovecs.iter_mut().zip(from) {
            *to = from;
            batch.count += 1;
        }
        batch
    }

    pub(crate) fn as_slice(&self) -> &[IoVec] {
        &self.iovecs[..self.count]
    }
}

/// The sum of all lengths, in bytes.
pub(crate) fn total(segments: &[Segment]) -> Option<u64> {
    segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.length as u64))
}

/// The maximum length of [`copy_short`], in bytes.
const SHORT_COPY_BYTES: usize = 64;

/// Copies a few bytes, faster than a call of the general copy.
///
/// # Safety
/// `from` must be valid for reads of `length` bytes, `to` for writes; they must not overlap.
#[inline]
unsafe fn copy_short(from: *const u8, to: *mut u8, length: usize) {
    /// Copies whole words from the front, and one word that ends with the last byte.
    ///
    /// # Safety
    /// As for [`copy_short`]; `length` must be at least the size of a word.
    #[inline]
    unsafe fn words<T: Copy>(from: *const u8, to: *mut u8, length: usize) {
        let last = length - size_of::<T>();
        let mut at = 0;
        // SAFETY: every word lies inside the length, and the accesses are unaligned.
        unsafe {
            while at < last {
                to.add(at).cast::<T>().write_unaligned(from.add(at).cast::<T>().read_unaligned());
                at += size_of::<T>();
            }
            to.add(last).cast::<T>().write_unaligned(from.add(last).cast::<T>().read_unaligned());
        }
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        match length {
            0 => {}
            1..=3 => words::<u8>(from, to, length),
            4..=7 => words::<u32>(from, to, length),
            _ => words::<u64>(from, to, length),
        }
    }
}

/// Copies `length` bytes to the segments from `offset`.
///
/// # Safety
/// The segments must be valid for writes there, and `source` for reads; they must not overlap.
#[inline]
pub(crate) unsafe fn scatter(segments: &[Segment], offset: u64, source: *const u8, length: usize) {
    if let [segment] = segments
        && length <= SHORT_COPY_BYTES
        && offset == 0
        && length <= segment.length
    {
        // SAFETY: the caller guarantees it, and the segment has at least `length` bytes.
        return unsafe { copy_short(source, segment.address, length) };
    }
    // SAFETY: the caller guarantees it.
    unsafe { scatter_long(segments, offset, source, length) };
}

unsafe fn scatter_long(segments: &[Segment], offset: u64, source: *const u8, length: usize) {
    let mut from = source;
    for part in range(segments, offset, length as u64) {
        // SAFETY: the parts add up to at most `length` bytes, of memory that the caller guarantees
        // to be valid.
        unsafe {
            std::ptr::copy_nonoverlapping(from, part.address, part.length);
            from = from.add(part.length);
        }
    }
}

/// Copies `length` bytes from the segments, from `offset`.
///
/// # Safety
/// The segments must be valid for reads there, and `target` for writes; they must not overlap.
#[inline]
pub(crate) unsafe fn gather(segments: &[Segment], offset: u64, target: *mut u8, length: usize) {
    if let [segment] = segments
        && length <= SHORT_COPY_BYTES
        && offset == 0
        && length <= segment.length
    {
        // SAFETY: as in `scatter`.
        return unsafe { copy_short(segment.address, target, length) };
    }
    // SAFETY: the caller guarantees it.
    unsafe { gather_long(segments, offset, target, length) };
}

unsafe fn gather_long(segments: &[Segment], offset: u64, target: *mut u8, length: usize) {
    let mut to = target;
    for part in range(segments, offset, length as u64) {
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
        let segments: Vec<_> = [(100, 10), (200, 0), (300, 5), (400, 20)]
            .map(|(address, length)| IoVec { address, length })
            .to_vec();
        let cut = |offset, length| -> Vec<(usize, usize)> {
            range(&segments, offset, length).map(|s| (s.address, s.length)).collect()
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
        let segments =
            [(200, 30), (0, 50), (90, 20)].map(|(o, l)| Segment::target(at.wrapping_add(o), l));
        let mut back = vec![0u8; 60];
        // SAFETY: the segments lie in `memory`, and do not overlap the other two vectors.
        unsafe {
            scatter(&segments, 0, bytes.as_ptr(), 100);
            gather(&segments, 20, back.as_mut_ptr(), 60);
        }
        assert_eq!(back, bytes[20..80]);
    }

    #[test]
    fn short_copies_copy_every_byte_and_no_other() {
        let bytes: Vec<u8> = (1..=SHORT_COPY_BYTES as u8).collect();
        for length in 0..=SHORT_COPY_BYTES {
            let mut target = [0; SHORT_COPY_BYTES + 2];
            // SAFETY: both have at least `length` bytes, and do not overlap.
            unsafe { copy_short(bytes.as_ptr(), target.as_mut_ptr().add(1), length) };
            assert_eq!(target[1..=length], bytes[..length]);
            assert!(target[0] == 0 && target[length + 1..].iter().all(|byte| *byte == 0));
        }
    }
}
