//! The errors of the copy core, one type per phase.

use memferry_engine::cpu::ProfileError;
use memferry_engine::{ExecutionError, OpenError};
use memferry_memory::pin_cache::StartError;
use thiserror::Error;

/// A request that cannot be carried out as it stands: nothing was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValidationError {
    /// A null pointer with a length above zero.
    #[error("the {side} is a null pointer")]
    Null {
        /// "source" or "target".
        side: &'static str,
    },
    /// The range runs past the end of the address space.
    #[error(
        "the {side} range of {length} bytes at {address:#x} runs past the end of the address space"
    )]
    Wraps {
        /// "source" or "target".
        side: &'static str,
        /// Where it begins.
        address: u64,
        /// How long it is.
        length: u64,
    },
    /// Two buffers that should be of one length are not.
    #[error(
        "the source has {source_bytes} bytes and the target {target_bytes}: pass slices of equal length"
    )]
    LengthMismatch {
        /// Length of the source.
        source_bytes: u64,
        /// Length of the target.
        target_bytes: u64,
    },
    /// A piece that is to be delivered lies in the target.
    #[error("the piece at {address:#x} overlaps the target: copy it away first")]
    Overlap {
        /// Where the piece begins.
        address: u64,
    },
    /// A range outside its buffer.
    #[error("the range {from}..{to} does not lie inside the {length} bytes")]
    OutOfRange {
        /// Begin of the range.
        from: u64,
        /// End of the range.
        to: u64,
        /// What it should lie inside.
        length: u64,
    },
    /// Memory of a device that is not the ferry's.
    #[error(
        "the {side} at {address:#x} is not memory of the GPU that this ferry uses: build the ferry \
         with the GPU that the memory is of (Builder::gpu, adma_use_gpu, MEMFERRY_GPU)"
    )]
    OtherDevice {
        /// "source" or "target".
        side: &'static str,
        /// Where it begins.
        address: u64,
    },
    /// No engine reaches the memory, or none knows the operation there.
    #[error(
        "no engine can do this operation on this kind of memory: add an engine that reaches it"
    )]
    NoEngine,
}

/// A cookie that names no transfer of the ferry that was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CookieError {
    /// Not a cookie at all, or of another ferry, for example one that was closed since.
    #[error("cookie {0} belongs to another ferry, or to one that was closed")]
    Foreign(i64),
    /// A number that this ferry has not given out yet.
    #[error("cookie {0} was never given out by this ferry")]
    Unknown(i64),
    /// It failed so many failures ago that the reason is no longer known.
    #[error("cookie {0} is too old: failures since then have filled the record")]
    Forgotten(i64),
    /// The process forked while this part of the record was in use.
    #[error("cookie {0} was given out before a fork: only the parent process can ask about it")]
    Forked(i64),
    /// All numbers of this ferry are used up.
    #[error("this ferry has given out all its cookies: build a new one")]
    Exhausted,
}

/// Anything that can go wrong with a copy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing was started.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// The cookie names nothing.
    #[error(transparent)]
    Cookie(#[from] CookieError),
    /// It was started and did not end well.
    #[error(transparent)]
    Execution(#[from] ExecutionError),
}

/// A ferry could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A value in the environment makes no sense.
    #[error("{name}={value:?} is not valid: expected {expected}; correct or unset it")]
    Environment {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What would be valid.
        expected: &'static str,
    },
    /// A value given to the builder makes no sense.
    #[error("{name} = {value} is not valid: expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would be valid.
        expected: &'static str,
    },
    /// An engine opened no channel.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The pin-down cache of an engine could not be started.
    #[error("engine {engine} needs pinned memory: {error}")]
    Pinning {
        /// The engine's name.
        engine: String,
        /// Why not.
        error: StartError,
    },
    /// The profile could not be had.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The process has built more ferries than cookies can tell apart.
    #[error("more than {0} ferries were built by this process: keep one and share it")]
    TooMany(u64),
}
