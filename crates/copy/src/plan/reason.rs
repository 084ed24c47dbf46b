//! Why a plan is as it is, in words that a user can check.

use std::fmt;

/// Why.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// No bytes at all.
    NothingToMove,
    /// A blocking copy below the size from which sharing was measured to pay.
    TooSmallToShare {
        /// That size.
        limit_bytes: u64,
    },
    /// Source and target overlap, and the caller waits anyway.
    OverlappingAndBlocking,
    /// The copy takes no longer than handing it over.
    QuickerThanHandOver {
        /// Up to this size.
        limit_bytes: u64,
        /// What a hand-over costs.
        handover_ns: f64,
    },
    /// No engine with channels knows the operation, but a processor does.
    NoEngineKnowsOperation,
    /// Source and target overlap: the order of the bytes matters, so it is not cut.
    Overlapping,
    /// Too small to gain from being cut.
    OneDescriptorSuffices {
        /// Up to this size.
        limit_bytes: u64,
    },
    /// The engine takes fixed parts.
    CutForEngine,
    /// The engine takes fixed parts, of pinned memory.
    CutAndPinned,
    /// The device has all the memory.
    InDevice,
    /// The memory is registered, or was met before.
    Registered,
    /// The memory is registered by its owner.
    RegisteredByOwner,
    /// The memory is not registered, and the engine has no part in such a copy.
    NotRegistered,
    /// The memory is new, and registering it is the quickest way even for one use.
    RegisteredOnTheWay {
        /// At this speed.
        gb_per_s: f64,
    },
    /// The memory is not registered, and passes through rings: quicker than registering it, or the only
    /// way where only its owner may register it.
    ThroughRings {
        /// By so many channels.
        channels: usize,
        /// Each at this speed.
        gb_per_s: f64,
    },
    /// So large that processors are of help to a quicker engine.
    SplitOverEngines {
        /// So many channels of processors.
        channels: usize,
    },
    /// Large enough that several parties working on it pays.
    Shared {
        /// How many work on it.
        parties: u64,
        /// Whether the caller is one of them from the start.
        blocking: bool,
    },
}

impl fmt::Display for Reason {
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
            Self::OverlappingAndBlocking => {
                write!(f, "source and target overlap, and the caller waits anyway")
            }
            Self::QuickerThanHandOver { limit_bytes, handover_ns } => write!(
                f,
                "up to {limit_bytes} bytes, copying takes no longer than the {handover_ns:.0} ns \
                 of a hand-over"
            ),
            Self::NoEngineKnowsOperation => {
                write!(f, "no engine with channels knows the operation; the caller does")
            }
            Self::Overlapping => {
                write!(f, "source and target overlap, so the copy is not cut")
            }
            Self::OneDescriptorSuffices { limit_bytes } => {
                write!(f, "up to {limit_bytes} bytes, cutting costs more than it gains")
            }
            Self::CutForEngine => write!(f, "the engine takes fixed parts within its limits"),
            Self::CutAndPinned => write!(
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
            Self::RegisteredOnTheWay { gb_per_s } => write!(
                f,
                "the memory is new, and is registered at {gb_per_s:.0} GB/s while its first bytes \
                 move"
            ),
            Self::ThroughRings { channels, gb_per_s } => write!(
                f,
                "the memory is not registered, and passes through the rings of {channels} channel(s) at \
                 {gb_per_s:.0} GB/s each"
            ),
            Self::SplitOverEngines { channels } => write!(
                f,
                "the engine and up to {channels} channel(s) of processors claim chunks from the \
                 front, and the waiting caller from the back, each as many as it is quick"
            ),
            Self::Shared { parties, blocking: true } => write!(
                f,
                "large enough to be shared: the caller claims chunks from the back and {} \
                 channel(s) from the front",
                parties - 1
            ),
            Self::Shared { parties, blocking: false } => write!(
                f,
                "{parties} channel(s) claim chunks from the front; a caller that waits helps \
                 from the back"
            ),
        }
    }
}
