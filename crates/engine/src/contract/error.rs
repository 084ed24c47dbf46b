//! The errors of the contract, one type per phase.

use thiserror::Error;

/// A channel could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The engine has no more channels to give.
    #[error("engine {engine} has no free channel: close one, or ask for fewer channels")]
    Exhausted {
        /// The engine's name.
        engine: String,
    },
    /// The system refused something the channel needs.
    #[error("engine {engine} could not open a channel: {reason}")]
    System {
        /// The engine's name.
        engine: String,
        /// What was refused, and what would help.
        reason: String,
    },
}

/// Nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The channel was closed.
    #[error("the channel is closed: open a new one")]
    Closed,
}

/// A descriptor or transfer was begun and did not end well.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExecutionError {
    /// The engine failed; the memory is not known to be bad, so somebody else may finish the rest.
    #[error("the engine failed after {done_bytes} bytes: {reason}")]
    Engine {
        /// Bytes done from the start.
        done_bytes: u64,
        /// What it said.
        reason: &'static str,
    },
    /// The memory itself is bad: nobody could finish this.
    #[error("bad memory at {address:#x} after {done_bytes} bytes: is it still mapped?")]
    BadMemory {
        /// The first address that could not be reached.
        address: u64,
        /// Bytes done from the start.
        done_bytes: u64,
    },
    /// Cancelled by request.
    #[error("cancelled after {done_bytes} bytes")]
    Cancelled {
        /// Bytes done, not necessarily the first ones.
        done_bytes: u64,
    },
    /// A transfer this one was to follow did not end well, so this one was not begun.
    #[error("not begun: a transfer it was ordered after did not succeed")]
    Predecessor,
    /// The process forked and the threads that would carry this out are in the parent.
    #[error("begun before a fork: only the parent process can wait for this transfer")]
    Forked,
}

impl ExecutionError {
    /// Bytes done in spite of the error.
    pub fn done_bytes(&self) -> u64 {
        match self {
            Self::Engine { done_bytes, .. }
            | Self::BadMemory { done_bytes, .. }
            | Self::Cancelled { done_bytes } => *done_bytes,
            Self::Predecessor | Self::Forked => 0,
        }
    }

    /// Whether the rest can be done by somebody else.
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::Engine { .. })
    }
}
