//! Policy: the least loaded channel.

use std::sync::Arc;

use memferry_engine::Channel;

use super::Choice;

/// Chooses the channel with the fewest outstanding bytes; among equals an awake one, then the
/// first. It inspects every channel, so its cost grows with their number.
#[derive(Debug, Default)]
pub(crate) struct Adaptive;

impl Adaptive {
    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>]) -> Choice {
        let load = |channel: &Arc<dyn Channel>| (channel.outstanding_bytes(), channel.is_asleep());
        let loads = channels.iter().map(load).enumerate();
        let index = loads.min_by_key(|&(_, load)| load).map_or(0, |(index, _)| index);
        Choice::Channel { index, first_channel: 0 }
    }
}
