//! Memory of the C program, validated before it becomes a slice or is passed on.

use crate::code::{ADMA_EFAULT, ADMA_EINVAL, ADMA_EOVERFLOW, CallError};

/// Rejects what cannot be memory: a null pointer with a length, or a range that runs past the end
/// of the address space. A length of zero is valid with any pointer.
#[inline]
pub(crate) fn check(address: *const u8, length: usize) -> Result<(), CallError> {
    if length == 0 {
        return Ok(());
    }
    if address.is_null() {
        let text = format!("the memory is a null pointer with a length of {length} bytes");
        return Err(CallError::new(ADMA_EFAULT, text));
    }
    let end = (address as usize).checked_add(length);
    if end.is_none() || length > isize::MAX as usize {
        let text = format!("{length} bytes at {address:p} run past the end of the address space");
        return Err(CallError::new(ADMA_EOVERFLOW, text));
    }
    Ok(())
}

/// A string of the C program.
///
/// # Safety
/// It must be null, or end with a zero byte and stay valid and unchanged for `'a`.
pub(crate) unsafe fn text<'a>(text: *const std::ffi::c_char) -> Result<&'a str, CallError> {
    if text.is_null() {
        return Err(CallError::new(ADMA_EFAULT, "the name is a null pointer"));
    }
    // SAFETY: not null, and the caller guarantees the rest.
    let bytes = unsafe { std::ffi::CStr::from_ptr(text) };
    match bytes.to_str() {
        Ok("") => Err(CallError::new(ADMA_EINVAL, "the name is empty")),
        Ok(text) => Ok(text),
        Err(_) => Err(CallError::new(ADMA_EINVAL, "the name is not UTF-8")),
    }
}
