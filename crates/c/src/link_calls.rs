//! The calls for links between processes. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_char, c_int, c_void};

use crate::code::{ADMA_EFAULT, ADMA_EINPROGRESS, CallError};
use crate::global::links;
use crate::guard::guarded;
use crate::memory;

/// Takes a name that other processes connect to. A name with a slash in it is a path in the file
/// system, and goes with `adma_close`; any other is known on the whole machine and vanishes with the
/// process. Processes of other users are refused.
///
/// Returns a descriptor (0 or above) for `adma_accept`, which `poll` and `epoll` find readable when
/// somebody has connected; or a negative code, such as `ADMA_EADDRINUSE`.
///
/// # Safety
/// `name` must be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_listen(name: *const c_char) -> c_int {
    guarded("adma_listen", || {
        // SAFETY: the caller vouches for it.
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

/// Connects to a name that a process of the same user listens on, and waits until that process
/// accepts, for at most 10 seconds.
///
/// Returns the descriptor of a link (0 or above), or a negative code: `ADMA_ECONNREFUSED` if nobody
/// listens, `ADMA_ETIMEDOUT` if nobody accepts.
///
/// A link takes messages in both directions: the first write of one side meets the first read of the
/// other, the second the second, whichever comes first. Its descriptor is for the calls of this
/// header, and for `poll` and `epoll`, level-triggered, which find it readable while there is a
/// reason to make such a call: a read or write has ended and nobody has asked about its cookie, a
/// message waits to be read or wants to be moved on, or the other side is gone. Call `adma_check` for
/// the cookies that are open, or `adma_peek` if there are none: what they find nothing about, they
/// make unreadable.
///
/// Messages move while either side is inside a call; with `MEMFERRY_BACKGROUND=on` in the
/// environment, also while both compute. Close the descriptor with `adma_close`. It is closed by
/// `exec`.
///
/// # Safety
/// `name` must be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_connect(name: *const c_char) -> c_int {
    guarded("adma_connect", || {
        // SAFETY: the caller vouches for it.
        links().connect(unsafe { memory::text(name) }?)
    })
}

/// Starts reading the next message of a link into `len` bytes at `addr`, and returns at once.
///
/// Returns a cookie (0 or above) for `adma_check`, `adma_wait`, `adma_result` and `adma_lengths`,
/// which any thread may call, any number of times or never; or a negative code, and then nothing is
/// under way.
///
/// # Safety
/// Until the read is over, `addr` must stay valid for writing of `len` bytes, and nobody may use it.
/// It is over when a check returns 1 or a code of its failure, when a wait returns, or when
/// `adma_close` of its link or `adma_fini` returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iread(fd: c_int, addr: *mut c_void, len: usize) -> i64 {
    // SAFETY: the caller vouches for the memory until the read is over.
    guarded("adma_iread", || unsafe { links().link(fd)?.iread(addr.cast(), len) })
}

/// Starts writing `len` bytes at `addr` as one message to a link, and returns at once; small messages
/// may be on their way already.
///
/// Returns a cookie or a negative code, as `adma_iread`. That a write is over means that its memory
/// may be used again: a small message may still wait on the other side to be read.
///
/// # Safety
/// Until the write is over, `addr` must stay valid for reading of `len` bytes, and nobody may write
/// to it. It is over when a read would be, see `adma_iread`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_iwrite(fd: c_int, addr: *const c_void, len: usize) -> i64 {
    // SAFETY: the caller vouches for the memory until the write is over.
    guarded("adma_iwrite", || unsafe { links().link(fd)?.iwrite(addr.cast(), len) })
}

/// Reads the next message of a link into `len` bytes at `addr`, and returns when it is there. Sleeps
/// while there is nothing to do.
///
/// Returns the length of the message (0 or above), or a negative code. A message that is longer than
/// `len` is `ADMA_EMSGSIZE`: then `addr` holds as much of it as fits, and the rest is lost.
///
/// # Safety
/// Until this returns, `addr` must be valid for writing of `len` bytes, and nobody may use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_read(fd: c_int, addr: *mut c_void, len: usize) -> i64 {
    guarded("adma_read", || {
        // SAFETY: the caller vouches for the memory until this returns.
        unsafe { links().link(fd)?.read(addr.cast(), len) }.map(u64::cast_signed)
    })
}

/// Writes `len` bytes at `addr` as one message to a link, and returns when the memory may be used
/// again: at once for small messages, and when the other side has read them for large ones. Sleeps
/// while there is nothing to do.
///
/// Returns 0 or a negative code. That a read on the other side was too short does not show here.
///
/// # Safety
/// Until this returns, `addr` must be valid for reading of `len` bytes, and nobody may write to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_write(fd: c_int, addr: *const c_void, len: usize) -> c_int {
    guarded("adma_write", || {
        // SAFETY: the caller vouches for the memory until this returns.
        unsafe { links().link(fd)?.write(addr.cast(), len) }.map(|()| 0)
    })
}

/// Asks whether the read, write, put or get of a cookie is over. Moves messages of its link on, and
/// does not wait.
///
/// Returns 1 if it is over; 0 if not yet; or a negative code: what it failed with, or what is wrong
/// with the cookie. `ADMA_EMSGSIZE` is a read that is over with as much of a longer message as fits:
/// see `adma_lengths`. Asking again about one that is over gives the same answer, until its link is
/// closed: then it is `ADMA_ESTALE`. The reasons of only so many failures are known, the older ones
/// are then `ADMA_EIDRM`. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
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

/// Waits until the read, write, put or get of a cookie is over. Moves messages of its link on, and
/// sleeps while there is nothing to do.
///
/// Returns 0 when it is over; or a negative code, as `adma_check`; or `ADMA_ECANCELED` if this side
/// closes the link meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn adma_wait(cookie: i64) -> c_int {
    guarded("adma_wait", || {
        let (link, number) = links().of_cookie(cookie)?;
        link.wait(number)?.outcome().map(|()| 0)
    })
}

/// The length of the message that the read of a cookie got, or that its write wrote, or of the data
/// of its put or get. Does not wait.
///
/// Returns it (0 or above); `ADMA_EINPROGRESS` if it is not over yet; or another negative code, as
/// `adma_check`. Known for the last 4096 operations of a link, afterwards it is `ADMA_EIDRM`.
#[unsafe(no_mangle)]
pub extern "C" fn adma_result(cookie: i64) -> i64 {
    guarded("adma_result", || {
        let (link, number) = links().of_cookie(cookie)?;
        let ended = link.check(number)?.ok_or_else(not_yet)?;
        ended.length().map(u64::cast_signed)
    })
}

/// As `adma_result`, but of a read that was too short as well: `*message` becomes the length of the
/// message and `*buffer` that of the memory that was given for it. Either pointer may be null.
///
/// Returns 0; or a negative code, as `adma_result`, and then nothing is set.
///
/// # Safety
/// `message` and `buffer` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_lengths(cookie: i64, message: *mut u64, buffer: *mut u64) -> c_int {
    guarded("adma_lengths", || {
        let (link, number) = links().of_cookie(cookie)?;
        let ended = link.check(number)?.ok_or_else(not_yet)?;
        let (found_message, found_buffer) = ended.lengths()?;
        for (to, found) in [(message, found_message), (buffer, found_buffer)] {
            if !to.is_null() && !to.is_aligned() {
                let text = format!("a length cannot be stored at {to:p}: not aligned to 8 bytes");
                return Err(CallError::new(ADMA_EFAULT, text));
            }
            // SAFETY: aligned, and the caller vouches that it is null or valid.
            if let Some(to) = unsafe { to.as_mut() } {
                *to = found;
            }
        }
        Ok(0)
    })
}

/// The length of the message that the next read of a link will get. Moves messages on, takes none,
/// and does not wait.
///
/// Returns it (0 or above); `ADMA_ENOMSG` if no message waits; or another negative code, such as
/// `ADMA_EPIPE` if no message waits and none will come.
#[unsafe(no_mangle)]
pub extern "C" fn adma_peek(fd: c_int) -> i64 {
    guarded("adma_peek", || links().link(fd)?.peek().map(u64::cast_signed))
}

/// Closes a link or listener and its descriptor. The other side of a link is told; what was written
/// and is over can still be read there. Reads, writes, puts and gets of this side that are not over
/// end without success, also those of calls on other threads, with `ADMA_ECANCELED`; the windows of
/// the link are withdrawn and detached. Afterwards the cookies and windows of the link are
/// `ADMA_ESTALE`, and all memory is the caller's again: if the other side is copying into it at this
/// moment, that is waited for, for a second.
///
/// Returns 0, or `ADMA_EBADF` if it is not the descriptor of an open link or listener. `ADMA_EBUSY`:
/// it is closed, but the other process is stopped while it writes. The memory of reads whose cookies
/// `adma_check` calls not yet over (0) must stay valid until it does not; that of a window, until an
/// `adma_withdraw` of it returns 0. Both end when the other process goes on or ends. A descriptor that
/// the program has closed with `close` is noticed at the next call for it, and its link closed then.
#[unsafe(no_mangle)]
pub extern "C" fn adma_close(fd: c_int) -> c_int {
    guarded("adma_close", || links().close(fd).map(|()| 0))
}

fn not_yet() -> CallError {
    CallError::new(ADMA_EINPROGRESS, "this is not over yet: check or wait first")
}
