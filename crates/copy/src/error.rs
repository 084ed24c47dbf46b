//! Errors of the copy core, one type for each phase.

use memferry_engine::cpu::ProfileError;
use memferry_engine::{ExecutionError, MemoryKind, Opcode, OpenError};
use memferry_memory::pin_cache::PinCacheError;
use thiserror::Error;

/// The request is invalid, and no transfer was started.
///
/// ```
/// use memferry::{Error, Ferry, ValidationError};
///
/// let refused = Ferry::new()?.copy(&[1u8, 2], &mut [0]);
/// let expected = ValidationError::LengthMismatch { source_bytes: 2, target_bytes: 1 };
/// assert_eq!(refused, Err(Error::Validation(expected)));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValidationError {
    /// A pointer is null and the length is above zero.
    #[error("the {side} is a null pointer")]
    Null {
        /// "source" or "target".
        side: &'static str,
    },
    /// The range exceeds the end of the address space.
    #[error(
        "the {side} range of {length} bytes at {address:#x} runs past the end of the address space"
    )]
    Wraps {
        /// "source" or "target".
        side: &'static str,
        /// The start address.
        address: u64,
        /// The length in bytes.
        length: u64,
    },
    /// Source and target differ in length.
    #[error(
        "the source has {source_bytes} bytes and the target {target_bytes}: pass slices of equal length"
    )]
    LengthMismatch {
        /// The length of the source in bytes.
        source_bytes: u64,
        /// The length of the target in bytes.
        target_bytes: u64,
    },
    /// A batch has more sources than targets, or fewer.
    #[error("the batch has {sources} sources and {targets} targets: pass as many of each")]
    CountMismatch {
        /// The number of sources.
        sources: usize,
        /// The number of targets.
        targets: usize,
    },
    /// An item of a batch that is one transfer is ordered.
    #[error("an item is ordered, and the batch is one transfer: use start_each_raw")]
    OrderedItem,
    /// A segment of a delivery overlaps the target.
    #[error("the piece at {address:#x} overlaps the target: copy it away first")]
    Overlap {
        /// The start address of the segment.
        address: u64,
    },
    /// Ranges overlap in an operation that needs separate ones.
    #[error("the {side} overlaps the {other}: this operation needs ranges that do not overlap")]
    RangesOverlap {
        /// "source", "target" or "second target".
        side: &'static str,
        /// The range that it overlaps.
        other: &'static str,
    },
    /// The range exceeds its buffer.
    #[error("the range {from}..{to} does not lie inside the {length} bytes")]
    OutOfRange {
        /// The start of the range in bytes.
        from: u64,
        /// The end of the range in bytes.
        to: u64,
        /// The length of the buffer in bytes.
        length: u64,
    },
    /// The memory belongs to a device that the ferry does not use.
    #[error(
        "the {side} at {address:#x} is not memory of the GPU that this ferry uses: build the ferry \
         with the GPU that the memory is of (FerryBuilder::gpu, adma_use_gpu, MEMFERRY_GPU)"
    )]
    OtherDevice {
        /// "source" or "target".
        side: &'static str,
        /// The start address.
        address: u64,
    },
    /// No engine reaches the memory, or none supports the operation on it.
    #[error(
        "no engine of this ferry ({engines}) can do the operation {}, source in {} memory, target in {} memory: \
         build the ferry with the device that the memory is of (FerryBuilder::gpu, adma_use_gpu, MEMFERRY_GPU)",
        operation.name(), source_memory.name(), target_memory.name()
    )]
    NoEngine {
        /// The operation.
        operation: Opcode,
        /// The kind of memory of the source.
        source_memory: MemoryKind,
        /// The kind of memory of the target.
        target_memory: MemoryKind,
        /// The names of the engines that were asked.
        engines: String,
    },
    /// A buffer of a batch is not in host memory.
    #[error(
        "the {side} of item {item} is device memory: a batch of buffers has host memory only; copy the item alone"
    )]
    BatchMemory {
        /// "source" or "target".
        side: &'static str,
        /// The number of the item, from 0.
        item: usize,
    },
}

/// The cookie names no transfer of the ferry.
///
/// ```
/// use memferry::{Cookie, CookieError, Error, Ferry};
///
/// let refused = Ferry::new()?.wait(Cookie::from_raw(-1));
/// assert_eq!(refused, Err(Error::Cookie(CookieError::Foreign(-1))));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CookieError {
    /// The number is no cookie, or a cookie of another ferry, such as one that was closed.
    #[error("cookie {0} belongs to another ferry, or to one that was closed")]
    Foreign(i64),
    /// The ferry has not issued this number yet.
    #[error("cookie {0} was never issued by this ferry")]
    Unknown(i64),
    /// The transfer may have failed, and its record was dropped in favour of newer failures.
    #[error("cookie {0} is too old: failures since then have filled the record")]
    Expired(i64),
    /// The process forked while a thread held the lock of this part of the table.
    #[error("cookie {0} was issued before a fork: only the parent process can query it")]
    Forked(i64),
    /// The ferry has used all its numbers.
    #[error("this ferry has issued all its cookies: build a new one")]
    Exhausted,
}

/// An error of a copy.
///
/// ```
/// use memferry::{Error, Ferry};
///
/// match Ferry::new()?.copy(&[1u8], &mut [0]) {
///     Err(Error::Validation(nothing_started)) => println!("{nothing_started}"),
///     Err(error) => println!("{error}"),
///     Ok(()) => {}
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is invalid, and no transfer was started.
    #[error(transparent)]
    Validation(#[from] ValidationError),
    /// The cookie is invalid.
    #[error(transparent)]
    Cookie(#[from] CookieError),
    /// The transfer was started and failed.
    #[error(transparent)]
    Execution(#[from] ExecutionError),
}

/// The ferry could not be built.
///
/// ```
/// use memferry::{BuildError, Ferry};
///
/// let refused = Ferry::builder().channels(usize::MAX).build();
/// assert!(matches!(refused, Err(BuildError::Setting { .. })));
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The value of an environment variable is invalid.
    #[error("{name}={value:?} is not valid: expected {expected}; correct or unset it")]
    Environment {
        /// The name of the variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that are valid.
        expected: &'static str,
    },
    /// A value given to the builder is invalid.
    #[error("{name} = {value} is not valid: expected {expected}")]
    Setting {
        /// The name of the setting.
        name: &'static str,
        /// The value.
        value: String,
        /// The values that are valid.
        expected: &'static str,
    },
    /// An engine could not open a channel.
    #[error(transparent)]
    Open(OpenError),
    /// The pin cache of an engine could not be started.
    #[error("engine {engine} needs pinned memory, and its pin cache could not be started")]
    Pinning {
        /// The name of the engine.
        engine: String,
        /// The cause.
        #[source]
        error: PinCacheError,
    },
    /// The machine's profile could not be loaded.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The process has built more ferries than cookies can distinguish.
    #[error("more than {0} ferries were built by this process: keep one and share it")]
    TooMany(u64),
}

impl From<OpenError> for BuildError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Environment { name, value, expected } => {
                Self::Environment { name, value, expected }
            }
            error => Self::Open(error),
        }
    }
}
