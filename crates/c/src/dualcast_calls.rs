//! The calls that copy one source to two targets. As in `lib.rs`, comments here are those of the
//! header.

use std::ffi::{c_int, c_void};

use memferry::Request;

use crate::code::CallError;
use crate::global;
use crate::guard::guarded;

/// Copies `len` bytes from `src` to both `dst1` and `dst2`, and returns when both copies are complete.
/// Each byte is read from memory once. None of the three ranges may overlap another: that is
/// `ADMA_EINVAL`, and nothing is copied. Memory of a GPU is `ADMA_EOPNOTSUPP`.
///
/// Returns 0 or a negative code; with a code, the contents of `dst1` and `dst2` are undefined.
///
/// # Safety
/// Until this returns, `src` must be valid for reading, and `dst1` and `dst2` for writing of `len`
/// bytes, and no other thread and no other copy may write to `src` or use `dst1` or `dst2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_dualcast(
    src: *const c_void,
    dst1: *mut c_void,
    dst2: *mut c_void,
    len: usize,
) -> c_int {
    guarded("adma_dualcast", || {
        global::with(|open| -> Result<c_int, CallError> {
            open.refuse_device_memory(
                [src, dst1.cast_const(), dst2.cast_const()].map(<*const c_void>::cast).into_iter(),
            )?;
            let request = Request::dualcast(src.cast(), dst1.cast(), dst2.cast(), len);
            // SAFETY: the caller guarantees the memory until this returns, after completion.
            unsafe { open.ferry().run_raw(request) }?;
            Ok(0)
        })?
    })
}

/// As `adma_dualcast`, but returns at once.
///
/// Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
/// negative code, and then nothing is in flight.
///
/// # Safety
/// As for `adma_icopy`, with two targets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_idualcast(
    src: *const c_void,
    dst1: *mut c_void,
    dst2: *mut c_void,
    len: usize,
) -> i64 {
    guarded("adma_idualcast", || {
        global::with(|open| -> Result<i64, CallError> {
            open.refuse_device_memory(
                [src, dst1.cast_const(), dst2.cast_const()].map(<*const c_void>::cast).into_iter(),
            )?;
            let request = Request::dualcast(src.cast(), dst1.cast(), dst2.cast(), len);
            // SAFETY: the caller guarantees the memory until the copies are complete.
            Ok(unsafe { open.ferry().start_cookie_raw(request) }?.to_raw())
        })?
    })
}
