//! Lookup of users by name.

use std::ffi::CString;

/// The id of a user.
pub fn uid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: all zeroes is a valid passwd: null pointers and numbers.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are valid for the call, and the length is that of the buffer.
    let result = unsafe {
        libc::getpwnam_r(name.as_ptr(), &mut entry, buffer.as_mut_ptr(), buffer.len(), &mut found)
    };
    (result == 0 && !found.is_null()).then_some(entry.pw_uid)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #[test]
    fn root_is_user_zero_and_nobody_is_called_nonsense() {
        assert_eq!(super::uid_of("root"), Some(0));
        assert_eq!(super::uid_of("no such user, surely"), None);
    }
}
