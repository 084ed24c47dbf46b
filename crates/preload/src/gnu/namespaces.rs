//! `unshare` and `setns`. The kernel lets a process enter some namespaces only while it has one thread, so
//! the helpers of copies end first. Both are plain system calls in the C library.

use std::ffi::c_int;

use super::copies::without_helpers;
use super::system;

/// As in the C library, without helpers.
///
/// # Safety
/// As for the function of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    let arguments = [flags as usize, 0, 0, 0, 0, 0];
    // SAFETY: as the caller guarantees.
    without_helpers(|| unsafe { system::call_as_c(libc::SYS_unshare, arguments) })
}

/// As in the C library, without helpers.
///
/// # Safety
/// As for the function of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn setns(descriptor: c_int, kind: c_int) -> c_int {
    let arguments = [descriptor as usize, kind as usize, 0, 0, 0, 0];
    // SAFETY: as the caller guarantees.
    without_helpers(|| unsafe { system::call_as_c(libc::SYS_setns, arguments) })
}
