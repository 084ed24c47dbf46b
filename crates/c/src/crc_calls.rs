//! The calls for checksums. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_int, c_void};

use memferry::Request;

use crate::code::{ADMA_EFAULT, ADMA_EINVAL, CallError};
use crate::global;
use crate::guard::guarded;

/// Computes the CRC-32C of `len` bytes at `src`, the checksum of iSCSI and ext4, and returns when it is
/// in `*crc`. That of "123456789" is 0xE3069283, that of no bytes 0. Memory of a GPU is
/// `ADMA_EOPNOTSUPP`.
///
/// Returns 0 or a negative code, and then `*crc` is unchanged. A null `crc` is `ADMA_EFAULT`, one that
/// is not aligned to 4 bytes `ADMA_EINVAL`.
///
/// # Safety
/// Until this returns, `src` must be valid for reading of `len` bytes, and no other thread and no copy
/// may write to it. `crc` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_crc(src: *const c_void, len: usize, crc: *mut u32) -> c_int {
    // SAFETY: the caller guarantees the memory until this returns.
    guarded("adma_crc", || unsafe { run(Request::crc(src.cast(), len), &[src.cast()], crc) })
}

/// As `adma_copy`, but source and target must not overlap (`ADMA_EINVAL`); `*crc` becomes the CRC-32C
/// of the data, as by `adma_crc`, and each byte is read from memory once.
///
/// Returns 0 or a negative code, as `adma_copy`; with a code, `*crc` is unchanged.
///
/// # Safety
/// As for `adma_copy`; and `crc` must be null or valid for writing, and not lie in `dst`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_copy_crc(
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
    crc: *mut u32,
) -> c_int {
    guarded("adma_copy_crc", || {
        let request = Request::copy_crc(src.cast(), dst.cast(), len);
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { run(request, &[src.cast(), dst.cast()], crc) }
    })
}

/// As `adma_crc`, but returns at once. `*crc` is written before the computation is complete; one that
/// fails does not write it.
///
/// Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
/// negative code, and then nothing is in flight.
///
/// # Safety
/// As for `adma_crc`, until the computation is complete; see `adma_icopy` for when it is. `*crc` must
/// not be used until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_icrc(src: *const c_void, len: usize, crc: *mut u32) -> i64 {
    // SAFETY: the caller guarantees the memory until the computation is complete.
    guarded("adma_icrc", || unsafe { start(Request::crc(src.cast(), len), &[src.cast()], crc) })
}

/// As `adma_copy_crc`, but returns at once. `*crc` is written before the copy is complete; a copy that
/// fails does not write it.
///
/// Returns a cookie or a negative code, as `adma_icopy`.
///
/// # Safety
/// As for `adma_icopy`; and `crc` must stay valid until the copy is complete, not lie in `src` or
/// `dst`, and not be used until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_icopy_crc(
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
    crc: *mut u32,
) -> i64 {
    guarded("adma_icopy_crc", || {
        let request = Request::copy_crc(src.cast(), dst.cast(), len);
        // SAFETY: the caller guarantees the memory until the copy is complete.
        unsafe { start(request, &[src.cast(), dst.cast()], crc) }
    })
}

/// Runs a request, and writes its CRC.
///
/// # Safety
/// The memory of the request and the variable must be valid until this returns.
unsafe fn run(
    request: Request<'_>,
    memory: &[*const u8],
    crc: *mut u32,
) -> Result<c_int, CallError> {
    check_variable(crc)?;
    let request = request.crc_to(crc);
    global::with(|open| -> Result<c_int, CallError> {
        open.refuse_device_memory(memory.iter().copied())?;
        // SAFETY: the caller guarantees the memory until this returns, which is after completion.
        unsafe { open.ferry().run_raw(request) }?;
        Ok(0)
    })?
}

/// Starts a request that writes its CRC; returns its cookie.
///
/// # Safety
/// The memory of the request and the variable must be valid until it is complete.
unsafe fn start(
    request: Request<'_>,
    memory: &[*const u8],
    crc: *mut u32,
) -> Result<i64, CallError> {
    check_variable(crc)?;
    let request = request.crc_to(crc);
    global::with(|open| -> Result<i64, CallError> {
        open.refuse_device_memory(memory.iter().copied())?;
        // SAFETY: the caller guarantees the memory until the request is complete.
        Ok(unsafe { open.ferry().start_cookie_raw(request) }?.to_raw())
    })?
}

fn check_variable(crc: *mut u32) -> Result<(), CallError> {
    if crc.is_null() {
        return Err(CallError::new(ADMA_EFAULT, "the variable for the CRC is a null pointer"));
    }
    if !crc.is_aligned() {
        let text = format!("the variable for the CRC at {crc:p} is not aligned to 4 bytes");
        return Err(CallError::new(ADMA_EINVAL, text));
    }
    Ok(())
}
