//! `libadma`: Memferry's copies, links and windows for C programs, under the names that the papers
//! gave the calls.
//!
//! Every call goes through `guard`, which lets no panic out, to the one ferry and to the links that
//! `global` keeps; errors become numbers in `code`. The comments here are also those of
//! `include/adma.h`, which is generated from this file, the files of calls and `code.rs`: they speak to
//! users of C.

mod code;
mod copy_calls;
mod deliver_calls;
mod global;
mod gpu_calls;
mod guard;
mod link_calls;
mod links;
mod memory;
mod open;
mod window_calls;
mod windows;

use std::ffi::{CStr, c_char, c_int};

pub use code::*;
pub use copy_calls::*;
pub use deliver_calls::*;
pub use gpu_calls::*;
use guard::guarded;
pub use link_calls::*;
pub use window_calls::*;

/// Opens the library: measures or looks up what the machine can do, and starts the channels.
///
/// Optional: every call that moves or compares memory does this when it is the first. Call it to
/// choose the moment, or to learn early that a setting in the environment is wrong. Does nothing
/// when the library is open.
///
/// Returns 0 or a negative code.
#[unsafe(no_mangle)]
pub extern "C" fn adma_init() -> c_int {
    guarded("adma_init", || {
        global::open()?;
        Ok(0)
    })
}

/// Closes the library: closes all links and listeners as `adma_close` does, waits for calls under
/// way on other threads and for all copies in flight, then ends the channels. Calls that begin
/// meanwhile wait, then open the library anew.
///
/// Optional: a program may end without it. All memory of all copies, reads and writes is the
/// caller's again afterwards, all windows are withdrawn and detached, memory of a GPU that the program
/// still has is given back, and nothing stays registered. Cookies and windows from before are refused
/// with `ADMA_ESTALE` from then on. Does nothing when the library is not open.
///
/// Returns 0 or a negative code. `ADMA_EBUSY`: all is closed, but another process is stopped while it
/// writes to memory of a link, closed now or before: see `adma_close`, and call this again later.
#[unsafe(no_mangle)]
pub extern "C" fn adma_fini() -> c_int {
    guarded("adma_fini", || {
        let outcome = global::links().close_all();
        global::close();
        outcome.map(|()| 0)
    })
}

/// What a code means: a text for every code, also for one that does not exist. It is constant and
/// valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn adma_strerror(code: c_int) -> *const c_char {
    code::text(code).as_ptr()
}

/// What exactly went wrong in the last call that failed on the calling thread, and what to do about
/// it; an empty text if none did. Never null. Valid until the next call that fails on this thread,
/// or the thread's end.
#[unsafe(no_mangle)]
pub extern "C" fn adma_last_error() -> *const c_char {
    guard::last_error()
}

/// The version of the library, such as "0.1.0". It is constant and valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn adma_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => unreachable!(),
        };
    VERSION.as_ptr()
}
