//! Errors of a lookup.

use thiserror::Error;

use super::backend::AttachError;
use crate::handle::ProcessHandle;

/// Why a lookup fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LookupError {
    /// The process of the handle was removed, or never added.
    #[error("process {} of generation {} does not exist", .0.number(), .0.generation())]
    Stale(ProcessHandle),
    /// The address is above the user address space.
    #[error("the address {0:#x} is outside of the user address space")]
    OutOfRange(u64),
    /// The line is attached, but this page has no memory.
    #[error("the page at {0:#x} has no memory")]
    NoMemory(u64),
    /// Another thread is invalidating this memory and waits for its users.
    #[error("the memory is being invalidated")]
    Invalidated,
    /// The backend failed to attach the line.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The line is not attached yet; retry later.
    #[error("the translation is not available yet: retry later")]
    NotCached,
    /// The flat table contains only preloaded lines.
    #[error("the memory at {0:#x} was not preloaded")]
    NotPreloaded(u64),
}

/// All process numbers are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no free process number: all 65536 are in use or have used up their generations")]
pub struct TooManyProcesses;
