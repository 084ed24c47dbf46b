//! The inner loops: copying, filling and comparing bytes at given addresses.
//!
//! [`cached`] goes through the caches, best when the data is there already or wanted soon. The
//! functions in [`stream`] write around the caches, best when the data is larger than they are.
//! Which one to use when is decided by the engine that calls them, from measurement.

pub mod stream;

/// Copies through the caches. The ranges must not overlap.
///
/// # Safety
/// `source` must be valid for reads and `target` for writes of `length` bytes, and the two ranges
/// must not overlap.
#[inline]
pub unsafe fn cached(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller's promise is exactly what this needs.
    unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
}

/// Asks for the cache line at `address`, to be written soon. Any address will do: one that is not
/// mapped is passed over.
#[inline]
pub fn prefetch_for_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch touches nothing that a program can see, whatever the address, and
    // processors without the instruction treat it as none.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Copies between ranges that may overlap, as if through a buffer between them.
///
/// # Safety
/// `source` must be valid for reads and `target` for writes of `length` bytes.
#[inline]
pub unsafe fn overlapping(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller's promise is exactly what this needs.
    unsafe { std::ptr::copy(source, target, length) };
}

/// Sets every byte to `value`, through the caches.
///
/// # Safety
/// `target` must be valid for writes of `length` bytes.
#[inline]
pub unsafe fn fill(target: *mut u8, value: u8, length: usize) {
    // SAFETY: the caller's promise is exactly what this needs.
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
        // SAFETY: offset + block <= length, inside the ranges the caller vouches for.
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
