//! The initialiser of the library. It runs before those of all other libraries and reads the
//! environment that the kernel passed to the program: the C library has not set up its own yet.

use std::ffi::{CStr, c_char, c_int};

use memferry_sys::call_profile;

use super::{copies, device, heap, profile, real};

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

unsafe extern "C" fn start(
    _count: c_int,
    _words: *const *const c_char,
    environment: *const *const c_char,
) {
    real::find();
    heap::find_allocator();
    // SAFETY: the loader passes the environment of the program.
    let value_of = |name: &str| unsafe { value_of(environment, name) };
    if let Some(path) = value_of(call_profile::VARIABLE) {
        // All calls are counted as the C library executes them.
        profile::start(path);
    } else if let Some(value) = value_of(copies::VARIABLE) {
        copies::start(value.to_str().unwrap_or_default());
        if let Some(path) = value_of(device::VARIABLE) {
            device::start(path);
        }
    }
    if let Some(value) = value_of(heap::VARIABLE) {
        heap::start(value.to_str().unwrap_or_default());
    }
}

/// The value of a variable, if it is set and not empty.
///
/// # Safety
/// The environment must be a list of strings that ends with a null pointer.
unsafe fn value_of(environment: *const *const c_char, name: &str) -> Option<&'static CStr> {
    let mut entry = environment;
    // SAFETY: the caller guarantees the list; its strings live as long as the program.
    unsafe {
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry);
            let bytes = text.to_bytes();
            if bytes.len() > name.len()
                && bytes.starts_with(name.as_bytes())
                && bytes[name.len()] == b'='
            {
                let value = CStr::from_ptr((*entry).add(name.len() + 1));
                return (!value.is_empty()).then_some(value);
            }
            entry = entry.add(1);
        }
    }
    None
}
