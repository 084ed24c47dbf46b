//! The calls for windows: memory that one side of a link exposes, and that its peer accesses by put
//! and get. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use memferry::message::PutNotification;

use crate::code::{ADMA_EFAULT, CallError};
use crate::global::links;
use crate::guard::guarded;

/// For `adma_expose`: the peer may get from the window.
pub const ADMA_READ: c_int = 1;
/// For `adma_expose`: the peer may put to the window.
pub const ADMA_WRITE: c_int = 2;

/// The handle of a window: 16 bytes, to be sent unchanged to the peer by any means.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AdmaWindow {
    /// Opaque.
    pub bytes: [u8; 16],
}

/// Exposes `len` bytes at `addr` to the peer of a link, which then puts to them (`ADMA_WRITE`) or
/// gets from them (`ADMA_READ`, or both combined by `|`) without a call of this process. `*handle`
/// becomes the handle of the window: send it to the peer, which attaches it. It is of no use to any
/// other process.
///
/// Returns the number of the window (0 or above) for `adma_wait_value` and `adma_withdraw`, or a
/// negative code.
///
/// # Safety
/// Until the window is withdrawn, `addr` must stay valid for reading and writing of `len` bytes.
/// The peer may access it at any time meanwhile. It is withdrawn when `adma_withdraw`, `adma_close`
/// of the link or `adma_fini` returns 0. `handle` must be valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_expose(
    fd: c_int,
    addr: *mut c_void,
    len: usize,
    rights: c_int,
    handle: *mut AdmaWindow,
) -> i64 {
    guarded("adma_expose", || {
        if handle.is_null() {
            return Err(no_handle());
        }
        let links = links();
        // SAFETY: the caller guarantees the memory until the window is withdrawn.
        let (number, name) =
            unsafe { links.windows().expose(links.link(fd)?, addr.cast(), len, rights) }?;
        // SAFETY: not null, bytes have no alignment, and the caller guarantees the rest.
        unsafe { handle.write(AdmaWindow { bytes: name.to_bytes() }) };
        Ok(number)
    })
}

/// Withdraws a window of this process. The peer cannot start another access; the call waits for the
/// fragment that the peer is copying, after which the peer finds the window withdrawn. Calls of
/// other threads that wait for a value of the window return `ADMA_ESTALE`.
///
/// Returns 0, and then the peer accesses the memory no more; or a negative code. `ADMA_EBUSY`: the
/// peer is stopped in the middle of a copy and did not finish it within a second. Then the memory
/// must stay valid: continue or end the other process, and call this again.
#[unsafe(no_mangle)]
pub extern "C" fn adma_withdraw(window: i64) -> c_int {
    guarded("adma_withdraw", || links().windows().withdraw(window).map(|()| 0))
}

/// Waits until the variable at an offset of a window of this process is `at_least` or more, for at
/// most `timeout_ns` nanoseconds; without a limit if it is negative. The variable has 8 bytes and
/// is aligned to 8 in this process. Polls first, then sleeps; a notification of the peer wakes it.
/// A timeout of 0 checks without waiting.
///
/// Returns 0, and then `*value`, unless the pointer is null, is what the variable holds, and the
/// data that was put before it is visible to the calling thread; or a negative code:
/// `ADMA_ETIMEDOUT` after the timeout, `ADMA_EPIPE` if the peer has disconnected, `ADMA_ESTALE` if
/// another thread withdraws the window, `ADMA_ECANCELED` if another thread closes the link.
///
/// # Safety
/// `value` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_wait_value(
    window: i64,
    offset: u64,
    at_least: u64,
    timeout_ns: i64,
    value: *mut u64,
) -> c_int {
    guarded("adma_wait_value", || {
        if !value.is_null() && !value.is_aligned() {
            let text = format!("a value cannot be stored at {value:p}: not aligned to 8 bytes");
            return Err(CallError::new(ADMA_EFAULT, text));
        }
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        let found = links().windows().exposed(window)?.wait_value(offset, at_least, timeout)?;
        // SAFETY: aligned, and the caller guarantees that it is null or valid.
        if let Some(value) = unsafe { value.as_mut() } {
            *value = found;
        }
        Ok(0)
    })
}

/// Attaches a window of the peer of a link by its handle. The bytes are checked: those that are no
/// handle are `ADMA_EBADMSG`, the handle of a withdrawn window is `ADMA_ESTALE`, and a handle of
/// another process than the peer is `ADMA_EXDEV`.
///
/// Returns the number of the window here (0 or above) for puts and gets, or a negative code.
///
/// # Safety
/// `handle` must be null or valid for reading.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_attach(fd: c_int, handle: *const AdmaWindow) -> i64 {
    guarded("adma_attach", || {
        // SAFETY: bytes have no alignment, and the caller guarantees that it is null or valid.
        let name = unsafe { handle.as_ref() }.ok_or_else(no_handle)?;
        let links = links();
        links.windows().attach(links.link(fd)?, name.bytes)
    })
}

/// Detaches a window of the peer. Puts and gets in flight continue.
///
/// Returns 0 or a negative code.
#[unsafe(no_mangle)]
pub extern "C" fn adma_detach(remote: i64) -> c_int {
    guarded("adma_detach", || links().windows().detach(remote).map(|()| 0))
}

/// Returns the length of a window in bytes, of one of this process or of an attached one.
///
/// Returns the length (0 or above), or a negative code.
#[unsafe(no_mangle)]
pub extern "C" fn adma_window_length(window: i64) -> i64 {
    guarded("adma_window_length", || links().windows().length(window).map(u64::cast_signed))
}

/// Copies `len` bytes at `src` to an offset of a window of the peer, and returns when they have
/// arrived. The peer need not call anything.
///
/// Puts and gets of one link are executed in the order in which they were started, blocking or not.
/// After a failure the contents of its target are undefined.
///
/// Returns 0 or a negative code: `ADMA_ERANGE` if it does not fit into the window, `ADMA_EACCES` if
/// the window's rights do not permit it, `ADMA_ESTALE` if the window was withdrawn, `ADMA_EPIPE` if
/// the peer has disconnected, `ADMA_EHOSTUNREACH` if the system does not permit access to that
/// memory, `ADMA_ENXIO` if it is no longer mapped in the peer.
///
/// # Safety
/// Until this returns, `src` must be valid for reading of `len` bytes, and no thread may write to
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_put(
    remote: i64,
    offset: u64,
    src: *const c_void,
    len: usize,
) -> c_int {
    guarded("adma_put", || {
        let window = links().windows().attached(remote)?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { window.put(offset, src.cast(), len, None) }.map(|()| 0)
    })
}

/// As `adma_put`; and when all data has arrived, the variable at `notify_offset` of the same window
/// becomes `value`, and the owner is woken if it waits for it: see `adma_wait_value`. The variable
/// has 8 bytes and is aligned to 8 in the owner's memory, otherwise it is `ADMA_EINVAL`. A failed
/// put sets nothing.
///
/// Returns 0 or a negative code, as `adma_put`.
///
/// # Safety
/// As for `adma_put`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_put_notify(
    remote: i64,
    offset: u64,
    src: *const c_void,
    len: usize,
    notify_offset: u64,
    value: u64,
) -> c_int {
    guarded("adma_put_notify", || {
        let (window, notify) = (links().windows().attached(remote)?, notify(notify_offset, value));
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { window.put(offset, src.cast(), len, notify) }.map(|()| 0)
    })
}

/// Copies `len` bytes at an offset of a window of the peer to `dst`, and returns when they have
/// arrived. Ordered with puts and other gets, see `adma_put`.
///
/// Returns 0 or a negative code, as `adma_put`.
///
/// # Safety
/// Until this returns, `dst` must be valid for writing of `len` bytes, and no other thread may use
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_get(remote: i64, offset: u64, dst: *mut c_void, len: usize) -> c_int {
    guarded("adma_get", || {
        let window = links().windows().attached(remote)?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { window.get(offset, dst.cast(), len) }.map(|()| 0)
    })
}

/// Starts a put, and returns at once; small ones may be complete already. A thread of the library,
/// or a thread that waits for it, executes it.
///
/// Returns a cookie (0 or above) for `adma_check`, `adma_wait` and `adma_result`, as `adma_iread`;
/// or a negative code, and then nothing is in flight. A put is complete when its data is in the
/// window.
///
/// # Safety
/// Until the put is complete, `src` must stay valid for reading of `len` bytes, and no thread may
/// write to it. `adma_iread` defines when it is complete; it also is when an `adma_fence` that was
/// called after it returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iput(
    remote: i64,
    offset: u64,
    src: *const c_void,
    len: usize,
) -> i64 {
    guarded("adma_iput", || {
        let window = links().windows().attached(remote)?;
        // SAFETY: the caller guarantees the memory until the put is complete.
        unsafe { window.iput(offset, src.cast(), len, None) }
    })
}

/// Starts a put with a notification, see `adma_put_notify`, and returns at once.
///
/// Returns a cookie or a negative code, as `adma_iput`.
///
/// # Safety
/// As for `adma_iput`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iput_notify(
    remote: i64,
    offset: u64,
    src: *const c_void,
    len: usize,
    notify_offset: u64,
    value: u64,
) -> i64 {
    guarded("adma_iput_notify", || {
        let (window, notify) = (links().windows().attached(remote)?, notify(notify_offset, value));
        // SAFETY: the caller guarantees the memory until the put is complete.
        unsafe { window.iput(offset, src.cast(), len, notify) }
    })
}

/// Starts a get, and returns at once; small ones may be complete already.
///
/// Returns a cookie or a negative code, as `adma_iput`.
///
/// # Safety
/// Until the get is complete, `dst` must stay valid for writing of `len` bytes, and no other thread
/// may use it. `adma_iput` defines when it is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iget(remote: i64, offset: u64, dst: *mut c_void, len: usize) -> i64 {
    guarded("adma_iget", || {
        let window = links().windows().attached(remote)?;
        // SAFETY: the caller guarantees the memory until the get is complete.
        unsafe { window.iget(offset, dst.cast(), len) }
    })
}

/// Waits until every put and get that was started before, on any window of the same link, is
/// complete: its memory may be used. Its cookie reports the result shortly afterwards.
///
/// Returns 0 or a negative code, such as `ADMA_EPIPE` if the peer has disconnected.
#[unsafe(no_mangle)]
pub extern "C" fn adma_fence(remote: i64) -> c_int {
    guarded("adma_fence", || links().windows().attached(remote)?.fence().map(|()| 0))
}

/// Converts a notification for the core, which checks the variable's offset.
fn notify(offset: u64, value: u64) -> Option<PutNotification> {
    Some(PutNotification { offset, value })
}

fn no_handle() -> CallError {
    CallError::new(ADMA_EFAULT, "the handle is a null pointer")
}
