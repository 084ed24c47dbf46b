//! Reasons of plans, as text that a user can check.

use std::fmt;

/// The reason of a plan.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::{CopyQuery, CopyReason};
///
/// let plan = Ferry::new()?.explain(&CopyQuery::copy(4 << 20, true)).expect("a plan");
/// let reason: CopyReason = plan.reason;
/// println!("{reason}"); // as `memferry explain 4MiB` prints it
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum CopyReason {
    /// The request has no bytes.
    NothingToMove,
    /// The copy blocks and is smaller than the measured minimum for work sharing.
    TooSmallToShare {
        /// The minimum size in bytes for work sharing.
        limit_bytes: u64,
    },
    /// The copy blocks, and copies of this size were measured to be as fast by the caller alone.
    SharingIsSlower,
    /// Source and target overlap, and the caller waits anyway.
    OverlappingAndBlocking,
    /// The copy takes no longer than submitting it.
    CheaperThanHandoff {
        /// The maximum size in bytes of such copies.
        limit_bytes: u64,
        /// The cost of a submission in nanoseconds.
        handover_ns: f64,
    },
    /// The copy goes between host and device memory, blocks, and is so short that waking a channel
    /// takes longer than the driver's own copy, which the caller makes.
    ShortDeviceCopy {
        /// The maximum size in bytes of such copies.
        limit_bytes: u64,
    },
    /// No engine with channels supports the operation, but the calling processor does.
    NoEngineKnowsOperation,
    /// Source and target overlap: the order of the bytes matters, so the copy is not split.
    Overlapping,
    /// The copy is too small to gain from being split.
    OneDescriptorSuffices {
        /// The maximum size in bytes of such copies.
        limit_bytes: u64,
    },
    /// The engine takes fixed parts.
    FixedParts,
    /// The engine takes fixed parts of pinned memory.
    PinnedParts,
    /// All the memory is on the device.
    InDevice,
    /// The memory is registered, or was used before.
    Registered,
    /// The owner of the memory has registered it.
    RegisteredByOwner,
    /// The memory is not registered, and the device cannot take part in such a copy.
    NotRegistered,
    /// First use of the memory, and registering it is the fastest route even for one transfer.
    RegisterWhileCopying {
        /// The registration speed in GB/s.
        gb_per_s: f64,
    },
    /// The memory is not registered and is copied through staging buffers: faster than registering
    /// it, or the only route where only its owner may register it.
    StagedThroughPinned {
        /// The number of channels that copy.
        channels: usize,
        /// The speed of each channel in GB/s.
        gb_per_s: f64,
    },
    /// The copy is so large that processors speed up a faster engine.
    SplitOverEngines {
        /// The number of processor channels.
        channels: usize,
    },
    /// The copy is large enough for work sharing.
    WorkSharing {
        /// The number of parties that claim chunks.
        parties: u64,
        /// Whether the caller is one of the parties from the start.
        blocking: bool,
    },
}

impl fmt::Display for CopyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingToMove => write!(f, "there is nothing to move"),
            Self::TooSmallToShare { limit_bytes } if *limit_bytes == usize::MAX as u64 => {
                write!(f, "there is no second core to share it with")
            }
            Self::TooSmallToShare { limit_bytes } => write!(
                f,
                "blocking copies are shared with channels from {limit_bytes} bytes on; below, \
                 the caller alone is as fast"
            ),
            Self::SharingIsSlower => {
                write!(f, "copies of this size were measured to be as fast by the caller alone")
            }
            Self::OverlappingAndBlocking => {
                write!(f, "source and target overlap, and the caller waits anyway")
            }
            Self::CheaperThanHandoff { limit_bytes, handover_ns } => write!(
                f,
                "up to {limit_bytes} bytes, copying takes no longer than the {handover_ns:.0} ns \
                 of a hand-over; if copies turn out to be slower, because the data is in no cache, \
                 channels get them, several together where non-temporal stores pay"
            ),
            Self::ShortDeviceCopy { limit_bytes } => write!(
                f,
                "blocking copies in this direction are made by the caller up to {limit_bytes} bytes, in \
                 a stream of its own: waking a channel takes longer"
            ),
            Self::NoEngineKnowsOperation => {
                write!(f, "no engine with channels knows the operation; the caller does")
            }
            Self::Overlapping => {
                write!(f, "source and target overlap, so the copy is not cut")
            }
            Self::OneDescriptorSuffices { limit_bytes } => {
                write!(
                    f,
                    "up to {limit_bytes} bytes, cutting costs more than it gains; a caller that waits \
                     executes others that are queued"
                )
            }
            Self::FixedParts => write!(f, "the engine takes fixed parts within its limits"),
            Self::PinnedParts => write!(
                f,
                "the engine takes fixed parts within its limits, of memory that is pinned for it \
                 piece by piece while it works"
            ),
            Self::InDevice => write!(f, "the device has all the memory, and moves it itself"),
            Self::Registered => write!(
                f,
                "the memory is registered with the engine, or was met before and is registered now"
            ),
            Self::RegisteredByOwner => write!(
                f,
                "the memory is registered with the engine: by register, by CUDA itself, or as \
                 Memferry's own"
            ),
            Self::NotRegistered => write!(
                f,
                "the memory is not registered, so the channels' own processors copy it; registering it \
                 is up to its owner"
            ),
            Self::RegisterWhileCopying { gb_per_s } => write!(
                f,
                "the memory is new, and is registered at {gb_per_s:.0} GB/s while its first bytes \
                 move"
            ),
            Self::StagedThroughPinned { channels, gb_per_s } => write!(
                f,
                "the memory is not registered, and passes through the rings of {channels} channel(s) at \
                 {gb_per_s:.0} GB/s each"
            ),
            Self::SplitOverEngines { channels } => write!(
                f,
                "the engine and up to {channels} channel(s) of processors claim chunks from the \
                 front, and the waiting caller from the back, each as many as it is quick"
            ),
            Self::WorkSharing { parties, blocking: true } => write!(
                f,
                "large enough to be shared: the caller claims chunks from the back and {} \
                 channel(s) from the front",
                parties - 1
            ),
            Self::WorkSharing { parties, blocking: false } => write!(
                f,
                "{parties} channel(s) claim chunks from the front; a caller that waits helps \
                 from the back"
            ),
        }
    }
}
