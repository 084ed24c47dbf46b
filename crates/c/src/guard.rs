//! The wall between C and Rust: no panic passes it, and what goes wrong behind it is left for
//! `adma_last_error` on the calling thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{ADMA_ENOTRECOVERABLE, CallError};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Carries out the call `name` and gives its value, or the code of its failure.
#[inline]
pub(crate) fn guarded<T: From<c_int>>(
    name: &'static str,
    body: impl FnOnce() -> Result<T, CallError>,
) -> T {
    // Nothing that a panic could leave half done is reached again without a look at it: the global
    // ferry is replaced whole, and the core keeps its own state in order.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => report(name, &failure).into(),
        Err(panic) => report(name, &internal(&*panic)).into(),
    }
}

/// The text of the last failure on this thread, or an empty one.
pub(crate) fn last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.try_borrow().map(|text| text.as_ptr()));
    // Without the variable the thread is ending, and has no use for texts.
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
        // SAFETY: `last_error` gives a string that stays until the next failure on this thread.
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
