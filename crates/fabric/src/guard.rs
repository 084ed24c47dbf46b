//! The wall between C and Rust: no panic passes it, and what goes wrong behind it becomes one of
//! libfabric's negative codes.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_message::{ConnectError, Error, ValidationError};

use crate::abi::*;

/// What went wrong: one of libfabric's codes, positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

pub(crate) type Result<T = ()> = std::result::Result<T, Code>;

/// Carries out a call that returns nothing but whether it went well.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Result) -> c_int {
    number(|| body().map(|()| 0))
}

/// Carries out a call that returns a small number.
#[inline]
pub(crate) fn number(body: impl FnOnce() -> Result<c_int>) -> c_int {
    match protected(body) {
        Ok(number) => number,
        Err(Code(code)) => -code,
    }
}

/// Carries out a call that moves data, and returns nothing but whether it went well.
#[inline]
pub(crate) fn transfer(body: impl FnOnce() -> Result) -> isize {
    count(|| body().map(|()| 0))
}

/// Carries out a call that returns how much there was.
#[inline]
pub(crate) fn count(body: impl FnOnce() -> Result<usize>) -> isize {
    match protected(body) {
        Ok(count) => count as isize,
        Err(Code(code)) => -(code as isize),
    }
}

/// The outcome of a call, or the code for a mistake of ours if it panicked.
#[inline]
pub(crate) fn protected<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Locks that a panic leaves behind are poisoned, and whoever meets one panics in turn: what may
    // be half done is not used again.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Code(FI_EOTHER)))
}

/// Says that a function is not there, whatever it is given.
pub(crate) unsafe extern "C" fn unsupported() -> isize {
    -(FI_ENOSYS as isize)
}

impl From<&Error> for Code {
    fn from(error: &Error) -> Self {
        Self(match error {
            Error::Validation(ValidationError::TooManyOperations(_)) => FI_EAGAIN,
            Error::Validation(_) => FI_EINVAL,
            Error::Connect(error) => match error {
                ConnectError::NameInUse(_) => FI_EADDRINUSE,
                ConnectError::NobodyListens(_) => FI_ECONNREFUSED,
                ConnectError::NoAnswer { .. } => FI_ETIMEDOUT,
                ConnectError::UserNotAllowed(_) | ConnectError::Refused(..) => FI_EACCES,
                _ => FI_EIO,
            },
            Error::Truncated { .. } => FI_ETRUNC,
            Error::PeerGone(_) => FI_ECONNRESET,
            Error::Cancelled => FI_ECANCELED,
            Error::Closed => FI_ESHUTDOWN,
            Error::BadMemory(_) => FI_EFAULT,
            Error::Forked => FI_EOPBADSTATE,
            _ => FI_EOTHER,
        })
    }
}

impl From<Error> for Code {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<std::io::Error> for Code {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(FI_EIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(call(|| panic!("it broke")), -FI_EOTHER);
        assert_eq!(count(|| Err(Code(FI_EAGAIN))), -(FI_EAGAIN as isize));
        assert_eq!(count(|| Ok(7)), 7);
    }
}
