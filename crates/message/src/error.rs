//! Errors of messages and connections, one enum for each phase. Every text names the cause and a fix.

use std::sync::Arc;

use memferry_sys::cross_memory::CrossMemoryDenied;
use thiserror::Error;

use crate::window::Rights;

/// An error of a message or a connection.
///
/// ```
/// use memferry::message::{ConnectError, Endpoint, Error};
///
/// let endpoint = Endpoint::open("doc-error")?;
/// match endpoint.connect("doc-nobody") {
///     Err(Error::Connect(ConnectError::NoListener(name))) => assert_eq!(name, "doc-nobody"),
///     other => println!("{other:?}"),
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The call was invalid; nothing was started.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// No connection was established.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The message was longer than the buffer; the buffer contains the part that fits.
    #[error(
        "the message has {message_bytes} bytes, the buffer {buffer_bytes}: the message was truncated"
    )]
    Truncated {
        /// The length of the message in bytes.
        message_bytes: u64,
        /// The length of the buffer in bytes.
        buffer_bytes: u64,
    },
    /// The peer's process exited, or the peer closed its side.
    #[error(transparent)]
    PeerDisconnected(#[from] Disconnect),
    /// The operation was cancelled before it was matched.
    #[error("the {0} was cancelled before it met its counterpart: nothing was transferred")]
    Cancelled(OperationName),
    /// This side was closed.
    #[error("this endpoint or link was closed: open another one")]
    Closed,
    /// The memory of the message could not be read or written.
    #[error("the memory of the message cannot be accessed ({0}): is it still mapped?")]
    BadMemory(MemorySide),
    /// The window is not open.
    #[error("the window was withdrawn by its owner: request a new handle from it")]
    Withdrawn,
    /// The owner does not permit the access.
    #[error(
        "the window is open for {given}, not for {asked}: its owner sets the rights when it exposes it"
    )]
    NotPermitted {
        /// The requested access.
        asked: Rights,
        /// The permitted access.
        given: Rights,
    },
    /// The memory of the window cannot be accessed from this process.
    #[error(
        "the memory of the window cannot be accessed from this process{}: let its owner expose a \
         ShareableBuffer",
        .0.map_or_else(String::new, |denied| format!(" ({denied})"))
    )]
    Unreachable(Option<CrossMemoryDenied>),
    /// A collective operation failed. Except for wrong arguments, all ranks of the job get an error.
    #[error(transparent)]
    Collective(#[from] memferry_collective::Error),
    /// This process is a fork of the one that opened the endpoint or link.
    #[error("opened before a fork: only the parent process can use it; open another here")]
    Forked,
}

/// Prints the text for the user with its causes, because `main` and `unwrap` print errors with `Debug`.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// The end of a connection: of which peer, and why.
///
/// ```
/// use memferry::message::{Disconnect, DisconnectReason, Error};
///
/// fn has_closed(error: &Error) -> bool {
///     matches!(error, Error::PeerDisconnected(Disconnect { reason: DisconnectReason::Closed, .. }))
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{peer} disconnected: {reason}")]
#[non_exhaustive]
pub struct Disconnect {
    /// The peer.
    pub peer: PeerName,
    /// The cause.
    pub reason: DisconnectReason,
}

impl Disconnect {
    /// The disconnect of a peer.
    pub(crate) fn new(peer: PeerName, reason: DisconnectReason) -> Self {
        Self { peer, reason }
    }
}

/// The disconnect of a peer that the caller does not know.
impl From<DisconnectReason> for Disconnect {
    fn from(reason: DisconnectReason) -> Self {
        Self { peer: PeerName::default(), reason }
    }
}

/// A peer, as errors name it: its name and its process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerName(Option<Arc<str>>);

impl PeerName {
    pub(crate) fn new(text: &str) -> Self {
        Self(Some(text.into()))
    }

    /// The peer with a name, which may be empty, and a process id, which may be 0.
    pub(crate) fn of_process(name: &str, pid: u32) -> Self {
        Self::new(&match (name, pid) {
            ("", 0) => "a peer in another container".to_owned(),
            ("", pid) => format!("the peer in process {pid}"),
            (name, 0) => format!("peer {name}"),
            (name, pid) => format!("peer {name} (process {pid})"),
        })
    }

    /// Whether nothing is known of the peer.
    pub(crate) fn is_unknown(&self) -> bool {
        self.0.is_none()
    }
}

impl std::fmt::Display for PeerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.as_deref().unwrap_or("the peer"))
    }
}

/// An operation, as errors name it: what it does, with which peer and tag.
///
/// ```
/// use memferry::message::{Endpoint, TAG_ALL};
///
/// let endpoint = Endpoint::open("doc-operation-name")?;
/// let receive = endpoint.irecv(memferry::message::Source::Any, 7, TAG_ALL, vec![0u8; 8])?;
/// assert_eq!(receive.name().to_string(), "receive of up to 8 bytes with tag 7 from any peer");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationName(Arc<str>);

impl From<&str> for OperationName {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl std::fmt::Display for OperationName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The process whose memory cannot be accessed.
///
/// ```
/// use memferry::message::MemorySide;
///
/// assert_eq!(MemorySide::Local.to_string(), "on this side");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemorySide {
    /// This process.
    Local,
    /// The peer's process.
    Peer,
}

impl std::fmt::Display for MemorySide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Local => "on this side",
            Self::Peer => "on the peer's side",
        })
    }
}

/// The cause of a disconnect.
///
/// ```
/// use memferry::message::DisconnectReason;
///
/// assert!(DisconnectReason::Exited.to_string().starts_with("its process has exited"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectReason {
    /// The peer's process exited, or its end of the connection was closed with it.
    Exited,
    /// The peer closed its side.
    Closed,
    /// The peer violated the protocol, so this side ended the connection.
    ProtocolViolation(&'static str),
}

impl std::fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited => {
                f.write_str("its process has exited; connect again when it has restarted")
            }
            Self::Closed => {
                f.write_str("it closed the connection; connect again if it still listens")
            }
            Self::ProtocolViolation(what) => {
                write!(
                    f,
                    "it violated the protocol ({what}); use one version of the library on both sides"
                )
            }
        }
    }
}

/// An invalid call.
///
/// ```
/// use memferry::message::{Endpoint, Error, ValidationError};
///
/// let refused = Endpoint::open("").unwrap_err();
/// assert_eq!(refused, Error::Validation(ValidationError::EmptyName));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValidationError {
    /// The endpoint has no such peer.
    #[error(
        "this endpoint has no such peer: use the peer that `connect` or a received message returned"
    )]
    UnknownPeer,
    /// A null address with a length.
    #[error("a null pointer with a length of {0} bytes")]
    NullPointer(usize),
    /// No message is claimed under that number.
    #[error("no message is claimed under the number {0}, or it was received already")]
    NoSuchClaim(u64),
    /// The segments together are longer than the address space.
    #[error("the segments together are longer than the address space")]
    TooLong,
    /// Too many segments.
    #[error("{0} segments: a message may have at most {limit}", limit = crate::segments::MAX_SEGMENTS)]
    TooManySegments(usize),
    /// Too many operations in flight.
    #[error("{0} operations are in flight: wait for some of them first")]
    TooManyOperations(usize),
    /// An invalid setting.
    #[error("{name}={value:?} is not valid: expected {expected}; correct or unset it")]
    Setting {
        /// The setting or variable.
        name: &'static str,
        /// The given value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// The handle is not one of that peer's.
    #[error(
        "the handle belongs to a window of another process: attach it with the peer that sent it"
    )]
    ForeignHandle,
    /// An access outside the window.
    #[error("{bytes} bytes at offset {offset} are outside the window, which has {window_bytes}")]
    OutsideWindow {
        /// The offset of the access in bytes.
        offset: u64,
        /// The length of the access in bytes.
        bytes: u64,
        /// The length of the window in bytes.
        window_bytes: u64,
    },
    /// A notification variable at a misaligned address.
    #[error("the variable at offset {0} is not on a boundary of eight bytes in the owner's memory")]
    MisalignedVariable(u64),
    /// The endpoint has the maximum number of windows, which is a million.
    #[error("this endpoint has the maximum number of windows: withdraw some of them first")]
    TooManyWindows,
    /// An empty name.
    #[error("the name is empty: peers find an endpoint or a listener by its name")]
    EmptyName,
    /// A rank that is not below the size.
    #[error("rank {rank} of a job of {size}: ranks are 0 to size - 1")]
    Rank {
        /// The rank.
        rank: usize,
        /// The size of the job.
        size: usize,
    },
}

/// A connection that was not established.
///
/// ```
/// use memferry::message::{ConnectError, Endpoint, Error};
///
/// let first = Endpoint::open("doc-taken")?;
/// let refused = Endpoint::open("doc-taken").unwrap_err();
/// assert!(matches!(refused, Error::Connect(ConnectError::NameInUse(_))));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Another process listens on the name already.
    #[error("the name {0} is in use: choose another, or end the process that uses it")]
    NameInUse(String),
    /// No process listens on the name.
    #[error("no process listens on {0}: start the peer first, or check the name")]
    NoListener(String),
    /// The system refuses to listen on the name.
    #[error(
        "cannot listen on {name}: a name has at most 90 bytes, and one with a slash is a path in a \
         folder that exists and may be written"
    )]
    ListenFailed {
        /// The name.
        name: String,
        /// The error of the system.
        #[source]
        error: SystemError,
    },
    /// The path exists and is not a socket.
    #[error("{0} exists and is no socket: choose another name, or remove it")]
    NotASocket(String),
    /// A rank did not join its job before the timeout.
    #[error(
        "rank {rank} of the job {job} did not join within {seconds} s: was it started, by the same \
         user, with the same name and size?"
    )]
    RankMissing {
        /// The job.
        job: String,
        /// The rank.
        rank: usize,
        /// The timeout in seconds.
        seconds: u64,
    },
    /// The peer did not reply before the timeout.
    #[error(
        "{name} did not reply within {seconds} s: is it stopped, or busy outside the library? Does \
         a link connect to an endpoint, or the reverse? Has a listener not called `accept`?"
    )]
    NoReply {
        /// The name.
        name: String,
        /// The timeout in seconds.
        seconds: u64,
    },
    /// The peer belongs to a user that is not allowed.
    #[error("the peer belongs to user {0}, which is not allowed: see `allow_uid`")]
    UserNotAllowed(u32),
    /// The peer refused the connection.
    #[error("{0} refused the connection: {1}")]
    Rejected(String, &'static str),
    /// The peer has another version of the protocol.
    #[error(
        "{name} has protocol version {theirs}, this library {ours}: use one version on both sides"
    )]
    Version {
        /// The name.
        name: String,
        /// The peer's version.
        theirs: u32,
        /// This library's version.
        ours: u32,
    },
    /// The name is a second name of a peer that is connected already.
    #[error("{0} is a second name of a peer that is connected already: use one name for it")]
    DuplicatePeer(String),
    /// The limit of peers is reached.
    #[error("{0} peers are connected, which is the limit: see `max_peers`")]
    TooManyPeers(usize),
    /// A system call failed.
    #[error("{what} failed")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The error of the system.
        #[source]
        error: SystemError,
    },
}

/// An error of the system that can be cloned and compared.
///
/// ```
/// use std::io;
///
/// use memferry::message::{ConnectError, Error};
///
/// fn kind(error: &Error) -> Option<io::ErrorKind> {
///     match error {
///         Error::Connect(ConnectError::System { error, .. }) => Some(error.0.kind()),
///         _ => None,
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct SystemError(pub Arc<std::io::Error>);

impl PartialEq for SystemError {
    fn eq(&self, other: &Self) -> bool {
        self.0.kind() == other.0.kind() && self.0.raw_os_error() == other.0.raw_os_error()
    }
}

impl Eq for SystemError {}

impl std::fmt::Display for SystemError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)?;
        match self.0.raw_os_error() {
            Some(libc::EMFILE) => f.write_str(
                ": this process has reached its limit of open files, the hard limit too if it has many \
                 connections: raise it (`ulimit -n`, LimitNOFILE=)",
            ),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for SystemError {}

impl ConnectError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System { what, error: SystemError(Arc::new(error)) }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn an_error_names_its_cause_as_its_source_and_once() {
        let refused = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let cause = refused.to_string();
        let error = Error::from(ConnectError::system("making shared memory")(refused));
        assert_eq!(error.to_string(), "making shared memory failed");
        assert_eq!(error.source().map(ToString::to_string), Some(cause.clone()));
        assert_eq!(format!("{error:?}"), format!("making shared memory failed: {cause}"));
    }
}
