//! Policy: all channels in cyclic order.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memferry_engine::Channel;

use super::Choice;

/// Chooses the channels in cyclic order, regardless of their load: cheap, and fair for transfers of
/// equal size.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    next: AtomicUsize,
}

impl RoundRobin {
    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>]) -> Choice {
        let index = match channels.len() {
            1 => 0,
            count => self.next.fetch_add(1, Ordering::Relaxed) % count,
        };
        Choice::Channel { index, first_channel: 0 }
    }
}
