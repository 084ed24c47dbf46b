//! Errors of calls, and which error of the core becomes which code.

use std::ffi::c_int;

use memferry::engine::OpenError;
use memferry::engine::cpu::ProfileError;
use memferry::memory::pinning::PinError;
use memferry::message::{self, ConnectError, DisconnectReason};
use memferry::{BuildError, CookieError, Error, ExecutionError, ValidationError};
use memferry_sys::cuda::DriverError;

use super::*;

/// An error of a call: the code that it returns and the text for `adma_last_error`.
#[derive(Debug)]
pub(crate) struct CallError {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

impl CallError {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

/// The text of an error, followed by those of its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Validation(error) => of_validation(error),
            Error::Cookie(error) => of_cookie(error),
            Error::Execution(error) => of_execution(error),
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, with_causes(&error))
    }
}

impl From<BuildError> for CallError {
    fn from(error: BuildError) -> Self {
        let code = match &error {
            BuildError::Environment { .. } | BuildError::Setting { .. } => ADMA_EDOM,
            BuildError::Open(OpenError::Exhausted { .. }) => ADMA_EBUSY,
            BuildError::Open(OpenError::System { engine, .. }) if engine == "cuda" => ADMA_ENODEV,
            BuildError::Open(_) => ADMA_EAGAIN,
            BuildError::Profile(ProfileError::Io { .. }) => ADMA_EACCES,
            BuildError::Profile(_) => ADMA_EBADMSG,
            BuildError::TooMany(_) => ADMA_EUSERS,
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, with_causes(&error))
    }
}

impl From<DriverError> for CallError {
    fn from(error: DriverError) -> Self {
        let is_full = error.code == memferry_sys::cuda::code::OUT_OF_MEMORY;
        Self::new(if is_full { ADMA_ENOMEM } else { ADMA_EIO }, error.to_string())
    }
}

impl From<PinError> for CallError {
    fn from(error: PinError) -> Self {
        let code = match &error {
            PinError::BadMemory { .. } => ADMA_ENXIO,
            PinError::InvalidRange { .. } => ADMA_EOVERFLOW,
            PinError::Unsupported { .. } => ADMA_EOPNOTSUPP,
            _ if error.is_shortage() => ADMA_ENOMEM,
            _ => ADMA_EIO,
        };
        Self::new(code, with_causes(&error))
    }
}

impl From<message::Error> for CallError {
    fn from(error: message::Error) -> Self {
        use message::Error as E;
        let code = match &error {
            E::Validation(error) => of_message_validation(error),
            E::Connect(error) => of_connect(error),
            E::Truncated { .. } => ADMA_EMSGSIZE,
            E::PeerDisconnected(gone) => match gone.reason {
                DisconnectReason::ProtocolViolation(_) => ADMA_EPROTO,
                _ => ADMA_EPIPE,
            },
            E::Cancelled(_) | E::Closed => ADMA_ECANCELED,
            E::BadMemory(_) => ADMA_ENXIO,
            E::Withdrawn => ADMA_ESTALE,
            E::NotPermitted { .. } => ADMA_EACCES,
            E::Unreachable(_) => ADMA_EHOSTUNREACH,
            E::Forked => ADMA_ECHILD,
            E::Collective(error) => of_collective(error),
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, with_causes(&error))
    }
}

impl From<std::io::Error> for CallError {
    fn from(error: std::io::Error) -> Self {
        Self::new(of_system(&error), error.to_string())
    }
}

fn of_message_validation(error: &message::ValidationError) -> c_int {
    use message::ValidationError as E;
    match error {
        E::NullPointer(_) => ADMA_EFAULT,
        E::TooLong => ADMA_EOVERFLOW,
        E::TooManyOperations(_) => ADMA_ENOBUFS,
        E::Setting { .. } => ADMA_EDOM,
        E::ForeignHandle => ADMA_EXDEV,
        E::OutsideWindow { .. } => ADMA_ERANGE,
        E::TooManyWindows => ADMA_EMFILE,
        // Also a variable that is not aligned.
        _ => ADMA_EINVAL,
    }
}

fn of_collective(error: &message::CollectiveError) -> c_int {
    use message::CollectiveError as E;
    match error {
        E::RankDied(_) | E::RankLeft(_) => ADMA_EPIPE,
        E::RankMissing(_) => ADMA_ETIMEDOUT,
        E::Mismatch(_) | E::Corrupt => ADMA_EPROTO,
        E::Stopped(_) => ADMA_ECANCELED,
        E::BadMemory(_) => ADMA_ENXIO,
        E::Forked => ADMA_ECHILD,
        E::Argument(_) => ADMA_EINVAL,
        E::System(error) => of_system(&error.0),
        _ => ADMA_ENOTRECOVERABLE,
    }
}

fn of_connect(error: &ConnectError) -> c_int {
    match error {
        ConnectError::NameInUse(_) => ADMA_EADDRINUSE,
        ConnectError::NoListener(_) | ConnectError::Rejected(..) => ADMA_ECONNREFUSED,
        ConnectError::NoReply { .. } => ADMA_ETIMEDOUT,
        ConnectError::UserNotAllowed(_) => ADMA_EPERM,
        ConnectError::Version { .. } => ADMA_EPROTO,
        ConnectError::TooManyPeers(_) => ADMA_EMFILE,
        ConnectError::System { error, .. } | ConnectError::ListenFailed { error, .. } => {
            of_system(&error.0)
        }
        ConnectError::NotASocket(_) => ADMA_EADDRINUSE,
        ConnectError::RankMissing { .. } => ADMA_ETIMEDOUT,
        _ => ADMA_ENOTRECOVERABLE,
    }
}

/// Errors of the system: invalid names, files without permission, and exhausted limits. Everything
/// else may work later.
fn of_system(error: &std::io::Error) -> c_int {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => ADMA_EMFILE,
        Some(libc::EACCES | libc::EPERM) => ADMA_EACCES,
        Some(
            libc::ENAMETOOLONG
            | libc::ENOENT
            | libc::ENOTDIR
            | libc::ELOOP
            | libc::EROFS
            | libc::EINVAL
            | libc::EPROTOTYPE,
        ) => ADMA_EADDRNOTAVAIL,
        _ => ADMA_EAGAIN,
    }
}

fn of_validation(error: &ValidationError) -> c_int {
    match error {
        ValidationError::Null { .. } => ADMA_EFAULT,
        ValidationError::Wraps { .. } => ADMA_EOVERFLOW,
        ValidationError::OutOfRange { .. } => ADMA_ERANGE,
        ValidationError::NoEngine { .. } | ValidationError::BatchMemory { .. } => ADMA_EOPNOTSUPP,
        _ => ADMA_EINVAL,
    }
}

fn of_cookie(error: &CookieError) -> c_int {
    match error {
        CookieError::Foreign(negative) if *negative < 0 => ADMA_EBADF,
        CookieError::Foreign(_) => ADMA_ESTALE,
        CookieError::Unknown(_) => ADMA_ENOENT,
        CookieError::Expired(_) => ADMA_EIDRM,
        CookieError::Forked(_) => ADMA_ECHILD,
        CookieError::Exhausted => ADMA_ENOSPC,
        _ => ADMA_EINVAL,
    }
}

fn of_execution(error: &ExecutionError) -> c_int {
    match error {
        ExecutionError::BadMemory { .. } => ADMA_ENXIO,
        ExecutionError::Cancelled { .. } => ADMA_ECANCELED,
        ExecutionError::Predecessor => ADMA_ENOLINK,
        ExecutionError::Forked => ADMA_ECHILD,
        _ => ADMA_EIO,
    }
}
