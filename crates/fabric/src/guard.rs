//! The boundary between C and Rust: no panic crosses it, and every error becomes one of libfabric's
//! negative codes.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_message::{ConnectError, Error, ValidationError};

use crate::abi::*;

/// A positive error code of libfabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FiError(pub(crate) c_int);

pub(crate) type Result<T = ()> = std::result::Result<T, FiError>;

/// Runs a call that returns 0 or an error.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Result) -> c_int {
    number(|| body().map(|()| 0))
}

/// Runs a call that returns a small number.
#[inline]
pub(crate) fn number(body: impl FnOnce() -> Result<c_int>) -> c_int {
    match protected(body) {
        Ok(number) => number,
        Err(FiError(code)) => -code,
    }
}

/// Runs a data transfer call that returns 0 or an error.
#[inline]
pub(crate) fn transfer(body: impl FnOnce() -> Result) -> isize {
    count(|| body().map(|()| 0))
}

/// Runs a call that returns a count.
#[inline]
pub(crate) fn count(body: impl FnOnce() -> Result<usize>) -> isize {
    match protected(body) {
        Ok(count) => count as isize,
        Err(FiError(code)) => -(code as isize),
    }
}

/// Returns the result of a call, or `FI_EOTHER` if it panicked.
#[inline]
pub(crate) fn protected<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // A panic poisons the locks that it leaves, and later callers of these panic too: state that
    // may be inconsistent is not used again.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(FiError(FI_EOTHER)))
}

/// The function of unsupported operations, for any arguments.
pub(crate) unsafe extern "C" fn unsupported() -> isize {
    -(FI_ENOSYS as isize)
}

impl From<&Error> for FiError {
    fn from(error: &Error) -> Self {
        Self(match error {
            Error::Validation(ValidationError::TooManyOperations(_)) => FI_EAGAIN,
            Error::Validation(_) => FI_EINVAL,
            Error::Connect(error) => match error {
                ConnectError::NameInUse(_) => FI_EADDRINUSE,
                ConnectError::NoListener(_) => FI_ECONNREFUSED,
                ConnectError::NoReply { .. } => FI_ETIMEDOUT,
                ConnectError::UserNotAllowed(_) | ConnectError::Rejected(..) => FI_EACCES,
                _ => FI_EIO,
            },
            Error::Truncated { .. } => FI_ETRUNC,
            Error::PeerDisconnected(_) => FI_ECONNRESET,
            Error::Cancelled(_) => FI_ECANCELED,
            Error::Closed => FI_ESHUTDOWN,
            Error::BadMemory(_) => FI_EFAULT,
            Error::Withdrawn => FI_ENOKEY,
            Error::NotPermitted { .. } => FI_EACCES,
            Error::Unreachable(_) => FI_EPERM,
            Error::Forked => FI_EOPBADSTATE,
            _ => FI_EOTHER,
        })
    }
}

impl From<Error> for FiError {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<std::io::Error> for FiError {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(FI_EIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(call(|| panic!("a test panic")), -FI_EOTHER);
        assert_eq!(count(|| Err(FiError(FI_EAGAIN))), -(FI_EAGAIN as isize));
        assert_eq!(count(|| Ok(7)), 7);
    }
}
