//! The calls that copy many segments into one contiguous target. As in `lib.rs`, comments here are
//! those of the header.

use std::ffi::c_void;

use memferry::{Options, Segment as Part};

use crate::batch_calls::list;
use crate::code::CallError;
use crate::copy_calls::notification;
use crate::global;
use crate::guard::guarded;

/// A segment of a gather copy: `len` bytes at `addr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AdmaPiece {
    /// Address of the first byte.
    pub addr: *const c_void,
    /// Length in bytes.
    pub len: usize,
}

/// Starts copying `count` segments to consecutive bytes at `dst`, and returns at once: a message
/// that arrived in packets is copied to its target as one copy. Single segments are not reported.
/// No segment may overlap the bytes at `dst`. Segments and `dst` are ordinary memory, not memory of
/// a GPU.
///
/// Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
/// negative code, and then nothing is in flight: `ADMA_EFAULT` if `pieces`, `dst` or a segment is
/// null and not empty, `ADMA_EINVAL` if a segment overlaps the bytes at `dst`, `ADMA_EOPNOTSUPP` if
/// any of the memory is that of a GPU.
///
/// # Safety
/// `pieces` must be valid for reading of `count` entries until this returns; the list may be freed
/// afterwards. Until the copy is complete, the segments must stay valid for reading, and `dst` for
/// writing of their total length; no thread may write to the segments, use `dst` or free either.
/// `adma_icopy` defines when a copy is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_ideliver(
    pieces: *const AdmaPiece,
    count: usize,
    dst: *mut c_void,
) -> i64 {
    // SAFETY: the caller guarantees the memory until the copy is complete.
    guarded("adma_ideliver", || unsafe { deliver(pieces, count, dst, Options::new()) })
}

/// As `adma_ideliver`; and when the data of all segments is visible, `*variable` becomes `value`,
/// as in `adma_icopy_notify`.
///
/// Returns a cookie or a negative code, as `adma_ideliver`. A null variable is `ADMA_EFAULT`, one that
/// is not aligned to 8 bytes `ADMA_EINVAL`.
///
/// # Safety
/// As for `adma_ideliver`, and for the variable as for `adma_icopy_notify`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_ideliver_notify(
    pieces: *const AdmaPiece,
    count: usize,
    dst: *mut c_void,
    variable: *mut u64,
    value: u64,
) -> i64 {
    guarded("adma_ideliver_notify", || {
        // SAFETY: the caller guarantees the variable until the copy is complete.
        let variable = unsafe { notification(variable) }?;
        // SAFETY: likewise the memory.
        unsafe { deliver(pieces, count, dst, Options::new().notify(variable, value)) }
    })
}

/// # Safety
/// As for `adma_ideliver`.
unsafe fn deliver(
    pieces: *const AdmaPiece,
    count: usize,
    dst: *mut c_void,
    options: Options<'_>,
) -> Result<i64, CallError> {
    // SAFETY: the caller guarantees the list until this returns.
    let parts: Vec<_> = unsafe { list(pieces, count, "pieces") }?
        .iter()
        .map(|piece| Part { address: piece.addr.cast(), length: piece.len })
        .collect();
    let started = global::with(|open| {
        let addresses = parts.iter().map(|piece| piece.address);
        open.refuse_device_memory(addresses.chain([dst.cast_const().cast()]))?;
        // SAFETY: the caller guarantees the memory until the copy is complete.
        Ok::<_, CallError>(unsafe {
            open.ferry().ideliver_cookie_raw(&parts, dst.cast(), options)
        }?)
    });
    Ok(started??.to_raw())
}
