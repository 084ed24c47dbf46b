//! The calls for links between processes. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_char, c_int, c_void};

use crate::code::{ADMA_EFAULT, ADMA_EINPROGRESS, CallError};
use crate::global::links;
use crate::guard::guarded;
use crate::memory;

/// Listens on a name that other processes connect to. A name with a slash in it is a path in the
/// file system, which `adma_close` removes; any other is valid on the whole machine and ends with
/// the process. Processes of other users are refused.
///
/// Returns a descriptor (0 or above) for `adma_accept`, which `poll` and `epoll` report as readable
/// when a process has connected; or a negative code, such as `ADMA_EADDRINUSE`.
///
/// # Safety
/// `name` must be null or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_listen(name: *const c_char) -> c_int {
    guarded("adma_listen", || {
        // SAFETY: the caller guarantees it.
        links().listen(unsafe { memory::text(name) }?)
    })
}

/// Waits until a process connects to the name of a listener.
///
/// Returns the descriptor of a link (0 or above), or a negative code; `ADMA_ECANCELED` if the
/// listener is closed meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn adma_accept(listen_fd: c_int) -> c_int {
    guarded("adma_accept", || links().accept(listen_fd))
}

/// Connects to a name that a process of the same user listens on. That process replies without a
/// call of its own, even before it calls `adma_accept`; this call waits for the reply, for at most 10
/// seconds.
///
/// Returns the descriptor of a link (0 or above), or a negative code: `ADMA_ECONNREFUSED` if no
/// process listens, `ADMA_ETIMEDOUT` if there is no reply: it is stopped, or 64 links wait
/// for `adma_accept` already.
///
/// A link has messages in both directions: the first write of one side matches the first read of
/// the other, the second the second, whichever comes first. Its descriptor is for the calls of this
/// header, and for `poll` and level-triggered `epoll`, which report it as readable while there is a
/// reason to call: a read or write is complete and its cookie was not checked, a message is unread
/// or has steps left, or the peer has disconnected. Call `adma_check` for every open cookie, or
/// `adma_peek` if there are none: a call that finds nothing makes the descriptor unreadable.
///
/// Messages make progress while either side is inside a call; with `MEMFERRY_BACKGROUND=on` in the
/// environment, also while both compute. Close the descriptor with `adma_close`. `exec` closes it.
///
/// # Safety
/// `name` must be null or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_connect(name: *const c_char) -> c_int {
    guarded("adma_connect", || {
        // SAFETY: the caller guarantees it.
        links().connect(unsafe { memory::text(name) }?)
    })
}

/// Starts reading the next message of a link into `len` bytes at `addr`, and returns at once.
///
/// Returns a cookie (0 or above) for `adma_check`, `adma_wait`, `adma_result` and `adma_lengths`,
/// which any thread may call, any number of times or never; or a negative code, and then nothing is
/// in flight.
///
/// # Safety
/// Until the read is complete, `addr` must stay valid for writing of `len` bytes, and no thread may
/// use it. It is complete when a check returns 1 or the code of its failure, when a wait returns,
/// or when `adma_close` of its link or `adma_fini` returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iread(fd: c_int, addr: *mut c_void, len: usize) -> i64 {
    // SAFETY: the caller guarantees the memory until the read is complete.
    guarded("adma_iread", || unsafe { links().link(fd)?.iread(addr.cast(), len) })
}

/// Starts writing `len` bytes at `addr` as one message to a link, and returns at once; small
/// messages may be sent already.
///
/// Returns a cookie or a negative code, as `adma_iread`. A complete write means that its memory may
/// be used again: a small message may still be unread at the peer.
///
/// # Safety
/// Until the write is complete, `addr` must stay valid for reading of `len` bytes, and no thread
/// may write to it. `adma_iread` defines when it is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iwrite(fd: c_int, addr: *const c_void, len: usize) -> i64 {
    // SAFETY: the caller guarantees the memory until the write is complete.
    guarded("adma_iwrite", || unsafe { links().link(fd)?.iwrite(addr.cast(), len) })
}

/// Reads the next message of a link into `len` bytes at `addr`, and returns when it has arrived.
/// Sleeps while there is nothing to do.
///
/// Returns the length of the message (0 or above), or a negative code. A message that is longer
/// than `len` is `ADMA_EMSGSIZE`: then `addr` holds what fits, and the rest is lost.
///
/// # Safety
/// Until this returns, `addr` must be valid for writing of `len` bytes, and no other thread may use
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_read(fd: c_int, addr: *mut c_void, len: usize) -> i64 {
    guarded("adma_read", || {
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { links().link(fd)?.read(addr.cast(), len) }.map(u64::cast_signed)
    })
}

/// Writes `len` bytes at `addr` as one message to a link, and returns when the memory may be used
/// again: at once for small messages, and when the peer has read them for large ones. Sleeps while
/// there is nothing to do.
///
/// Returns 0 or a negative code. A read of the peer that was too short is not reported here.
///
/// # Safety
/// Until this returns, `addr` must be valid for reading of `len` bytes, and no thread may write to
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_write(fd: c_int, addr: *const c_void, len: usize) -> c_int {
    guarded("adma_write", || {
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { links().link(fd)?.write(addr.cast(), len) }.map(|()| 0)
    })
}

/// Checks whether the read, write, put or get of a cookie is complete. Makes progress on the
/// messages of its link, and does not wait.
///
/// Returns 1 if it is complete; 0 if not yet; or a negative code: its error, or that of the cookie.
/// `ADMA_EMSGSIZE` is a complete read of a longer message, with what fits: see `adma_lengths`. A
/// second check of a complete one returns the same until its link is closed: then it is
/// `ADMA_ESTALE`. Only a limited number of errors is stored; older ones become `ADMA_EIDRM`. In a
/// forked child, the cookies of the parent are `ADMA_ECHILD`.
#[unsafe(no_mangle)]
pub extern "C" fn adma_check(cookie: i64) -> c_int {
    guarded("adma_check", || {
        let (link, number) = links().of_cookie(cookie)?;
        match link.check(number)? {
            Some(ended) => ended.outcome().map(|()| 1),
            None => Ok(0),
        }
    })
}

/// Waits until the read, write, put or get of a cookie is complete. Makes progress on the messages
/// of its link, and sleeps while there is nothing to do.
///
/// Returns 0 when it is complete; or a negative code, as `adma_check`; or `ADMA_ECANCELED` if this
/// process closes the link meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn adma_wait(cookie: i64) -> c_int {
    guarded("adma_wait", || {
        let (link, number) = links().of_cookie(cookie)?;
        link.wait(number)?.outcome().map(|()| 0)
    })
}

/// Returns the length of the message that the read of a cookie received, or that its write sent, or
/// of the data of its put or get. Does not wait.
///
/// Returns the length (0 or above); `ADMA_EINPROGRESS` if it is not complete yet; or another
/// negative code, as `adma_check`. Stored for the last 4096 operations of a link, afterwards it is
/// `ADMA_EIDRM`.
#[unsafe(no_mangle)]
pub extern "C" fn adma_result(cookie: i64) -> i64 {
    guarded("adma_result", || {
        let (link, number) = links().of_cookie(cookie)?;
        let ended = link.check(number)?.ok_or_else(|| not_yet(cookie))?;
        ended.length().map(u64::cast_signed)
    })
}

/// As `adma_result`, but also for a read that was too short: `*message` becomes the length of the
/// message and `*buffer` that of the memory for it. Either pointer may be null.
///
/// Returns 0; or a negative code, as `adma_result`, and then nothing is set.
///
/// # Safety
/// `message` and `buffer` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_lengths(cookie: i64, message: *mut u64, buffer: *mut u64) -> c_int {
    guarded("adma_lengths", || {
        let (link, number) = links().of_cookie(cookie)?;
        let ended = link.check(number)?.ok_or_else(|| not_yet(cookie))?;
        let (found_message, found_buffer) = ended.lengths()?;
        for (to, found) in [(message, found_message), (buffer, found_buffer)] {
            if !to.is_null() && !to.is_aligned() {
                let text = format!("a length cannot be stored at {to:p}: not aligned to 8 bytes");
                return Err(CallError::new(ADMA_EFAULT, text));
            }
            // SAFETY: aligned, and the caller guarantees that it is null or valid.
            if let Some(to) = unsafe { to.as_mut() } {
                *to = found;
            }
        }
        Ok(0)
    })
}

/// Returns the length of the message that the next read of a link will receive. Makes progress on
/// messages, receives none, and does not wait.
///
/// Returns the length (0 or above); `ADMA_ENOMSG` if there is no message; or another negative code,
/// such as `ADMA_EPIPE` if there is none and the peer has disconnected.
#[unsafe(no_mangle)]
pub extern "C" fn adma_peek(fd: c_int) -> i64 {
    guarded("adma_peek", || links().link(fd)?.peek().map(u64::cast_signed))
}

/// Closes a link or listener and its descriptor. The peer of a link is notified, and can still read
/// messages whose writes are complete. Reads, writes, puts and gets of this side that are not
/// complete fail with `ADMA_ECANCELED`, also those of calls on other threads; the windows of the
/// link are withdrawn and detached. Afterwards the cookies and windows of the link are
/// `ADMA_ESTALE`, and the link accesses no memory any more: if the peer is copying into it, the
/// call waits for that, up to a second.
///
/// Returns 0, or `ADMA_EBADF` if it is not the descriptor of an open link or listener.
/// `ADMA_EBUSY`: it is closed, but the peer is stopped in the middle of a copy. The memory of reads
/// for whose cookies `adma_check` returns 0 must stay valid until it returns something else; that
/// of a window, until an `adma_withdraw` of it returns 0. Both happen when the peer continues or
/// exits. A descriptor that the program has closed with `close` is detected at the next call with
/// it, and its link is closed then.
#[unsafe(no_mangle)]
pub extern "C" fn adma_close(fd: c_int) -> c_int {
    guarded("adma_close", || links().close(fd).map(|()| 0))
}

fn not_yet(cookie: i64) -> CallError {
    let text = format!(
        "the operation of cookie {cookie} is not complete yet: adma_check or adma_wait first"
    );
    CallError::new(ADMA_EINPROGRESS, text)
}
