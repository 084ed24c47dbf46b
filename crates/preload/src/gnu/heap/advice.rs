//! `madvise`. Private memory is zero after `MADV_DONTNEED`, shared memory keeps its contents. A program
//! that frees pages of its allocations, or clears them, in this way expects the former.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use super::{BYTES, IS_SHARED, offset_of};
use crate::gnu::system;

/// Not among the constants of the `libc` crate.
const MADV_DONTNEED_LOCKED: c_int = 24;

/// As in the C library; in the heap, advice that discards pages makes a hole in the memfd.
///
/// # Safety
/// As for the function of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    let is_heap = offset_of(address.cast()).is_some_and(|offset| {
        IS_SHARED.load(Ordering::Relaxed) && bytes <= BYTES.load(Ordering::Relaxed) - offset
    });
    let advice = match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED if is_heap => {
            libc::MADV_REMOVE
        }
        advice => advice,
    };
    // SAFETY: as the caller guarantees.
    unsafe {
        system::call_as_c(libc::SYS_madvise, [address as usize, bytes, advice as usize, 0, 0, 0])
    }
}
