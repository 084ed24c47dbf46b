//! What can go wrong with messages, by phase. Every text names the cause and what to do.

use std::sync::Arc;

use memferry_sys::cross_memory::Denied;
use thiserror::Error;

use crate::window::Rights;

/// Anything that can go wrong with a message or a connection.
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing was started.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// No connection came about.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The message was longer than the memory for it; what fits is there.
    #[error("the message has {message_bytes} bytes, the buffer {buffer_bytes}: it was cut off")]
    Truncated {
        /// The length of the message.
        message_bytes: u64,
        /// The length of the buffer.
        buffer_bytes: u64,
    },
    /// The other process ended, or closed its side.
    #[error("the peer is gone: {0}")]
    PeerGone(Gone),
    /// It was cancelled before it was matched.
    #[error("cancelled")]
    Cancelled,
    /// This side was closed.
    #[error("this endpoint or link was closed")]
    Closed,
    /// The memory of the message could not be read or written.
    #[error("the memory of the message cannot be reached ({0}): is it still mapped?")]
    BadMemory(Who),
    /// The window is not open (any more).
    #[error("the window was withdrawn by its owner: ask it for a new handle")]
    Withdrawn,
    /// The owner does not permit it.
    #[error(
        "the window is open for {given}, not for {asked}: its owner decides when it exposes it"
    )]
    NotPermitted {
        /// What was tried.
        asked: Rights,
        /// What is permitted.
        given: Rights,
    },
    /// The memory of a window cannot be reached from this process.
    #[error(
        "the memory of the window cannot be reached from here{}: let its owner expose a \
         ShareableBuffer",
        .0.map_or_else(String::new, |denied| format!(" ({denied})"))
    )]
    Unreachable(Option<Denied>),
    /// This process is a fork of the one that opened the endpoint or link.
    #[error("opened before a fork: only the parent process can use it; open another here")]
    Forked,
}

/// The text for people: it is what they see of an error that `main` returns or that is unwrapped.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Whose memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// This process's.
    Ours,
    /// The other's.
    Theirs,
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ours => "on this side",
            Self::Theirs => "on the peer's side",
        })
    }
}

/// How a peer went.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gone {
    /// Its process ended, or its end of the connection was closed with it.
    Ended,
    /// It closed its side.
    Closed,
    /// It wrote what no correct peer writes, so the connection was ended.
    Misbehaved(&'static str),
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended => f.write_str("its process has ended"),
            Self::Closed => f.write_str("it closed the connection"),
            Self::Misbehaved(what) => write!(f, "it broke the protocol ({what})"),
        }
    }
}

/// A call that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValidationError {
    /// The peer is not one of this endpoint's.
    #[error("this endpoint has no such peer: use what `connect` or an arrived message gave")]
    UnknownPeer,
    /// A null address with a length.
    #[error("a null pointer with a length of {0} bytes")]
    NullPointer(usize),
    /// No message was set aside under that number.
    #[error("no message was set aside under that number, or it was received already")]
    NoSuchClaim,
    /// The pieces together are longer than memory can be.
    #[error("the pieces together are longer than the address space")]
    TooLong,
    /// Too many pieces.
    #[error("{0} pieces: a message may have at most {limit}", limit = crate::pieces::MOST_PIECES)]
    TooManyPieces(usize),
    /// Too many operations at once.
    #[error("{0} operations are under way: wait for some of them first")]
    TooManyOperations(usize),
    /// A setting that makes no sense.
    #[error("{name} = {value:?} is not valid: expected {expected}")]
    Setting {
        /// The setting or variable.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would be valid.
        expected: &'static str,
    },
    /// The handle is not one of that peer's.
    #[error("the handle is of another process's window: attach it with the peer that sent it")]
    ForeignHandle,
    /// An access that does not fit.
    #[error("{bytes} bytes at offset {offset} are outside the window, which has {window_bytes}")]
    OutsideWindow {
        /// Where it would begin.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// How long the window is.
        window_bytes: u64,
    },
    /// A notification variable in the wrong place.
    #[error("the variable at offset {0} is not on a boundary of eight bytes in the owner's memory")]
    MisalignedVariable(u64),
    /// A million windows.
    #[error("this endpoint has as many windows as it can have: withdraw some of them first")]
    TooManyWindows,
    /// A name without a character.
    #[error("the name is empty: others find an endpoint or a listener by its name")]
    EmptyName,
    /// A rank that does not exist.
    #[error("rank {rank} of a job of {size}: ranks go from 0 to one less than the size")]
    Rank {
        /// The rank.
        rank: usize,
        /// The size of the job.
        size: usize,
    },
}

/// A connection that did not come about.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Somebody listens on the name already.
    #[error("the name {0} is in use: choose another, or end the process that holds it")]
    NameInUse(String),
    /// Nobody listens on the name.
    #[error("nobody listens on {0}: start the other side first, or check the name")]
    NobodyListens(String),
    /// The system does not let anybody listen there.
    #[error(
        "cannot listen on {name}: {error}: a name has at most 90 bytes, and one with a slash is a \
         path in a folder that exists and may be written"
    )]
    CannotListen {
        /// The name.
        name: String,
        /// What the system said.
        error: SystemError,
    },
    /// The path is that of something else.
    #[error("{0} is a file that is no socket: choose another name, or remove it")]
    NotASocket(String),
    /// A rank did not join its job in time.
    #[error(
        "rank {rank} of the job {job} did not come within {seconds} s: was it started, by the same \
         user, with the same name and size?"
    )]
    RankMissing {
        /// The job.
        job: String,
        /// The rank.
        rank: usize,
        /// How long was waited.
        seconds: u64,
    },
    /// The other side did not answer in time.
    #[error(
        "{name} did not answer within {seconds} s: is it stopped, or busy outside the library? Does \
         a link call an endpoint, or the reverse? Has a listener never called `accept`?"
    )]
    NoAnswer {
        /// The name.
        name: String,
        /// How long was waited.
        seconds: u64,
    },
    /// The other side belongs to a user that is not allowed.
    #[error("the other side belongs to user {0}, which is not allowed here: see `allow_uid`")]
    UserNotAllowed(u32),
    /// The other side refused.
    #[error("{0} refused the connection: {1}")]
    Refused(String, &'static str),
    /// The other side speaks another version.
    #[error("{name} speaks version {theirs}, this library version {ours}: use one version on both")]
    Version {
        /// The name.
        name: String,
        /// Theirs.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// The name is one more name of a peer that is connected under another.
    #[error("{0} is another name of a peer that is connected already: use one name for it")]
    OtherName(String),
    /// More peers than were allowed for.
    #[error("{0} peers are connected, which is the limit: see `most_peers`")]
    TooManyPeers(usize),
    /// The system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: SystemError,
    },
}

/// An error of the system that can be kept and compared.
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
        self.0.fmt(f)
    }
}

impl ConnectError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System { what, error: SystemError(Arc::new(error)) }
    }
}
