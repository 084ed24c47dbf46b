//! The least loaded channel.

use std::sync::Arc;

use memferry_engine::Channel;

use super::{Choice, Policy};

/// A sleeping channel counts as if so much was waiting before it: about what a core moves in the
/// time it takes to wake one. Copies that come one at a time so stay with one channel, which stays
/// awake, and spread only when there is more to do than it can.
const SLEEP_BYTES: u64 = 512 << 10;

/// The channel with the fewest outstanding bytes; the first of equals.
#[derive(Debug, Default)]
pub struct Adaptive;

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn choose(&self, channels: &[Arc<dyn Channel>], _bytes: u64) -> Choice {
        if channels.len() == 1 {
            return Choice::Channel { index: 0, first_lane: 0 };
        }
        let load = |channel: &Arc<dyn Channel>| {
            let sleep = if channel.is_asleep() { SLEEP_BYTES } else { 0 };
            channel.outstanding_bytes() + sleep
        };
        let loads = channels.iter().map(load).enumerate();
        let index = loads.min_by_key(|&(_, load)| load).map_or(0, |(index, _)| index);
        Choice::Channel { index, first_lane: 0 }
    }
}
