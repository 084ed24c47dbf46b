//! The reason of a plan, in words that a user can check.

use std::fmt;

/// The reason for a path.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum MessageReason {
    /// The payload fits into a cell of the ring.
    FitsCell {
        /// Up to this size.
        limit_bytes: u64,
    },
    /// Two copies through the bounce ring cost less than a rendezvous.
    EagerIsCheaper {
        /// Up to this size.
        limit_bytes: u64,
        /// Whether that size is configured rather than measured.
        is_configured: bool,
    },
    /// The receiver cannot read the sender's memory.
    PeerUnreachable,
    /// The path is configured.
    Configured,
    /// The memory is mapped, the message is large, and there are spare cores.
    SpareCores {
        /// The number of spare cores.
        cores: usize,
        /// From this size.
        offload_from: u64,
    },
    /// The memory is mapped, the message is large, and a device copies it.
    Device {
        /// From this size.
        limit_bytes: u64,
    },
    /// The sender cannot write the receiver's memory, so it cannot help.
    SenderCannotWrite,
    /// The sender fetches a message of the receiver at the same time.
    SenderIsBusy,
    /// Sending the target to the sender would cost more than its help saves.
    TooSmallToShare {
        /// Below this size.
        limit_bytes: u64,
    },
    /// The receive was posted ahead: the sender copies while the receiver computes, or else the receiver
    /// when it waits.
    ReceivedAhead,
    /// The target is not resident, and one side faults its pages in faster than two.
    TargetNotResident {
        /// Up to this size.
        limit_bytes: u64,
    },
    /// Both sides can copy, and the message is large enough.
    Cooperative {
        /// From this size.
        limit_bytes: u64,
    },
}

impl fmt::Display for MessageReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FitsCell { limit_bytes } => {
                write!(f, "up to {limit_bytes} bytes fit into one cell, which is one cache line")
            }
            Self::EagerIsCheaper { limit_bytes, is_configured: false } => write!(
                f,
                "up to {limit_bytes} bytes, two copies through shared memory cost less than a \
                 rendezvous with the receiver"
            ),
            Self::EagerIsCheaper { limit_bytes, is_configured: true } => {
                write!(f, "messages up to {limit_bytes} bytes are sent at once, as configured")
            }
            Self::Device { limit_bytes } => write!(
                f,
                "from {limit_bytes} bytes on a device copies memory that is mapped in this process, which \
                 uses no core"
            ),
            Self::PeerUnreachable => write!(
                f,
                "the receiver may not read the sender's memory, so the bytes go through shared \
                 memory (`memferry doctor` names the gate)"
            ),
            Self::Configured => write!(f, "the path is configured"),
            Self::SpareCores { cores, offload_from } => write!(
                f,
                "the memory is mapped, {cores} cores are spare, and from {offload_from} bytes on \
                 (the second-level cache) engines copy faster than the two sides"
            ),
            Self::SenderCannotWrite => {
                write!(f, "the sender may not write the receiver's memory, so it cannot help")
            }
            Self::SenderIsBusy => {
                write!(
                    f,
                    "messages go in both directions, so each side copies the one that it receives"
                )
            }
            Self::TooSmallToShare { limit_bytes } => write!(
                f,
                "below {limit_bytes} bytes the receiver is done before the sender could help"
            ),
            Self::ReceivedAhead => write!(
                f,
                "the receive was posted ahead, and the sender has time to copy while the receiver computes"
            ),
            Self::TargetNotResident { limit_bytes } => write!(
                f,
                "the target is not resident; up to {limit_bytes} bytes the receiver alone prefaults and \
                 copies it faster than both sides together"
            ),
            Self::Cooperative { limit_bytes } => {
                write!(f, "from {limit_bytes} bytes on both sides copy, chunk by chunk")
            }
        }
    }
}
