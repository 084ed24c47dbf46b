//! The inner loops: copying, filling and comparing bytes at given addresses.
//!
//! [`cached`] copies through the caches, best if the data is cached already or used soon. The
//! functions in [`ahead`] request the source early, best if it is in memory or at another core. The
//! functions in [`stream`] are for data larger than the caches, most of them bypass these. The
//! calling engine chooses by measured cost.

pub mod ahead;
pub mod stream;

/// Copies through the caches. The ranges must not overlap.
///
/// # Safety
/// `source` must be valid for reads and `target` for writes of `length` bytes, and the two ranges
/// must not overlap.
#[inline]
pub unsafe fn cached(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller guarantees what this needs.
    unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
}

/// Prefetches the cache line at `address` for writing. Any address is allowed; an unmapped one is
/// ignored.
#[inline]
pub fn prefetch_for_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no architectural effect, whatever the address, and processors without
    // the instruction execute it as a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line at `address` for reading. Any address is allowed; an unmapped one is
/// ignored.
#[inline]
pub fn prefetch_for_read(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no architectural effect, whatever the address.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Writes the cache lines of a range back to memory, and leaves them in no cache, if the processor can.
pub fn flush(range: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        let start = range.as_ptr().wrapping_sub(range.as_ptr() as usize % LINE);
        let end = range.as_ptr().wrapping_add(range.len());
        let mut line = start;
        while line < end {
            // SAFETY: every x86-64 has the instruction. It changes no byte, and the line holds a byte
            // of the range, so it is mapped.
            unsafe { std::arch::x86_64::_mm_clflush(line) };
            line = line.wrapping_add(LINE);
        }
        // SAFETY: a fence has no other effect.
        unsafe { std::arch::x86_64::_mm_mfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = range;
}

/// Copies between ranges that may overlap, as if through a temporary buffer.
///
/// # Safety
/// `source` must be valid for reads and `target` for writes of `length` bytes.
#[inline]
pub unsafe fn overlapping(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller guarantees what this needs.
    unsafe { std::ptr::copy(source, target, length) };
}

/// Sets every byte to `value`, through the caches.
///
/// # Safety
/// `target` must be valid for writes of `length` bytes.
#[inline]
pub unsafe fn fill(target: *mut u8, value: u8, length: usize) {
    // SAFETY: the caller guarantees what this needs.
    unsafe { std::ptr::write_bytes(target, value, length) };
}

/// The offset of the first byte that differs, if any.
///
/// # Safety
/// `left` and `right` must be valid for reads of `length` bytes.
pub unsafe fn first_difference(left: *const u8, right: *const u8, length: usize) -> Option<usize> {
    const BLOCK: usize = 4096;
    let mut offset = 0;
    while offset < length {
        let block = BLOCK.min(length - offset);
        // SAFETY: offset + block <= length, inside the ranges that the caller guarantees.
        let equal =
            unsafe { libc::memcmp(left.add(offset).cast(), right.add(offset).cast(), block) == 0 };
        if !equal {
            let differs = |&at: &usize| {
                // SAFETY: at < offset + block <= length.
                unsafe { *left.add(at) != *right.add(at) }
            };
            return (offset..offset + block).find(differs);
        }
        offset += block;
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let left = vec![1u8; 10_000];
        // SAFETY: both pointers come from the same live vector.
        let same = unsafe { first_difference(left.as_ptr(), left.as_ptr(), left.len()) };
        assert_eq!(same, None);
        for at in [0, 1, 4095, 4096, 9_999] {
            let mut right = left.clone();
            right[at] = 2;
            // SAFETY: both vectors are live and of the same length.
            let found = unsafe { first_difference(left.as_ptr(), right.as_ptr(), left.len()) };
            assert_eq!(found, Some(at));
        }
    }
}
