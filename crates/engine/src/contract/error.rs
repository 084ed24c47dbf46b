//! The errors of the contract, one type per phase.

use thiserror::Error;

/// An engine or a channel could not be opened.
///
/// ```
/// use memferry::engine::OpenError;
///
/// let error = OpenError::Exhausted { engine: "ioat".into() };
/// assert!(error.to_string().starts_with("engine ioat has no free channel"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// All channels of the engine are open.
    #[error("engine {engine} has no free channel: close one, or request fewer channels")]
    Exhausted {
        /// The engine's name.
        engine: String,
    },
    /// A system call that the channel needs failed.
    #[error("engine {engine} could not open a channel: {reason}")]
    System {
        /// The engine's name.
        engine: String,
        /// The failed call, and its fix.
        reason: String,
    },
    /// The value of an environment variable of the engine is invalid.
    #[error("{name}={value:?} is not valid: expected {expected}; correct or unset it")]
    Environment {
        /// The name of the variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that are valid.
        expected: &'static str,
    },
}

/// A submit failed; no descriptor was accepted.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Engine, SubmitError};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let channel = engine.open_channel(&ChannelOptions::default())?;
/// channel.close();
/// assert_eq!(channel.submit(&mut []), Err(SubmitError::Closed));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The channel was closed.
    #[error("the channel is closed: open a new one")]
    Closed,
}

/// A descriptor or transfer did not succeed.
///
/// ```
/// use memferry::ExecutionError;
///
/// let error = ExecutionError::Engine { done_bytes: 4096, reason: "the device was reset" };
/// assert!(error.is_recoverable()); // the processor can copy the rest
/// assert_eq!(error.done_bytes(), 4096);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExecutionError {
    /// The engine failed. The memory may be valid, so a processor may finish the rest.
    #[error("the engine failed after {done_bytes} bytes: {reason}")]
    Engine {
        /// Bytes done from the start.
        done_bytes: u64,
        /// The reason that the engine reports.
        reason: &'static str,
    },
    /// The memory is invalid: no engine can finish this.
    #[error("bad memory at {address:#x} after {done_bytes} bytes: is it still mapped?")]
    BadMemory {
        /// The first address that could not be accessed.
        address: u64,
        /// Bytes done from the start.
        done_bytes: u64,
    },
    /// Cancelled by request.
    #[error("the transfer was cancelled after {done_bytes} bytes")]
    Cancelled {
        /// Bytes done, not necessarily the first ones.
        done_bytes: u64,
    },
    /// The transfer was not started: a transfer that it was ordered after failed.
    #[error(
        "the transfer was not started: one that it was ordered after failed, whose error says why"
    )]
    Predecessor,
    /// The process forked; the threads that execute the transfer are in the parent.
    #[error("the transfer was started before a fork: only the parent process can wait for it")]
    Forked,
}

impl ExecutionError {
    /// Bytes done before the error.
    pub fn done_bytes(&self) -> u64 {
        match self {
            Self::Engine { done_bytes, .. }
            | Self::BadMemory { done_bytes, .. }
            | Self::Cancelled { done_bytes } => *done_bytes,
            Self::Predecessor | Self::Forked => 0,
        }
    }

    /// Whether a processor can finish the rest.
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::Engine { .. })
    }
}
