//! The channel that was used last, while it keeps up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memferry_engine::Channel;

use super::{Choice, Policy};

/// A channel with more than this outstanding does not keep up: about what a core moves in the time
/// it takes to wake another one.
const KEEPS_UP_BYTES: u64 = 512 << 10;

/// Stays with one channel, which so stays awake, and goes on to the next when there is more to do
/// than it can. Looks at one channel only, however many there are.
#[derive(Debug, Default)]
pub struct Sticky {
    current: AtomicUsize,
}

impl Policy for Sticky {
    fn name(&self) -> &'static str {
        "sticky"
    }

    fn choose(&self, channels: &[Arc<dyn Channel>], _bytes: u64) -> Choice {
        let mut index = 0;
        if channels.len() > 1 {
            index = self.current.load(Ordering::Relaxed) % channels.len();
            if channels[index].outstanding_bytes() > KEEPS_UP_BYTES {
                index = (index + 1) % channels.len();
                self.current.store(index, Ordering::Relaxed);
            }
        }
        Choice::Channel { index, first_lane: 0 }
    }
}
