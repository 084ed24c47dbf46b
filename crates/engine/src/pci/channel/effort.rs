//! How much a poll of a channel does.

/// How much a poll may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PollEffort {
    /// Recover the device, and execute what it did not.
    Whole,
    /// Read what the device has reported, and execute one descriptor at most: another thread polls
    /// too, and recovers the device. It may be held up by another device.
    Brief,
    /// As [`PollEffort::Brief`], after the interrupt of the device is armed: what ends later raises it.
    Arming,
}

impl PollEffort {
    /// The number of failed descriptors that the processor may execute in one step: other threads
    /// find the gate occupied meanwhile, and their transfers wait.
    pub(super) fn max_executed(self) -> u32 {
        match self {
            Self::Whole => 16,
            Self::Brief | Self::Arming => 1,
        }
    }
}
