//! Why a plan is as it is, in words that a user can check.

use std::fmt;

/// Why.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// The payload fits a cell of the ring.
    FitsCell {
        /// Up to this size.
        limit_bytes: u64,
    },
    /// Two copies through the shared space cost less than meeting first.
    QuickerThroughSpace {
        /// Up to this size.
        limit_bytes: u64,
        /// Whether that size was set rather than measured.
        by_hand: bool,
    },
    /// The receiver cannot read the sender's memory.
    OutOfReach,
    /// The path was set by hand.
    ByHand,
    /// Mapped memory, large, and cores to spare.
    SpareCores {
        /// How many.
        cores: usize,
        /// From this size on.
        offload_from: u64,
    },
    /// Mapped memory, large, and a device that copies it.
    Device {
        /// From this size on.
        limit_bytes: u64,
    },
    /// The sender cannot write the receiver's memory, so it cannot help.
    SenderCannotWrite,
    /// The sender fetches a message of the receiver at the same time.
    SenderIsBusy,
    /// Telling the sender where the target is would cost more than its help saves.
    TooSmallToShare {
        /// Below this size.
        limit_bytes: u64,
    },
    /// The target is not there, and pages are brought in faster by one side than by two.
    FreshTarget {
        /// Up to this size.
        limit_bytes: u64,
    },
    /// Both sides can copy, and the message is large enough.
    BothCopy {
        /// From this size on.
        limit_bytes: u64,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FitsCell { limit_bytes } => {
                write!(f, "up to {limit_bytes} bytes fit into one cell, which is one cache line")
            }
            Self::QuickerThroughSpace { limit_bytes, by_hand: false } => write!(
                f,
                "up to {limit_bytes} bytes, two copies through shared memory cost less than meeting \
                 the receiver first"
            ),
            Self::QuickerThroughSpace { limit_bytes, by_hand: true } => {
                write!(f, "messages up to {limit_bytes} bytes are sent at once, as was set")
            }
            Self::Device { limit_bytes } => write!(
                f,
                "memory that is mapped here is copied by a device from {limit_bytes} bytes on, which \
                 costs no core"
            ),
            Self::OutOfReach => write!(
                f,
                "the receiver may not read the sender's memory, so the bytes go through shared \
                 memory (`memferry doctor` names the gate)"
            ),
            Self::ByHand => write!(f, "the path was set by hand"),
            Self::SpareCores { cores, offload_from } => write!(
                f,
                "the memory is mapped, {cores} cores are spare, and from {offload_from} bytes on \
                 (the second-level cache) engines copy faster than the two sides"
            ),
            Self::SenderCannotWrite => {
                write!(f, "the sender may not write the receiver's memory, so it cannot help")
            }
            Self::SenderIsBusy => {
                write!(f, "messages go both ways, so each side copies the one that it receives")
            }
            Self::TooSmallToShare { limit_bytes } => write!(
                f,
                "below {limit_bytes} bytes the receiver is done before the sender could help"
            ),
            Self::FreshTarget { limit_bytes } => write!(
                f,
                "the target is not in memory, and up to {limit_bytes} bytes the receiver brings it \
                 in and copies faster alone"
            ),
            Self::BothCopy { limit_bytes } => write!(
                f,
                "from {limit_bytes} bytes on both sides copy, chunk by chunk, whoever has time"
            ),
        }
    }
}
