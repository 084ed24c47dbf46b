//! The numbers of windows, exposed and attached.
//!
//! They increase for the whole life of a process, and a forked child continues where its parent
//! was: so no number is ever issued twice, and one that is not in the table is that of a former
//! window. They lie between the cookies of copies and those of links.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::code::CallError;
use crate::code::{ADMA_EBADF, ADMA_ECHILD, ADMA_EINVAL, ADMA_ENOENT, ADMA_ENOSPC, ADMA_ESTALE};
use crate::links::FIRST_LINK_COOKIE;

/// The smallest number of a window. All cookies of copies are below.
pub(crate) const FIRST: i64 = FIRST_LINK_COOKIE - (1 << 47);

/// The number of the next window. An atomic without a lock, because a child inherits locks in the
/// state of the fork.
static NEXT: AtomicI64 = AtomicI64::new(FIRST);

/// The number that the next window will get.
pub(super) fn next() -> i64 {
    NEXT.load(Ordering::Relaxed)
}

/// Allocates the next number.
pub(super) fn take() -> Result<i64, CallError> {
    let taken = NEXT.fetch_add(1, Ordering::Relaxed);
    if taken < FIRST_LINK_COOKIE {
        return Ok(taken);
    }
    NEXT.fetch_sub(1, Ordering::Relaxed);
    Err(CallError::new(ADMA_ENOSPC, "all numbers of windows are used up in this process"))
}

/// Returns why a number has no window, in a process whose own numbers start at `first_own`.
#[cold]
pub(super) fn explain(number: i64, first_own: i64) -> CallError {
    let (code, text) = match number {
        ..0 => (ADMA_EBADF, "is no window: is it the error code of an earlier call?"),
        0..FIRST | FIRST_LINK_COOKIE.. => (ADMA_EINVAL, "is a cookie, or nothing: not a window"),
        _ if number < first_own => {
            (ADMA_ECHILD, "is a window from before a fork: only the parent process can use it")
        }
        _ if number < next() => {
            (ADMA_ESTALE, "is a window that was withdrawn or detached, or its link was closed")
        }
        _ => (ADMA_ENOENT, "is not the number of a window yet"),
    };
    CallError::new(code, format!("{number} {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_no_window_is_told_what_it_is() {
        let taken = take().unwrap();
        let code = |number, first_own| explain(number, first_own).code;
        assert_eq!(code(-22, FIRST), ADMA_EBADF);
        assert_eq!(code(i64::MIN, FIRST), ADMA_EBADF);
        for cookie in [0, 1 << 47, FIRST - 1, FIRST_LINK_COOKIE, i64::MAX] {
            assert_eq!(code(cookie, FIRST), ADMA_EINVAL);
        }
        assert_eq!(code(taken, FIRST), ADMA_ESTALE);
        assert_eq!(code(taken, taken + 1), ADMA_ECHILD);
        assert_eq!(code(FIRST_LINK_COOKIE - 1, FIRST), ADMA_ENOENT);
    }

    #[test]
    fn no_number_is_given_out_twice() {
        let (first, second) = (take().unwrap(), take().unwrap());
        assert!(first >= FIRST && second > first && next() > second);
    }
}
