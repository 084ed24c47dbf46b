//! The least loaded channel.

use std::sync::Arc;

use memferry_engine::Channel;

use super::{Choice, Policy};

/// The channel with the fewest outstanding bytes; among equals one that is awake, then the first.
/// Looks at every channel, which takes its time where there are many.
#[derive(Debug, Default)]
pub struct Adaptive;

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn choose(&self, channels: &[Arc<dyn Channel>], _bytes: u64) -> Choice {
        let load = |channel: &Arc<dyn Channel>| (channel.outstanding_bytes(), channel.is_asleep());
        let loads = channels.iter().map(load).enumerate();
        let index = loads.min_by_key(|&(_, load)| load).map_or(0, |(index, _)| index);
        Choice::Channel { index, first_lane: 0 }
    }
}
