//! The calls that deliver many pieces to one place. As in `lib.rs`, comments here are those of the
//! header.

use std::ffi::c_void;

use memferry::{Options, Segment as Part};

use crate::code::{ADMA_EFAULT, CallError};
use crate::copy_calls::notification;
use crate::global;
use crate::guard::guarded;

/// A piece of memory that is delivered: `len` bytes at `addr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AdmaPiece {
    /// Where it begins.
    pub addr: *const c_void,
    /// How long it is.
    pub len: usize,
}

/// Starts copying `count` pieces, one behind the other, to `dst`, and returns at once: a message that
/// has arrived in packets goes where it is wanted, as one copy. Nothing is told of single pieces. No
/// piece may overlap the bytes at `dst`. Pieces and `dst` are ordinary memory, not that of a GPU.
///
/// Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
/// negative code, and then nothing is in flight: `ADMA_EFAULT` if `pieces`, `dst` or a piece is null and
/// not empty, `ADMA_EINVAL` if a piece overlaps the bytes at `dst`, `ADMA_EOPNOTSUPP` if memory is that
/// of a GPU.
///
/// # Safety
/// `pieces` must be valid for reading of `count` pieces until this returns, and need not be longer.
/// Until the copy is over, all that they name must stay valid for reading, and `dst` for writing of as
/// many bytes as they have together; nobody may write to the former or use the latter, nor free either.
/// It is over when a copy would be, see `adma_icopy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_ideliver(
    pieces: *const AdmaPiece,
    count: usize,
    dst: *mut c_void,
) -> i64 {
    // SAFETY: the caller vouches for the memory until the copy is over.
    guarded("adma_ideliver", || unsafe { deliver(pieces, count, dst, Options::new()) })
}

/// As `adma_ideliver`; and when the data of all pieces is visible, `*variable` becomes `value`, as in
/// `adma_icopy_notify`.
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
        // SAFETY: the caller vouches for the variable until the copy is over.
        let variable = unsafe { notification(variable) }?;
        // SAFETY: and for the memory.
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
    // SAFETY: the caller vouches for the list until this returns.
    let parts: Vec<_> = unsafe { list(pieces, count) }?
        .iter()
        .map(|piece| Part { address: piece.addr.cast(), length: piece.len })
        .collect();
    let started = global::with(|open| {
        open.refuse_device_memory(&parts, dst.cast())?;
        // SAFETY: the caller vouches for the memory until the copy is over.
        Ok::<_, CallError>(unsafe {
            open.ferry().ideliver_cookie_raw(&parts, dst.cast(), options)
        }?)
    });
    Ok(started??.to_raw())
}

/// # Safety
/// It must be valid for reading of so many pieces, if that can be.
unsafe fn list<'a>(pieces: *const AdmaPiece, count: usize) -> Result<&'a [AdmaPiece], CallError> {
    if count == 0 {
        return Ok(&[]);
    }
    if pieces.is_null() {
        let text = format!("the list of {count} pieces is a null pointer");
        return Err(CallError::new(ADMA_EFAULT, text));
    }
    crate::memory::check(pieces.cast(), count.saturating_mul(size_of::<AdmaPiece>()))?;
    // SAFETY: neither null nor too long; the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(pieces, count) })
}
