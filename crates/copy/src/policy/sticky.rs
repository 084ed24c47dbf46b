//! Policy: the channel used last, until its backlog is too large.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memferry_engine::Channel;

use super::Choice;

/// Maximum backlog in bytes of the current channel: about what a core copies in the time of waking
/// another one.
const MAX_BACKLOG_BYTES: u64 = 512 << 10;

/// Stays with one channel, which therefore stays awake, and advances to the next one when its
/// backlog is too large. It inspects only one channel, regardless of their number.
#[derive(Debug, Default)]
pub(crate) struct Sticky {
    current: AtomicUsize,
}

impl Sticky {
    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>]) -> Choice {
        let mut index = 0;
        if channels.len() > 1 {
            index = self.current.load(Ordering::Relaxed) % channels.len();
            if channels[index].outstanding_bytes() > MAX_BACKLOG_BYTES {
                index = (index + 1) % channels.len();
                self.current.store(index, Ordering::Relaxed);
            }
        }
        Choice::Channel { index, first_channel: 0 }
    }
}
