//! Error codes: every cause has one, and each is the negative of the Linux `errno` that comes
//! nearest. This is the only place that knows which error of the core becomes which code.

use std::ffi::{CStr, c_int};

use memferry::engine::OpenError;
use memferry::engine::cpu::ProfileError;
use memferry::message::{self, ConnectError, Gone};
use memferry::{BuildError, CookieError, Error, ExecutionError, ValidationError};

/// The process at the other end belongs to a user that is not allowed here.
pub const ADMA_EPERM: c_int = -1;
/// The cookie or window is a number that was not given out yet.
pub const ADMA_ENOENT: c_int = -2;
/// The engine failed, and nobody could finish the rest.
pub const ADMA_EIO: c_int = -5;
/// The memory cannot be reached: is it still mapped?
pub const ADMA_ENXIO: c_int = -6;
/// Neither a cookie nor a window: it is negative; often the error code of a call that was not looked
/// at. Or not the descriptor of an open link or listener.
pub const ADMA_EBADF: c_int = -9;
/// The cookie, window or descriptor is from before a fork: only the parent process can use it.
pub const ADMA_ECHILD: c_int = -10;
/// The system refused a thread, memory or other means; may work later.
pub const ADMA_EAGAIN: c_int = -11;
/// The profile of the machine (`MEMFERRY_PROFILE`) cannot be read or written, the name of a link is a
/// path that this user may not use, or the owner of a window has not opened it for such an access.
pub const ADMA_EACCES: c_int = -13;
/// A null pointer with a length above zero, or for a notification variable.
pub const ADMA_EFAULT: c_int = -14;
/// The other side is stopped in the middle of an access to a window, whose memory must stay valid. Or
/// an engine has no more channels to give.
pub const ADMA_EBUSY: c_int = -16;
/// The handle is not of a window of the process at the other end of this link.
pub const ADMA_EXDEV: c_int = -18;
/// An argument that makes no sense, such as a notification variable that is not aligned to 8 bytes,
/// a name that is empty, rights that are none, the cookie of a copy where that of a read or write is
/// asked for, or a window of the wrong side.
pub const ADMA_EINVAL: c_int = -22;
/// Too many descriptors, links or windows are open.
pub const ADMA_EMFILE: c_int = -24;
/// All cookies or numbers of windows are used up: call `adma_fini`, or open the link anew.
pub const ADMA_ENOSPC: c_int = -28;
/// The other side of the link is gone: its process has ended, or it closed the link.
pub const ADMA_EPIPE: c_int = -32;
/// A variable in the environment (`MEMFERRY_CHANNELS` and so on) holds a value that is not valid.
pub const ADMA_EDOM: c_int = -33;
/// A range that does not lie inside its memory, or inside its window.
pub const ADMA_ERANGE: c_int = -34;
/// No message waits to be read.
pub const ADMA_ENOMSG: c_int = -42;
/// The cookie's copy, read or write ended so long ago that what is asked is no longer known.
pub const ADMA_EIDRM: c_int = -43;
/// Not begun, because what it was ordered after did not succeed.
pub const ADMA_ENOLINK: c_int = -67;
/// The other side of the link does not keep to the protocol, or has another version of it.
pub const ADMA_EPROTO: c_int = -71;
/// The profile of the machine (`MEMFERRY_PROFILE`) is not a profile, or bytes are not the handle of a
/// window.
pub const ADMA_EBADMSG: c_int = -74;
/// A range that runs past the end of the address space.
pub const ADMA_EOVERFLOW: c_int = -75;
/// The process has opened and closed the library too often for cookies to be told apart.
pub const ADMA_EUSERS: c_int = -87;
/// The message is longer than the buffer for it, which holds as much as fits.
pub const ADMA_EMSGSIZE: c_int = -90;
/// No engine can do this operation on this memory.
pub const ADMA_EOPNOTSUPP: c_int = -95;
/// Somebody listens on this name already.
pub const ADMA_EADDRINUSE: c_int = -98;
/// Nobody can listen on this name: it is too long, or a path in a folder that does not exist.
pub const ADMA_EADDRNOTAVAIL: c_int = -99;
/// So many reads, writes, puts and gets of the link are under way that some must be waited for first.
pub const ADMA_ENOBUFS: c_int = -105;
/// The time was over before the notification variable held the value, or before the other side of a
/// link answered.
pub const ADMA_ETIMEDOUT: c_int = -110;
/// Nobody listens on this name, or who does refused.
pub const ADMA_ECONNREFUSED: c_int = -111;
/// The system does not let this process reach the memory of the window.
pub const ADMA_EHOSTUNREACH: c_int = -113;
/// The read or write is not over yet.
pub const ADMA_EINPROGRESS: c_int = -115;
/// The cookie or window is from before an `adma_fini` or of a link that was closed, or never was one;
/// or the window was withdrawn.
pub const ADMA_ESTALE: c_int = -116;
/// Cancelled: this side closed the link or listener meanwhile.
pub const ADMA_ECANCELED: c_int = -125;
/// A mistake inside the library. Nothing is known of what the call has done.
pub const ADMA_ENOTRECOVERABLE: c_int = -131;

/// What a code means, for every code, also one that does not exist.
pub(crate) fn text(code: c_int) -> &'static CStr {
    match code {
        0 => c"success",
        ADMA_EPERM => c"the process at the other end belongs to a user that is not allowed here",
        ADMA_ENOENT => c"this cookie or window was never given out",
        ADMA_EIO => c"the engine failed",
        ADMA_ENXIO => c"the memory cannot be reached",
        ADMA_EBADF => c"neither a cookie, a window nor the descriptor of an open link or listener",
        ADMA_ECHILD => {
            c"this cookie, window or descriptor is from before a fork: only the parent can use it"
        }
        ADMA_EAGAIN => c"the system refused a thread, memory or other means",
        ADMA_EACCES => {
            c"the profile of the machine, or the name, may not be used, or the window not so"
        }
        ADMA_EFAULT => c"null pointer",
        ADMA_EBUSY => c"a window is still accessed, or an engine has no free channel",
        ADMA_EXDEV => c"the handle is not of a window of the process at the other end",
        ADMA_EINVAL => c"invalid argument",
        ADMA_EMFILE => c"too many descriptors, links or windows are open",
        ADMA_ENOSPC => c"all cookies or windows are used up: call adma_fini, or open the link anew",
        ADMA_EPIPE => c"the other side of the link is gone",
        ADMA_EDOM => c"a MEMFERRY_ variable in the environment holds a value that is not valid",
        ADMA_ERANGE => c"a range does not lie inside its memory or window",
        ADMA_ENOMSG => c"no message waits to be read",
        ADMA_EIDRM => c"what the cookie stands for ended too long ago: no more is known of it",
        ADMA_ENOLINK => c"not begun: what it was ordered after did not succeed",
        ADMA_EPROTO => c"the other side of the link speaks another protocol",
        ADMA_EBADMSG => c"the profile of the machine or the handle of a window is malformed",
        ADMA_EOVERFLOW => c"a range runs past the end of the address space",
        ADMA_EUSERS => c"the library was opened and closed too often in this process",
        ADMA_EMSGSIZE => c"the message is longer than the buffer for it",
        ADMA_EOPNOTSUPP => c"no engine can do this operation on this memory",
        ADMA_EADDRINUSE => c"somebody listens on this name already",
        ADMA_EADDRNOTAVAIL => {
            c"nobody can listen on this name: is it too long, or its folder missing?"
        }
        ADMA_ENOBUFS => c"too many operations are under way: wait for some of them first",
        ADMA_ETIMEDOUT => c"timed out",
        ADMA_ECONNREFUSED => c"nobody listens on this name, or who does refused",
        ADMA_EHOSTUNREACH => c"the memory of the window cannot be reached from this process",
        ADMA_EINPROGRESS => c"not over yet",
        ADMA_ESTALE => {
            c"this cookie or window is from before an adma_fini, adma_close or adma_withdraw"
        }
        ADMA_ECANCELED => c"cancelled: this side was closed meanwhile",
        ADMA_ENOTRECOVERABLE => c"a mistake inside the library",
        1.. => c"not an error",
        _ => c"unknown error code",
    }
}

/// Why a call fails: the code that it returns and the text for `adma_last_error`.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Validation(error) => of_validation(error),
            Error::Cookie(error) => of_cookie(error),
            Error::Execution(error) => of_execution(error),
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, error.to_string())
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        let code = match &error {
            BuildError::Environment { .. } | BuildError::Setting { .. } => ADMA_EDOM,
            BuildError::Open(OpenError::Exhausted { .. }) => ADMA_EBUSY,
            BuildError::Open(_) => ADMA_EAGAIN,
            BuildError::Profile(ProfileError::Io { .. }) => ADMA_EACCES,
            BuildError::Profile(_) => ADMA_EBADMSG,
            BuildError::TooMany(_) => ADMA_EUSERS,
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, error.to_string())
    }
}

impl From<message::Error> for Failure {
    fn from(error: message::Error) -> Self {
        use message::Error as E;
        let code = match &error {
            E::Validation(error) => of_message_validation(error),
            E::Connect(error) => of_connect(error),
            E::Truncated { .. } => ADMA_EMSGSIZE,
            E::PeerGone(Gone::Misbehaved(_)) => ADMA_EPROTO,
            E::PeerGone(_) => ADMA_EPIPE,
            E::Cancelled | E::Closed => ADMA_ECANCELED,
            E::BadMemory(_) => ADMA_ENXIO,
            E::Withdrawn => ADMA_ESTALE,
            E::NotPermitted { .. } => ADMA_EACCES,
            E::Unreachable(_) => ADMA_EHOSTUNREACH,
            E::Forked => ADMA_ECHILD,
            _ => ADMA_ENOTRECOVERABLE,
        };
        Self::new(code, error.to_string())
    }
}

impl From<std::io::Error> for Failure {
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

fn of_connect(error: &ConnectError) -> c_int {
    match error {
        ConnectError::NameInUse(_) => ADMA_EADDRINUSE,
        ConnectError::NobodyListens(_) | ConnectError::Refused(..) => ADMA_ECONNREFUSED,
        ConnectError::NoAnswer { .. } => ADMA_ETIMEDOUT,
        ConnectError::UserNotAllowed(_) => ADMA_EPERM,
        ConnectError::Version { .. } => ADMA_EPROTO,
        ConnectError::TooManyPeers(_) => ADMA_EMFILE,
        ConnectError::System { error, .. } | ConnectError::CannotListen { error, .. } => {
            of_system(&error.0)
        }
        ConnectError::NotASocket(_) => ADMA_EADDRINUSE,
        ConnectError::RankMissing { .. } => ADMA_ETIMEDOUT,
        _ => ADMA_ENOTRECOVERABLE,
    }
}

/// What the system refuses: names that cannot be, files that may not be used, and things of which
/// there are too many. Everything else may work later.
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
        ValidationError::NoEngine => ADMA_EOPNOTSUPP,
        _ => ADMA_EINVAL,
    }
}

fn of_cookie(error: &CookieError) -> c_int {
    match error {
        CookieError::Foreign(negative) if *negative < 0 => ADMA_EBADF,
        CookieError::Foreign(_) => ADMA_ESTALE,
        CookieError::Unknown(_) => ADMA_ENOENT,
        CookieError::Forgotten(_) => ADMA_EIDRM,
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// One error of every kind, with the code that is documented for it.
    fn one_of_each() -> Vec<(c_int, Failure)> {
        let copy = |code, error: Error| (code, Failure::from(error));
        let build = |code, error: BuildError| (code, Failure::from(error));
        let (side, engine, done_bytes) = ("source", String::from("cpu"), 0);
        let (name, value, expected) = ("MEMFERRY_CHANNELS", String::from("many"), "a number");
        let environment = BuildError::Environment { name, value: value.clone(), expected };
        let wraps = ValidationError::Wraps { side, address: u64::MAX, length: 2 };
        let range = ValidationError::OutOfRange { from: 1, to: 3, length: 2 };
        let lengths = ValidationError::LengthMismatch { source_bytes: 1, target_bytes: 2 };
        let bad_memory = ExecutionError::BadMemory { address: 1, done_bytes };
        let system = OpenError::System { engine: engine.clone(), reason: "no threads".into() };
        let refused = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let unreadable = ProfileError::Io { path: "/profile".into(), error: refused };
        let malformed = ProfileError::Malformed { path: "/profile".into(), problem: "no".into() };
        vec![
            copy(ADMA_EFAULT, ValidationError::Null { side }.into()),
            copy(ADMA_EOVERFLOW, wraps.into()),
            copy(ADMA_ERANGE, range.into()),
            copy(ADMA_EINVAL, lengths.into()),
            copy(ADMA_EOPNOTSUPP, ValidationError::NoEngine.into()),
            copy(ADMA_EBADF, CookieError::Foreign(-14).into()),
            copy(ADMA_ESTALE, CookieError::Foreign(14).into()),
            copy(ADMA_ENOENT, CookieError::Unknown(14).into()),
            copy(ADMA_EIDRM, CookieError::Forgotten(14).into()),
            copy(ADMA_ENOSPC, CookieError::Exhausted.into()),
            copy(ADMA_EIO, ExecutionError::Engine { done_bytes, reason: "hot" }.into()),
            copy(ADMA_ENXIO, bad_memory.into()),
            copy(ADMA_ECANCELED, ExecutionError::Cancelled { done_bytes }.into()),
            copy(ADMA_ENOLINK, ExecutionError::Predecessor.into()),
            copy(ADMA_ECHILD, ExecutionError::Forked.into()),
            build(ADMA_EDOM, environment),
            build(ADMA_EBUSY, OpenError::Exhausted { engine }.into()),
            build(ADMA_EAGAIN, system.into()),
            build(ADMA_EACCES, unreadable.into()),
            build(ADMA_EBADMSG, malformed.into()),
            build(ADMA_EUSERS, BuildError::TooMany(65535)),
            build(ADMA_EDOM, BuildError::Setting { name, value, expected }),
        ]
    }

    /// The same for links.
    fn one_of_each_of_links() -> Vec<(c_int, Failure)> {
        use message::{Denied, Error as E, Rights, SystemError, ValidationError as V, Who};
        let link = |code, error: E| (code, Failure::from(error));
        let system = |errno| {
            let error = SystemError(std::io::Error::from_raw_os_error(errno).into());
            E::Connect(ConnectError::System { what: "listening", error })
        };
        let name = || String::from("name");
        let (value, expected) = (String::from("maybe"), "on or off");
        let setting = V::Setting { name: "MEMFERRY_BACKGROUND", value, expected };
        let outside = V::OutsideWindow { offset: 1, bytes: 8, window_bytes: 8 };
        let version = ConnectError::Version { name: name(), theirs: 2, ours: 1 };
        vec![
            link(ADMA_EFAULT, V::NullPointer(1).into()),
            link(ADMA_EOVERFLOW, V::TooLong.into()),
            link(ADMA_ENOBUFS, V::TooManyOperations(1).into()),
            link(ADMA_EDOM, setting.into()),
            link(ADMA_EINVAL, V::UnknownPeer.into()),
            link(ADMA_EADDRINUSE, ConnectError::NameInUse(name()).into()),
            link(ADMA_ECONNREFUSED, ConnectError::NobodyListens(name()).into()),
            link(ADMA_ECONNREFUSED, ConnectError::Refused(name(), "no").into()),
            link(ADMA_ETIMEDOUT, ConnectError::NoAnswer { name: name(), seconds: 1 }.into()),
            link(ADMA_EPERM, ConnectError::UserNotAllowed(1).into()),
            link(ADMA_EPROTO, version.into()),
            link(ADMA_EMFILE, ConnectError::TooManyPeers(1).into()),
            link(ADMA_EMFILE, system(libc::EMFILE)),
            link(ADMA_EACCES, system(libc::EACCES)),
            link(ADMA_EADDRNOTAVAIL, system(libc::ENAMETOOLONG)),
            link(ADMA_EAGAIN, system(libc::ENOMEM)),
            link(ADMA_EMSGSIZE, E::Truncated { message_bytes: 2, buffer_bytes: 1 }),
            link(ADMA_EPIPE, E::PeerGone(Gone::Ended)),
            link(ADMA_EPIPE, E::PeerGone(Gone::Closed)),
            link(ADMA_EPROTO, E::PeerGone(Gone::Misbehaved("nonsense"))),
            link(ADMA_ECANCELED, E::Closed),
            link(ADMA_ECANCELED, E::Cancelled),
            link(ADMA_ENXIO, E::BadMemory(Who::Theirs)),
            link(ADMA_ECHILD, E::Forked),
            link(ADMA_ESTALE, E::Withdrawn),
            link(ADMA_EACCES, E::NotPermitted { asked: Rights::WRITE, given: Rights::READ }),
            link(ADMA_EHOSTUNREACH, E::Unreachable(None)),
            link(ADMA_EHOSTUNREACH, E::Unreachable(Some(Denied::SwitchedOff))),
            link(ADMA_EXDEV, V::ForeignHandle.into()),
            link(ADMA_ERANGE, outside.into()),
            link(ADMA_EINVAL, V::MisalignedVariable(4).into()),
            link(ADMA_EMFILE, V::TooManyWindows.into()),
        ]
    }

    #[test]
    fn every_error_of_the_core_has_the_code_that_is_documented_for_it() {
        for (code, failure) in one_of_each().into_iter().chain(one_of_each_of_links()) {
            assert_eq!(failure.code, code, "{}", failure.text);
            assert!(!failure.text.is_empty());
        }
    }

    #[test]
    fn every_code_has_a_text_of_its_own() {
        let all = one_of_each().into_iter().chain(one_of_each_of_links());
        let mut codes: HashSet<_> = all.map(|(code, _)| code).collect();
        codes.extend([0, ADMA_ENOTRECOVERABLE, ADMA_ENOMSG, ADMA_EINPROGRESS]);
        let texts: HashSet<_> = codes.iter().map(|code| text(*code)).collect();
        assert_eq!(texts.len(), codes.len());
        assert!(!texts.contains(text(c_int::MIN)));
    }

    #[test]
    fn a_code_that_does_not_exist_has_a_text_too() {
        assert_eq!(text(-9999), c"unknown error code");
        assert_eq!(text(c_int::MIN), c"unknown error code");
        assert_eq!(text(c_int::MAX), c"not an error");
    }
}
