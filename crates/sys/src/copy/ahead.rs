//! Copies through the caches that request memory before they come to it.
//!
//! The prefetchers of a processor start anew in every page and in every short range, and a copy loop
//! of the C library relies on them. Here, the lines to load and the lines to store are requested
//! [`AHEAD_BYTES`] before, or while the range before them is copied. Stores are aligned to cache
//! lines. Of data in the first-level cache, such a copy takes as long as one of the C library.

use super::cached;

/// The distance in bytes between an access and the request that precedes it.
pub const AHEAD_BYTES: usize = 1024;

const LINE: usize = 64;

/// A range to copy.
#[derive(Debug, Clone, Copy)]
pub struct CopyRange {
    /// The source address.
    pub source: *const u8,
    /// The target address.
    pub target: *mut u8,
    /// The length in bytes.
    pub length: usize,
}

impl CopyRange {
    /// The part from an offset on. The range is not accessed, so any offset is allowed.
    #[inline(always)]
    pub(super) fn skip(self, offset: usize) -> Self {
        Self {
            source: self.source.wrapping_add(offset),
            target: self.target.wrapping_add(offset),
            length: self.length.saturating_sub(offset),
        }
    }

    /// Requests the lines of source and target at an offset.
    #[inline(always)]
    fn request(self, offset: usize) {
        super::prefetch_for_read(self.source.wrapping_add(offset));
        super::prefetch_for_write(self.target.wrapping_add(offset));
    }

    /// # Safety
    /// As for [`cached`].
    unsafe fn copy_cached(self) {
        // SAFETY: the caller upholds the contract.
        unsafe { cached(self.target, self.source, self.length) };
    }
}

/// Whether this processor has the loop; without it, copies are those of [`cached`].
#[inline]
pub fn is_supported() -> bool {
    crate::cpu::info().avx2
}

/// Copies a range that requests its own memory ahead.
///
/// # Safety
/// As for [`cached`].
pub unsafe fn copy(target: *mut u8, source: *const u8, length: usize) {
    let range = CopyRange { source, target, length };
    // SAFETY: the caller upholds the contract.
    unsafe { copy_requesting(range, range.skip(AHEAD_BYTES)) };
}

/// Copies ranges in their order. While a short one is copied, the next is requested.
///
/// # Safety
/// As for [`cached`], for every range.
pub unsafe fn copy_each(ranges: impl Iterator<Item = CopyRange>) {
    #[cfg(target_arch = "x86_64")]
    if is_supported() {
        // SAFETY: the caller upholds the contract, and the processor has the instructions.
        return unsafe { copy_each_avx2(ranges) };
    }
    // SAFETY: the caller upholds the contract.
    ranges.for_each(|range| unsafe { range.copy_cached() });
}

/// # Safety
/// As for [`copy_each`], on a processor with 256-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_each_avx2(mut ranges: impl Iterator<Item = CopyRange>) {
    let Some(mut range) = ranges.next() else { return };
    // SAFETY: the caller upholds the contract.
    unsafe {
        for next in ranges {
            if range.length == next.length && (LINE..=MAX_SHORT_BYTES).contains(&range.length) {
                lines_avx2(range, next);
            } else {
                copy_before(range, next);
            }
            range = next;
        }
        range.copy_cached();
    }
}

/// The maximum length in bytes of a range whose successor is requested while it is copied: two of
/// them fit into a first-level cache.
const MAX_SHORT_BYTES: usize = 8 << 10;

/// Copies a range, and requests the next one if this one is short.
///
/// # Safety
/// As for [`cached`], for `range`. Any `next` is allowed; it is not accessed.
pub unsafe fn copy_before(range: CopyRange, next: CopyRange) {
    let is_short = range.length <= MAX_SHORT_BYTES;
    let ahead = if is_short { next } else { range.skip(AHEAD_BYTES) };
    // SAFETY: the caller upholds the contract.
    unsafe { copy_requesting(range, ahead) };
    // A longer range follows: its first lines are requested too. The last line of one that is not
    // aligned is one more than its length tells.
    const MAX_MORE: usize = 16;
    let requested = if is_short { range.length.min(next.length) } else { 0 };
    let more = next.skip(requested);
    for line in 0..more.length.div_ceil(LINE).min(MAX_MORE) {
        more.request(line * LINE);
    }
}

/// Copies a range, and requests the memory of `ahead` step by step. No line beyond `ahead` is
/// requested: it may be one that another thread writes.
///
/// # Safety
/// As for [`cached`], for `range`.
#[inline]
unsafe fn copy_requesting(range: CopyRange, ahead: CopyRange) {
    let requesting = range.length.min(ahead.length);
    // SAFETY: the caller upholds the contract, for both parts of the range.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if requesting >= LINE && is_supported() {
            lines_avx2(CopyRange { length: requesting, ..range }, ahead);
            return range.skip(requesting).copy_cached();
        }
        range.copy_cached();
    }
}

/// Copies a range of at least a line. The first and the last line are stored wherever they lie, those
/// between them at aligned addresses; where these overlap, the same bytes are stored twice.
///
/// # Safety
/// As for [`cached`], on a processor with 256-bit vectors, for at least a line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn lines_avx2(range: CopyRange, ahead: CopyRange) {
    let CopyRange { source, target, length } = range;
    let last = length - LINE;
    ahead.request(0);
    // SAFETY: every access is one line at an offset of at most `last`, so it lies inside the range.
    unsafe {
        store_line(target, load_line(source));
        let mut offset = LINE - target as usize % LINE;
        while offset < last {
            ahead.request(offset);
            store_line(target.add(offset), load_line(source.add(offset)));
            offset += LINE;
        }
        store_line(target.add(last), load_line(source.add(last)));
    }
    ahead.request(length - 1);
}

#[cfg(target_arch = "x86_64")]
type Line = [std::arch::x86_64::__m256i; 2];

/// # Safety
/// `source` must be valid for reads of a line; it needs no alignment.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load_line(source: *const u8) -> Line {
    use std::arch::x86_64::_mm256_loadu_si256;
    let source = source.cast();
    // SAFETY: the caller guarantees the range.
    unsafe { [_mm256_loadu_si256(source), _mm256_loadu_si256(source.add(1))] }
}

/// # Safety
/// `target` must be valid for writes of a line; it needs no alignment.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store_line(target: *mut u8, [low, high]: Line) {
    use std::arch::x86_64::_mm256_storeu_si256;
    let target = target.cast();
    // SAFETY: the caller guarantees the range.
    unsafe {
        _mm256_storeu_si256(target, low);
        _mm256_storeu_si256(target.add(1), high);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const GUARD: usize = 128;

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 131 + at / 251) as u8).collect()
    }

    /// Copies with `run`, at several alignments, and checks every byte and those around.
    fn check(length: usize, run: impl Fn(*mut u8, *const u8)) {
        for shift in [0, 1, 31, 63] {
            let source = pattern(length + 2 * GUARD);
            let mut target = vec![0xA5; length + 2 * GUARD];
            run(target[GUARD + shift..].as_mut_ptr(), source[shift..].as_ptr());
            let (before, rest) = target.split_at(GUARD + shift);
            let (copied, after) = rest.split_at(length);
            assert_eq!(copied, &source[shift..shift + length], "{length} bytes");
            assert!(before.iter().chain(after).all(|&byte| byte == 0xA5), "{length} bytes");
        }
    }

    const LENGTHS: [usize; 14] =
        [0, 1, 31, 63, 64, 65, 1023, 1024, 1025, 1087, 1088, 1460, 4096, 70_001];

    #[test]
    fn every_byte_of_the_range_is_copied_and_no_other() {
        for length in LENGTHS {
            // SAFETY: `check` calls it with room for `length` bytes.
            check(length, |target, source| unsafe { copy(target, source, length) });
        }
    }

    #[test]
    fn the_range_that_follows_changes_no_byte_wherever_it_is() {
        let other = pattern(70_001);
        for length in LENGTHS {
            for next in LENGTHS {
                for address in [other.as_ptr(), std::ptr::null(), usize::MAX as *const u8] {
                    let next =
                        CopyRange { source: address, target: address.cast_mut(), length: next };
                    // SAFETY: as above; the next range is not accessed.
                    check(length, |target, source| unsafe {
                        copy_before(CopyRange { source, target, length }, next);
                    });
                }
            }
        }
    }

    #[test]
    fn ranges_of_all_lengths_are_copied_in_a_row() {
        let source = pattern(LENGTHS.iter().sum());
        let mut target = vec![0; source.len()];
        let mut at = 0;
        let ranges: Vec<_> = LENGTHS
            .into_iter()
            .map(|length| {
                let (source, target) = (source[at..].as_ptr(), target[at..].as_mut_ptr());
                at += length;
                CopyRange { source, target, length }
            })
            .collect();
        // SAFETY: the ranges are parts of both vectors and do not overlap.
        unsafe { copy_each(ranges.iter().copied()) };
        assert_eq!(target, source);
        target.fill(0);
        // The other way round, with equal lengths in a row.
        let twice = ranges.iter().rev().flat_map(|&range| [range; 2]);
        // SAFETY: as above.
        unsafe { copy_each(twice) };
        assert_eq!(target, source);
    }
}
