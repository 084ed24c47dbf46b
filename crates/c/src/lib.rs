//! `libadma`: Memferry's copies, links, windows and teams for C programs, under the names that the papers
//! gave the calls.
//!
//! Every call goes through `guard`, which stops every panic, to the one ferry and the links in
//! `global`; errors become numbers in `code`. The comments here are also those of `include/adma.h`,
//! which is generated from this file, the files of calls and `code.rs`: they address users of C.

mod batch_calls;
mod code;
mod copy_calls;
mod crc_calls;
mod deliver_calls;
mod dualcast_calls;
mod global;
mod gpu_calls;
mod guard;
mod link_calls;
mod links;
mod memory;
mod open;
mod team_calls;
mod teams;
mod window_calls;
mod windows;

use std::ffi::{CStr, c_char, c_int};

pub use batch_calls::*;
pub use code::*;
pub use copy_calls::*;
pub use crc_calls::*;
pub use deliver_calls::*;
pub use dualcast_calls::*;
pub use gpu_calls::*;
use guard::guarded;
pub use link_calls::*;
pub use team_calls::*;
pub use window_calls::*;

/// Opens the library: loads or measures the profile of the machine, and starts the channels.
///
/// Optional: the first call that moves or compares memory opens the library too. Call it to choose
/// when, or to detect an invalid setting in the environment early. Does nothing when the library is
/// open.
///
/// Returns 0 or a negative code.
#[unsafe(no_mangle)]
pub extern "C" fn adma_init() -> c_int {
    guarded("adma_init", || {
        global::open()?;
        Ok(0)
    })
}

/// Closes the library: leaves all teams, closes all links and listeners as `adma_close` does, waits for running calls
/// of other threads and for all copies in flight, then stops the channels. Calls that start
/// meanwhile wait, then open the library again.
///
/// Optional: a program may end without it. Afterwards the library accesses no memory of the caller
/// any more, all windows are withdrawn and detached, all memory of a GPU is freed, and nothing
/// stays registered. Earlier cookies and windows are refused with `ADMA_ESTALE`. Does nothing when
/// the library is not open.
///
/// Returns 0 or a negative code. `ADMA_EBUSY`: everything is closed, but a stopped process may
/// still write to the memory of a link that was closed now or earlier: see `adma_close`, and call
/// this again later.
#[unsafe(no_mangle)]
pub extern "C" fn adma_fini() -> c_int {
    guarded("adma_fini", || {
        global::teams().leave_all();
        let outcome = global::links().close_all();
        global::close();
        outcome.map(|()| 0)
    })
}

/// Returns a text for every code, also for one that does not exist. It is constant and always
/// valid.
#[unsafe(no_mangle)]
pub extern "C" fn adma_strerror(code: c_int) -> *const c_char {
    code::text(code).as_ptr()
}

/// Describes the last failed call of the calling thread, and what to do about it; empty if no call
/// failed. Never null. Valid until the next call that fails on this thread, or until the thread
/// exits.
#[unsafe(no_mangle)]
pub extern "C" fn adma_last_error() -> *const c_char {
    guard::last_error()
}

/// Returns the version of the library, such as "0.1.0". It is constant and always valid.
#[unsafe(no_mangle)]
pub extern "C" fn adma_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => unreachable!(),
        };
    VERSION.as_ptr()
}
