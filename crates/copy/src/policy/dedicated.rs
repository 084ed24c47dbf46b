//! Policy: a channel reserved for small transfers.

use std::sync::Arc;

use memferry_engine::Channel;

use super::Choice;
use super::adaptive::Adaptive;

/// Reserves the first channel for small transfers; large ones go to the least loaded of the other
/// channels. With one channel, that channel gets the large transfers, and the caller executes the
/// small ones inline. In both cases, a small transfer never waits behind a large one.
#[derive(Debug)]
pub(crate) struct Dedicated;

/// The maximum size of a small transfer in bytes.
pub(crate) const SMALL_BYTES: u64 = 64 << 10;

impl Dedicated {
    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice {
        match (bytes <= SMALL_BYTES, channels.len()) {
            (true, 1) => Choice::Caller,
            (true, _) => Choice::Channel { index: 0, first_channel: 0 },
            (false, 1) => Choice::Channel { index: 0, first_channel: 0 },
            (false, _) => match Adaptive.choose(&channels[1..]) {
                Choice::Channel { index, .. } => {
                    Choice::Channel { index: index + 1, first_channel: 1 }
                }
                Choice::Caller => Choice::Caller,
            },
        }
    }
}
