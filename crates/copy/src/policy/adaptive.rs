//! The least loaded channel.

use std::sync::Arc;

use memferry_engine::Channel;

use super::{Choice, Policy};

/// The channel with the fewest outstanding bytes; the first of equals.
#[derive(Debug, Default)]
pub struct Adaptive;

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn choose(&self, channels: &[Arc<dyn Channel>], _bytes: u64) -> Choice {
        let loads = channels.iter().map(|channel| channel.outstanding_bytes());
        let index = loads.enumerate().min_by_key(|&(_, load)| load).map_or(0, |(index, _)| index);
        Choice::Channel { index, first_lane: 0 }
    }
}
