//! Policy: a channel reserved for small transfers.

use std::sync::Arc;

use memferry_engine::Channel;

use super::{Adaptive, Choice, Policy};

/// Reserves the first channel for small transfers; large ones go to the least loaded of the other
/// channels. With one channel, that channel gets the large transfers, and the caller executes the
/// small ones inline. In both cases, a small transfer never waits behind a large one.
#[derive(Debug)]
pub struct Dedicated {
    small_bytes: u64,
}

impl Dedicated {
    /// Creates the policy; transfers up to `small_bytes` bytes are small.
    pub fn new(small_bytes: u64) -> Self {
        Self { small_bytes }
    }
}

impl Default for Dedicated {
    fn default() -> Self {
        Self::new(64 << 10)
    }
}

impl Policy for Dedicated {
    fn name(&self) -> &'static str {
        "dedicated"
    }

    fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice {
        match (bytes <= self.small_bytes, channels.len()) {
            (true, 1) => Choice::Caller,
            (true, _) => Choice::Channel { index: 0, first_channel: 0 },
            (false, 1) => Choice::Channel { index: 0, first_channel: 0 },
            (false, _) => match Adaptive.choose(&channels[1..], bytes) {
                Choice::Channel { index, .. } => {
                    Choice::Channel { index: index + 1, first_channel: 1 }
                }
                Choice::Caller => Choice::Caller,
            },
        }
    }
}
