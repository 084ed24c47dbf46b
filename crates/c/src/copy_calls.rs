//! The calls for copies, fills and compares. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use memferry::{Cookie, CookieError, Error, ExecutionError, Ferry, Notification, Options};

use crate::code::{ADMA_EFAULT, ADMA_EINVAL, ADMA_ETIMEDOUT, CallError};
use crate::global;
use crate::guard::guarded;
use crate::links::LinkCookie;

/// Copies `len` bytes from `src` to `dst` and returns when it is complete. Ranges that overlap give
/// the result of `memmove`.
///
/// Returns 0 or a negative code; with a code, the contents of `dst` are undefined.
///
/// # Safety
/// Until this returns, `src` must be valid for reading and `dst` for writing of `len` bytes, and
/// no other thread and no other copy may write to `src` or use `dst`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_copy(src: *const c_void, dst: *mut c_void, len: usize) -> c_int {
    guarded("adma_copy", || {
        let (source, target) = (src.cast::<u8>(), dst.cast::<u8>());
        if is_plain(len, &[source, target]) {
            // SAFETY: the caller guarantees both ranges, which may overlap.
            unsafe { std::ptr::copy(source, target, len) };
            return Ok(0);
        }
        // SAFETY: the caller guarantees both ranges until this returns, which is after completion.
        global::with(|open| unsafe { open.ferry().run_raw(open.copy(source, target, len)) })??;
        Ok(0)
    })
}

/// Starts copying `len` bytes from `src` to `dst` and returns at once; small copies may be complete
/// already. Ranges that overlap give the result of `memmove`. Copies in flight at the same time are
/// not ordered.
///
/// Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, which any thread may
/// call, any number of times or never; or a negative code, and then nothing is in flight.
///
/// # Safety
/// Until the copy is complete, `src` must stay valid for reading and `dst` for writing of `len`
/// bytes, and no thread may write to `src`, use `dst` or free either. It is complete when a check
/// returns 1, a wait returns 0, either returns the code of its failure, or `adma_fini` returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_icopy(src: *const c_void, dst: *mut c_void, len: usize) -> i64 {
    guarded("adma_icopy", || {
        let started = global::with(|open| {
            let request = open.copy(src.cast(), dst.cast(), len);
            // SAFETY: the caller guarantees the memory until the copy is complete.
            unsafe { open.ferry().start_cookie_raw(request) }
        });
        Ok(started??.to_raw())
    })
}

/// As `adma_icopy`; and when all data is visible, `*variable` becomes `value`.
///
/// To read the variable, use an atomic load with acquire order (`atomic_load` of `stdatomic.h`, or
/// `__atomic_load_n(variable, __ATOMIC_ACQUIRE)`), or `adma_wait_notify`: once it holds `value`,
/// the bytes at `dst` may be read. A copy that fails sets nothing. Several copies may set one
/// variable; each stores its own value, so the last to complete wins.
///
/// Returns a cookie or a negative code, as `adma_icopy`. A null variable is `ADMA_EFAULT`, one that
/// is not aligned to 8 bytes `ADMA_EINVAL`.
///
/// # Safety
/// As for `adma_icopy`; and `variable` must stay valid until the copy is complete, and meanwhile be
/// used with atomic loads and stores only. The value may be visible shortly before the cookie
/// reports that the copy is complete: before freeing the variable, wait for the cookie.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_icopy_notify(
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
    variable: *mut u64,
    value: u64,
) -> i64 {
    guarded("adma_icopy_notify", || {
        // SAFETY: the caller guarantees the variable until the copy is complete.
        let variable = unsafe { notification(variable) }?;
        let options = Options::new().notify(variable, value);
        let started = global::with(|open| {
            let request = open.copy(src.cast(), dst.cast(), len).with(options);
            // SAFETY: the caller guarantees the memory until the copy is complete.
            unsafe { open.ferry().start_cookie_raw(request) }
        });
        Ok(started??.to_raw())
    })
}

/// Checks whether the copy of a cookie is complete. Does not wait and does not open the library.
///
/// Returns 1 if it is complete, and then its data is visible to the calling thread; 0 if not yet;
/// or a negative code: the error of the copy, or of the cookie. A second check of a complete copy
/// returns the same. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
#[unsafe(no_mangle)]
pub extern "C" fn adma_check_copy(cookie: i64) -> c_int {
    guarded("adma_check_copy", || {
        with_cookie(cookie, |ferry, cookie| ferry.check(cookie).map(c_int::from))
    })
}

/// Waits until the copy of a cookie is complete, and copies chunks of it meanwhile. Does not open
/// the library.
///
/// Returns 0 when it is complete, and then its data is visible to the calling thread; or a negative
/// code: the error of the copy, or of the cookie. A second wait for a complete copy returns the
/// same. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
#[unsafe(no_mangle)]
pub extern "C" fn adma_wait_copy(cookie: i64) -> c_int {
    guarded("adma_wait_copy", || {
        with_cookie(cookie, |ferry, cookie| ferry.wait(cookie).map(|()| 0))
    })
}

/// Sleeps until `*variable` is `value`, for at most `timeout_ns` nanoseconds; without a limit if it
/// is negative. Does not open the library, and `adma_fini` does not wait for it.
///
/// The copy that sets the value wakes the caller at once; a value that the program stores itself is
/// noticed within a fraction of a second. A failed copy sets nothing: if that is possible, give a
/// timeout and then check the cookie.
///
/// Returns 0 when the variable holds the value, `ADMA_ETIMEDOUT` after the timeout, or another
/// negative code.
///
/// # Safety
/// Until this returns, `variable` must stay valid, and be used with atomic loads and stores only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_wait_notify(
    variable: *mut u64,
    value: u64,
    timeout_ns: i64,
) -> c_int {
    guarded("adma_wait_notify", || {
        // SAFETY: the caller guarantees the variable until this returns.
        let variable = unsafe { notification(variable) }?;
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        if variable.wait(value, timeout) {
            return Ok(0);
        }
        let text = format!("the variable did not become {value} within {timeout_ns} ns");
        Err(CallError::new(ADMA_ETIMEDOUT, text))
    })
}

/// Sets `len` bytes at `dst` to `value`, converted to `unsigned char`, and returns when it is
/// complete.
///
/// Returns 0 or a negative code; with a code, the contents of `dst` are undefined.
///
/// # Safety
/// Until this returns, `dst` must be valid for writing of `len` bytes, and no other thread and no
/// copy may use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_fill(dst: *mut c_void, value: c_int, len: usize) -> c_int {
    guarded("adma_fill", || {
        let (target, value) = (dst.cast::<u8>(), value as u8);
        if is_plain(len, &[target]) {
            // SAFETY: the caller guarantees the range.
            unsafe { target.write_bytes(value, len) };
            return Ok(0);
        }
        // SAFETY: the caller guarantees the range until this returns, which is after completion.
        global::with(|open| unsafe { open.ferry().run_raw(open.fill(target, value, len)) })??;
        Ok(0)
    })
}

/// Compares `len` bytes at `a` and `b`.
///
/// Returns 0 if they are equal; 1 if not, and then `*first_difference` is the offset of the first
/// byte that differs, unless the pointer is null; or a negative code. It is written only if 1 is
/// returned.
///
/// # Safety
/// Until this returns, `a` and `b` must be valid for reading of `len` bytes, and no other thread
/// and no copy may write to them. `first_difference` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_compare(
    a: *const c_void,
    b: *const c_void,
    len: usize,
    first_difference: *mut usize,
) -> c_int {
    guarded("adma_compare", || {
        let compared = global::with(|open| {
            let request = open.compare(a.cast(), b.cast(), len);
            // SAFETY: the caller guarantees both ranges until this returns, which is after
            // completion.
            unsafe { open.ferry().run_raw(request) }
        });
        let finish = compared??;
        let Some(at) = finish.difference else { return Ok(0) };
        // SAFETY: the caller guarantees that it is null or valid.
        if let Some(first_difference) = unsafe { first_difference.as_mut() } {
            *first_difference = at as usize;
        }
        Ok(1)
    })
}

/// Returns whether a blocking operation is so small that the core would run it inline, so that no
/// ferry is needed. Null pointers and ranges that wrap are left to the core, which reports the
/// error.
#[inline]
fn is_plain(len: usize, ranges: &[*const u8]) -> bool {
    len < global::plain_below()
        && ranges.iter().all(|at| !at.is_null() && (*at as usize).checked_add(len).is_some())
}

/// Queries the ferry about a cookie. While no ferry is open, every cookie belongs to a closed one.
fn with_cookie(
    raw: i64,
    ask: impl FnOnce(&Ferry, Cookie) -> Result<c_int, Error>,
) -> Result<c_int, CallError> {
    let answer = global::with_open(|open| ask(open.ferry(), Cookie::from_raw(raw)));
    match answer.unwrap_or_else(|| Err(CookieError::Foreign(raw).into())) {
        Err(Error::Cookie(CookieError::Foreign(_))) if global::is_from_parent(raw) => {
            Err(Error::from(ExecutionError::Forked).into())
        }
        Err(Error::Cookie(CookieError::Foreign(_))) if is_of_a_link(raw) => {
            let text = format!("cookie {raw} is of a read or write: use adma_check or adma_wait");
            Err(CallError::new(ADMA_EINVAL, text))
        }
        answer => Ok(answer?),
    }
}

fn is_of_a_link(cookie: i64) -> bool {
    LinkCookie::from_raw(cookie).is_ok_and(LinkCookie::was_issued)
}

/// Views a word of the C program as a notification variable.
///
/// # Safety
/// If it is neither null nor misaligned, it must stay valid for `'a`.
pub(crate) unsafe fn notification<'a>(variable: *mut u64) -> Result<&'a Notification, CallError> {
    if variable.is_null() {
        return Err(CallError::new(ADMA_EFAULT, "the notification variable is a null pointer"));
    }
    if !variable.is_aligned() {
        let text = format!("the notification variable at {variable:p} is not aligned to 8 bytes");
        return Err(CallError::new(ADMA_EINVAL, text));
    }
    // SAFETY: it is aligned, and the caller guarantees the rest.
    Ok(unsafe { Notification::from_ptr(variable) })
}
