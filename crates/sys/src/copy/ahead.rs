//! Copies through the caches that request their source ahead of the loads.
//!
//! The prefetchers of a processor start anew in every page and in every short range, and a copy loop
//! of the C library relies on them. Requests ahead keep more cache lines on their way. That pays for
//! data in memory or in the cache of another core; for data in the first-level cache, the requests
//! only take time.

use super::cached;

/// The distance in bytes between a load and the request that precedes it.
pub const AHEAD_BYTES: usize = 1024;

const LINE: usize = 64;

/// Whether this processor has the loop; without it, copies are those of [`cached`].
#[inline]
pub fn is_supported() -> bool {
    crate::cpu::info().avx2
}

/// Copies a range, with its own source requested ahead.
///
/// # Safety
/// As for [`cached`].
pub unsafe fn copy(target: *mut u8, source: *const u8, length: usize) {
    // No line beyond the source is requested: it may be one that another thread writes.
    let requested = length.saturating_sub(AHEAD_BYTES) / LINE * LINE;
    // SAFETY: the caller upholds the contract, and `requested` is at most `length`.
    unsafe {
        lines(target, source, requested, source.wrapping_add(AHEAD_BYTES));
        cached(target.add(requested), source.add(requested), length - requested);
    }
}

/// Copies a range while the source of the next range is requested.
///
/// # Safety
/// As for [`cached`]. Any `next` is allowed; it is not read.
pub unsafe fn copy_before(
    target: *mut u8,
    source: *const u8,
    length: usize,
    next: *const u8,
    next_length: usize,
) {
    let next_end = next.wrapping_add(next_length);
    let requested = length.min(next_length.next_multiple_of(LINE)) / LINE * LINE;
    // SAFETY: the caller upholds the contract, and `requested` is at most `length`.
    unsafe {
        lines(target, source, requested, next);
        cached(target.add(requested), source.add(requested), length - requested);
    }
    // A longer range follows: its first lines are requested too. The last line of one that is not
    // aligned is one more than its length tells.
    const MAX_MORE: usize = 16;
    let mut more = next.wrapping_add(requested);
    for _ in 0..MAX_MORE {
        if more >= next_end {
            break;
        }
        super::prefetch_for_read(more);
        more = more.wrapping_add(LINE);
    }
}

/// Copies `length` bytes, a multiple of a line, and requests the line at the same distance from
/// `ahead` before each.
///
/// # Safety
/// As for [`cached`].
#[inline]
unsafe fn lines(target: *mut u8, source: *const u8, length: usize, ahead: *const u8) {
    #[cfg(target_arch = "x86_64")]
    if is_supported() {
        // SAFETY: the caller upholds the contract, and the processor has the instructions.
        unsafe { lines_avx2(target, source, length, ahead) };
        return;
    }
    let _ = ahead;
    // SAFETY: the caller upholds the contract.
    unsafe { cached(target, source, length) };
}

/// # Safety
/// As for [`lines`], on a processor with 256-bit vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn lines_avx2(target: *mut u8, source: *const u8, length: usize, ahead: *const u8) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256};
    let mut offset = 0;
    while offset < length {
        super::prefetch_for_read(ahead.wrapping_add(offset));
        // SAFETY: a line at `offset` lies inside the `length` bytes, a multiple of a line; neither
        // access needs an alignment.
        unsafe {
            let from = source.add(offset).cast::<__m256i>();
            let to = target.add(offset).cast::<__m256i>();
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_storeu_si256(to, low);
            _mm256_storeu_si256(to.add(1), high);
        }
        offset += LINE;
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
                    // SAFETY: as above; the next range is not read.
                    check(length, |target, source| unsafe {
                        copy_before(target, source, length, address, next);
                    });
                }
            }
        }
    }
}
