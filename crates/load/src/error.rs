//! What can go wrong while a file is loaded.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A file could not be loaded.
///
/// ```
/// use memferry::load::SafetensorsFile;
///
/// let refused = SafetensorsFile::open("no-such-file.safetensors").unwrap_err();
/// assert!(refused.to_string().contains("no-such-file.safetensors"));
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be opened or its length cannot be read.
    #[error("{} cannot be opened", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A read failed.
    #[error("{} cannot be read at byte {offset}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// The error of the system.
        source: io::Error,
    },
    /// The file ended before the wanted bytes: it was truncated after it was opened.
    #[error("{} ends at byte {end} instead of {expected}: it was truncated meanwhile", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where it ends.
        end: u64,
        /// Where it should end.
        expected: u64,
    },
    /// The file is not what the safetensors format asks for.
    #[error("{} is not a valid safetensors file: {reason}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The index of a sharded model is wrong, or names what its files do not have.
    #[error("{} is not a valid index of shards: {reason}", path.display())]
    InvalidIndex {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A placement asks for bytes outside its file.
    #[error("the bytes {from}..{to} do not lie inside the {length} bytes of {}", path.display())]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The start of the range.
        from: u64,
        /// The end of the range.
        to: u64,
        /// The length of the file.
        length: u64,
    },
    /// No memory for the staging buffers or on the device, or it could not be pinned.
    #[error("no memory for {what}: {reason}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// What the system or the driver said.
        reason: String,
    },
    /// A thread could not be started.
    #[error("a reader thread cannot be started")]
    Thread(#[source] io::Error),
    /// A reader thread panicked, with this message. That is a defect of the library.
    #[error("a reader thread panicked: {0}")]
    Panicked(String),
    /// A copy to the target failed.
    #[error("a copy to the target failed")]
    Copy(#[source] memferry_copy::Error),
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
}
