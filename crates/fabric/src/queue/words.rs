//! What errors are called for people: MPI libraries print this and nothing else.

use std::ffi::{c_char, c_int};

use crate::abi::*;
use crate::core::core;

/// The text for a code: what has happened and what helps where that can be said, else libfabric's.
fn text(code: c_int) -> *const c_char {
    let text = match code.wrapping_abs() {
        FI_ECONNRESET => {
            c"the process at the other end has ended, or has closed its endpoint: see what it said last"
        }
        FI_EPERM => {
            c"the memory of the other process is out of reach: \"memferry doctor\" says why and what helps"
        }
        FI_EACCES => c"the memory is registered, but not for accesses of this kind",
        FI_ENOKEY => {
            c"nothing is registered under this key: it is wrong, or its owner has closed the registration"
        }
        FI_EHOSTUNREACH => {
            c"the other host cannot be reached: see MEMFERRY_REMOTE and MEMFERRY_FABRIC_INTERFACE, and whether libfabric has \"tcp\""
        }
        FI_ETRUNC => c"the message is longer than the memory that was given to receive it",
        code => return core().text(code),
    };
    text.as_ptr()
}

/// The text for a code, which is also copied to a buffer.
///
/// # Safety
/// The buffer must be valid for writes of `length` bytes, or null.
pub(super) unsafe fn say(code: c_int, buffer: *mut c_char, length: usize) -> *const c_char {
    let text = text(code);
    if !buffer.is_null() && length > 0 {
        // SAFETY: the text is a string of C's, the buffer the caller's promise.
        unsafe {
            libc::strncpy(buffer, text, length);
            buffer.add(length - 1).write(0);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn said(code: c_int) -> String {
        let mut buffer = [1; 200];
        // SAFETY: there are as many bytes; what is returned and written are strings of C's.
        unsafe {
            let text = CStr::from_ptr(say(code, buffer.as_mut_ptr(), buffer.len()));
            assert_eq!(text, CStr::from_ptr(buffer.as_ptr()));
            text.to_str().unwrap().into()
        }
    }

    #[test]
    fn what_people_meet_is_said_in_a_sentence() {
        assert!(said(FI_ECONNRESET).contains("has ended"));
        assert_eq!(said(-FI_ECONNRESET), said(FI_ECONNRESET));
        assert!(said(FI_EPERM).contains("memferry doctor"));
        assert!(said(FI_EHOSTUNREACH).contains("MEMFERRY_FABRIC_INTERFACE"));
        assert!(!said(FI_EIO).is_empty());
    }

    #[test]
    fn a_text_is_cut_where_the_buffer_ends() {
        let mut buffer = [1; 6];
        // SAFETY: there are as many bytes.
        unsafe { say(FI_ECONNRESET, buffer.as_mut_ptr(), buffer.len()) };
        // SAFETY: the end was written.
        assert_eq!(unsafe { CStr::from_ptr(buffer.as_ptr()) }, c"the p");
    }
}
