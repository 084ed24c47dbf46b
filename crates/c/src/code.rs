//! Error codes: one for every cause, each the negative of the closest Linux `errno`. Only
//! `call_error.rs` knows which error of the core becomes which code.

mod call_error;

use std::ffi::{CStr, c_int};

pub(crate) use call_error::CallError;

/// The peer belongs to a user that is not allowed to connect.
pub const ADMA_EPERM: c_int = -1;
/// The cookie or window is a number that was not issued yet.
pub const ADMA_ENOENT: c_int = -2;
/// The engine failed, and the processor could not finish the rest.
pub const ADMA_EIO: c_int = -5;
/// The memory cannot be accessed: is it still mapped?
pub const ADMA_ENXIO: c_int = -6;
/// Neither a cookie nor a window: it is negative; often an error code that was not checked. Or not
/// the descriptor of an open link or listener.
pub const ADMA_EBADF: c_int = -9;
/// The cookie, window or descriptor is from before a fork: only the parent process can use it.
pub const ADMA_ECHILD: c_int = -10;
/// The system refused a thread, memory or another resource; may work later.
pub const ADMA_EAGAIN: c_int = -11;
/// The GPU has no memory left, or the machine none that could be registered with it.
pub const ADMA_ENOMEM: c_int = -12;
/// The profile of the machine (`MEMFERRY_PROFILE`) cannot be read or written, the name of a link is
/// a path that this user may not use, or the owner of a window does not permit this access.
pub const ADMA_EACCES: c_int = -13;
/// A null pointer with a length above zero, or for a notification variable.
pub const ADMA_EFAULT: c_int = -14;
/// The peer is stopped in the middle of an access to a window, whose memory must stay valid. Or an
/// engine has no free channel.
pub const ADMA_EBUSY: c_int = -16;
/// The handle is not that of a window of this link's peer.
pub const ADMA_EXDEV: c_int = -18;
/// No GPU is in use, or no GPU has this number, or it cannot be used.
pub const ADMA_ENODEV: c_int = -19;
/// Another invalid argument, such as a notification variable that is not aligned to 8 bytes, an
/// empty name, empty rights, the cookie of a copy in place of that of a read or write, or a window
/// of the wrong side.
pub const ADMA_EINVAL: c_int = -22;
/// Too many descriptors, links or windows are open.
pub const ADMA_EMFILE: c_int = -24;
/// All cookies or numbers of windows are used up: call `adma_fini`, or close the link and open
/// another.
pub const ADMA_ENOSPC: c_int = -28;
/// The peer has disconnected: its process has exited, or it closed the link.
pub const ADMA_EPIPE: c_int = -32;
/// A variable in the environment (`MEMFERRY_CHANNELS` and so on) holds a value that is not valid.
pub const ADMA_EDOM: c_int = -33;
/// A range outside its memory or its window.
pub const ADMA_ERANGE: c_int = -34;
/// No message to read.
pub const ADMA_ENOMSG: c_int = -42;
/// The cookie's copy, read or write ended so long ago that its result is no longer stored.
pub const ADMA_EIDRM: c_int = -43;
/// Not started, because what it was ordered after failed.
pub const ADMA_ENOLINK: c_int = -67;
/// The peer violates the protocol, or has another version of it.
pub const ADMA_EPROTO: c_int = -71;
/// The profile of the machine (`MEMFERRY_PROFILE`) is not a profile, or the bytes are not the
/// handle of a window.
pub const ADMA_EBADMSG: c_int = -74;
/// A range that runs past the end of the address space.
pub const ADMA_EOVERFLOW: c_int = -75;
/// The process has opened and closed the library too often for cookies to stay unique.
pub const ADMA_EUSERS: c_int = -87;
/// The message is longer than the buffer for it, which holds what fits.
pub const ADMA_EMSGSIZE: c_int = -90;
/// No engine can do this operation on this memory.
pub const ADMA_EOPNOTSUPP: c_int = -95;
/// Another listener has this name.
pub const ADMA_EADDRINUSE: c_int = -98;
/// The name cannot be used: it is too long, or a path in a folder that does not exist.
pub const ADMA_EADDRNOTAVAIL: c_int = -99;
/// Too many reads, writes, puts and gets of the link are in flight: wait for some of them first.
pub const ADMA_ENOBUFS: c_int = -105;
/// The timeout passed before the notification variable held the value, or before the peer accepted
/// the connection.
pub const ADMA_ETIMEDOUT: c_int = -110;
/// No process listens on this name, or the listener refused the connection.
pub const ADMA_ECONNREFUSED: c_int = -111;
/// The system does not permit this process to access the memory of the window.
pub const ADMA_EHOSTUNREACH: c_int = -113;
/// The library is open already, without this GPU.
pub const ADMA_EALREADY: c_int = -114;
/// The read or write is not complete yet.
pub const ADMA_EINPROGRESS: c_int = -115;
/// The cookie or window is from before an `adma_fini` or of a closed link, or was never issued; or
/// the window was withdrawn.
pub const ADMA_ESTALE: c_int = -116;
/// Cancelled: this process closed the link or listener meanwhile.
pub const ADMA_ECANCELED: c_int = -125;
/// An internal error of the library. The effect of the call is undefined.
pub const ADMA_ENOTRECOVERABLE: c_int = -131;

/// The text of a code, for every code, also one that does not exist.
pub(crate) fn text(code: c_int) -> &'static CStr {
    match code {
        0 => c"success",
        ADMA_EPERM => c"the peer belongs to a user that is not allowed to connect",
        ADMA_ENOENT => c"this cookie or window was never issued",
        ADMA_EIO => c"the engine failed",
        ADMA_ENXIO => c"the memory cannot be accessed",
        ADMA_EBADF => c"neither a cookie, a window nor the descriptor of an open link or listener",
        ADMA_ECHILD => {
            c"this cookie, window or descriptor is from before a fork: only the parent can use it"
        }
        ADMA_EAGAIN => c"the system refused a thread, memory or another resource",
        ADMA_ENOMEM => c"the GPU has no memory left, or the machine none to register with it",
        ADMA_EACCES => {
            c"no permission for the profile of the machine, the name, or this access to the window"
        }
        ADMA_EFAULT => c"null pointer",
        ADMA_EBUSY => c"a window is still accessed, or an engine has no free channel",
        ADMA_EXDEV => c"the handle is not that of a window of the peer",
        ADMA_ENODEV => c"no GPU is in use, or this one does not exist or cannot be used",
        ADMA_EINVAL => c"invalid argument",
        ADMA_EMFILE => c"too many descriptors, links or windows are open",
        ADMA_ENOSPC => c"all cookies or windows are used up: call adma_fini, or open another link",
        ADMA_EPIPE => c"the peer has disconnected",
        ADMA_EDOM => c"a MEMFERRY_ variable in the environment holds a value that is not valid",
        ADMA_ERANGE => c"a range is outside its memory or window",
        ADMA_ENOMSG => c"no message to read",
        ADMA_EIDRM => {
            c"the operation of the cookie ended too long ago: its result is no longer stored"
        }
        ADMA_ENOLINK => c"not started: what it was ordered after failed",
        ADMA_EPROTO => c"the peer has another protocol or version",
        ADMA_EBADMSG => c"the profile of the machine or the handle of a window is malformed",
        ADMA_EOVERFLOW => c"a range runs past the end of the address space",
        ADMA_EUSERS => c"the library was opened and closed too often in this process",
        ADMA_EMSGSIZE => c"the message is longer than the buffer for it",
        ADMA_EOPNOTSUPP => c"no engine can do this operation on this memory",
        ADMA_EADDRINUSE => c"another listener has this name",
        ADMA_EADDRNOTAVAIL => c"the name cannot be used: is it too long, or its folder missing?",
        ADMA_ENOBUFS => c"too many operations are in flight: wait for some of them first",
        ADMA_ETIMEDOUT => c"timed out",
        ADMA_ECONNREFUSED => c"no process listens on this name, or it refused the connection",
        ADMA_EHOSTUNREACH => c"this process may not access the memory of the window",
        ADMA_EALREADY => c"the library is open already: choose the GPU before all other calls",
        ADMA_EINPROGRESS => c"not complete yet",
        ADMA_ESTALE => {
            c"this cookie or window is from before an adma_fini, adma_close or adma_withdraw"
        }
        ADMA_ECANCELED => c"cancelled: this process closed it meanwhile",
        ADMA_ENOTRECOVERABLE => c"an internal error of the library",
        1.. => c"not an error",
        _ => c"unknown error code",
    }
}

#[cfg(test)]
mod tests;
