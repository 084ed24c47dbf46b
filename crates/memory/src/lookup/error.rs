//! Why a lookup gives nothing.

use thiserror::Error;

use super::source::Refused;
use crate::handle::ProcessHandle;

/// Why a lookup gives nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LookupError {
    /// The process of the handle was removed, or never added.
    #[error("process {} of generation {} is not there", .0.number(), .0.generation())]
    Stale(ProcessHandle),
    /// No process can have memory at this address.
    #[error("no process has memory at {0:#x}")]
    OutOfRange(u64),
    /// The line is attached, but this page has no memory.
    #[error("there is no memory at {0:#x}")]
    NoMemory(u64),
    /// Another thread is forgetting this memory right now, and waits for its users.
    #[error("the memory is being forgotten while it is in use")]
    Forgotten,
    /// The source did not attach the line.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Not there yet; try again later.
    #[error("the translation is not there yet")]
    Missed,
    /// The full table holds only what was prepared.
    #[error("the memory at {0:#x} was not prepared")]
    NotPrepared(u64),
}

/// All process numbers are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no process number is left: 65536 are in use or worn out")]
pub struct TooManyProcesses;
