//! The boundary between C and Rust: it stops every panic, and stores the error of a failed call for
//! `adma_last_error` of the calling thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{ADMA_ENOTRECOVERABLE, CallError};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the call `name` and returns its value, or the code of its error.
#[inline]
pub(crate) fn guarded<T: From<c_int>>(
    name: &'static str,
    body: impl FnOnce() -> Result<T, CallError>,
) -> T {
    // No state that a panic could leave inconsistent is used again unchecked: the global ferry is
    // replaced as a whole, and the core keeps its own state consistent.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => report(name, &failure).into(),
        Err(panic) => report(name, &internal(&*panic)).into(),
    }
}

/// The text of the last error of this thread, or an empty one.
pub(crate) fn last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.try_borrow().map(|text| text.as_ptr()));
    // Without the thread-local variable the thread is exiting, and needs no text.
    text.ok().and_then(Result::ok).unwrap_or(c"".as_ptr())
}

#[cold]
fn report(name: &str, failure: &CallError) -> c_int {
    let text = format!("{name}: {}", failure.text).replace('\0', "\u{fffd}");
    let text = CString::new(text).unwrap_or_else(|_| CStr::to_owned(c"unknown error"));
    let _ = LAST.try_with(|last| last.replace(text));
    failure.code
}

#[cold]
fn internal(panic: &(dyn Any + Send)) -> CallError {
    let said = (panic.downcast_ref::<&str>().copied())
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given");
    CallError::new(ADMA_ENOTRECOVERABLE, format!("a mistake inside the library: {said}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_text() -> String {
        // SAFETY: `last_error` returns a string that lives until the next failed call of this
        // thread.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_code_and_a_text() {
        let code: c_int = guarded("adma_test", || panic!("it {}", "broke"));
        assert_eq!(code, ADMA_ENOTRECOVERABLE);
        assert_eq!(last_text(), "adma_test: a mistake inside the library: it broke");
    }

    #[test]
    fn a_failure_is_told_on_its_own_thread_only() {
        let code: i64 = guarded("adma_test", || Err(CallError::new(-5, "nul \0 inside")));
        assert_eq!(code, -5);
        assert_eq!(last_text(), "adma_test: nul \u{fffd} inside");
        std::thread::spawn(|| assert_eq!(last_text(), "")).join().unwrap();
    }

    #[test]
    fn a_success_leaves_the_last_failure_alone() {
        let _: c_int = guarded("adma_test", || Err(CallError::new(-5, "before")));
        assert_eq!(guarded("adma_test", || Ok(7)), 7);
        assert_eq!(last_text(), "adma_test: before");
    }
}
