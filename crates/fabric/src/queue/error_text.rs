//! The texts of errors for the user: MPI libraries print only these.

use std::ffi::{c_char, c_int};

use crate::abi::*;
use crate::core::core;

/// The text of a code: the cause and the remedy if they are known, else libfabric's text.
fn text(code: c_int) -> *const c_char {
    let text = match code.wrapping_abs() {
        FI_ECONNRESET => {
            c"the peer's process has ended, or has closed its endpoint: see its last output"
        }
        FI_EPERM => {
            c"the memory of the peer's process is not accessible: \"memferry doctor\" prints the cause and the remedy"
        }
        FI_EACCES => c"the memory is registered, but not for accesses of this kind",
        FI_ENOKEY => {
            c"no memory is registered under this key: the key is wrong, or its owner has closed the registration"
        }
        FI_EHOSTUNREACH => {
            c"the other host cannot be reached: see MEMFERRY_REMOTE and MEMFERRY_FABRIC_INTERFACE, and whether libfabric has \"tcp\""
        }
        FI_ETRUNC => c"the message is longer than the receive buffer",
        code => return core().error_text(code),
    };
    text.as_ptr()
}

/// The text of a code, which is also copied to a buffer.
///
/// # Safety
/// The buffer must be valid for writes of `length` bytes, or null.
pub(super) unsafe fn copy_error_text(
    code: c_int,
    buffer: *mut c_char,
    length: usize,
) -> *const c_char {
    let text = text(code);
    if !buffer.is_null() && length > 0 {
        // SAFETY: the text is a C string; the caller guarantees the buffer.
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

    fn copied_text(code: c_int) -> String {
        let mut buffer = [1; 200];
        // SAFETY: the buffer has `length` bytes; the result and the buffer are C strings.
        unsafe {
            let text = CStr::from_ptr(copy_error_text(code, buffer.as_mut_ptr(), buffer.len()));
            assert_eq!(text, CStr::from_ptr(buffer.as_ptr()));
            text.to_str().unwrap().into()
        }
    }

    #[test]
    fn what_people_meet_is_said_in_a_sentence() {
        assert!(copied_text(FI_ECONNRESET).contains("has ended"));
        assert_eq!(copied_text(-FI_ECONNRESET), copied_text(FI_ECONNRESET));
        assert!(copied_text(FI_EPERM).contains("memferry doctor"));
        assert!(copied_text(FI_EHOSTUNREACH).contains("MEMFERRY_FABRIC_INTERFACE"));
        assert!(!copied_text(FI_EIO).is_empty());
    }

    #[test]
    fn a_text_is_cut_where_the_buffer_ends() {
        let mut buffer = [1; 6];
        // SAFETY: the buffer has that length.
        unsafe { copy_error_text(FI_ECONNRESET, buffer.as_mut_ptr(), buffer.len()) };
        // SAFETY: the terminator was written.
        assert_eq!(unsafe { CStr::from_ptr(buffer.as_ptr()) }, c"the p");
    }
}
