//! Policy: the channel used last, until its backlog is too large.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memferry_engine::Channel;

use super::Choice;

/// Stays with one channel, which therefore stays awake, and advances to the next one when its
/// backlog is too large. Once the channels are idle again it starts over with the first: the same few
/// stay awake.
///
/// The backlog of a channel is in a cache line that its thread writes. So the policy adds up what was
/// submitted, and fetches the line only when that could be too much.
#[derive(Debug)]
pub(crate) struct Sticky {
    current: AtomicUsize,
    /// An upper bound of the backlog of the current channel in bytes. Threads that submit at the
    /// same time may lose a part of it.
    bound: AtomicU64,
    /// The maximum backlog in bytes of the current channel.
    max_backlog_bytes: u64,
}

impl Sticky {
    /// `max_backlog_bytes` is what a core copies in the time of waking another one.
    pub(super) fn new(max_backlog_bytes: u64) -> Self {
        Self { current: AtomicUsize::new(0), bound: AtomicU64::new(0), max_backlog_bytes }
    }

    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice {
        let mut index = 0;
        if channels.len() > 1 {
            index = self.current.load(Ordering::Relaxed) % channels.len();
            let bound = self.bound.load(Ordering::Relaxed).saturating_add(bytes);
            self.bound.store(bound, Ordering::Relaxed);
            if bound > self.max_backlog_bytes {
                index = self.look(channels, index, bytes);
            }
        }
        Choice::Channel { index, first_channel: 0 }
    }

    /// Looks at the backlog of the current channel and chooses again.
    #[inline(never)]
    fn look(&self, channels: &[Arc<dyn Channel>], current: usize, bytes: u64) -> usize {
        let backlog = |index: usize| channels[index].outstanding_bytes();
        let is_full = |bytes: u64| bytes > self.max_backlog_bytes;
        let now = backlog(current);
        let index = if is_full(now) {
            (current + 1) % channels.len()
        } else if now == 0 && current > 0 && !is_full(backlog(0)) {
            0
        } else {
            current
        };
        let known = if index == current { now } else { 0 };
        self.current.store(index, Ordering::Relaxed);
        self.bound.store(known.saturating_add(bytes), Ordering::Relaxed);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_engine::testing::polled::PolledEngine;
    use memferry_engine::{ChannelOptions, Descriptor, Engine, Opcode};

    /// Channels that execute nothing before they are polled.
    fn channels(count: usize) -> Vec<Arc<dyn Channel>> {
        let engine = PolledEngine::new();
        let options = ChannelOptions::default();
        (0..count).map(|_| engine.open_channel(&options).unwrap()).collect()
    }

    fn submit(policy: &Sticky, channels: &[Arc<dyn Channel>], target: &mut [u8]) -> usize {
        let length = target.len() as u64;
        let Choice::Channel { index, .. } = policy.choose(channels, length) else { unreachable!() };
        // SAFETY: the tests drop the memory after the channels, which finish what they have.
        let fill = unsafe { Descriptor::new(Opcode::Fill, 0, target.as_mut_ptr() as u64, length) };
        channels[index].submit(&mut [Some(fill)]).unwrap();
        index
    }

    #[test]
    fn a_full_channel_is_followed_by_the_next_and_idle_ones_by_the_first() {
        let mut target = vec![0; 1000];
        let (policy, channels) = (Sticky::new(900), channels(3));
        let mut choose = |count| -> Vec<_> {
            (0..count).map(|_| submit(&policy, &channels, &mut target)).collect()
        };
        assert_eq!(choose(4), [0, 1, 2, 0]);
        assert_eq!(choose(1), [1]);
        channels.iter().for_each(|channel| while channel.poll() {});
        assert_eq!(choose(2), [0, 1]);
    }

    #[test]
    fn the_channel_is_looked_at_when_it_may_be_full() {
        let mut target = vec![0; 1000];
        let (policy, channels) = (Sticky::new(2000), channels(3));
        let mut choose = |count| -> Vec<_> {
            (0..count).map(|_| submit(&policy, &channels, &mut target)).collect()
        };
        assert_eq!(choose(7), [0, 0, 0, 1, 1, 1, 2]);
    }

    #[test]
    fn one_channel_is_always_chosen() {
        let mut target = vec![0; 10];
        let (policy, channels) = (Sticky::new(0), channels(1));
        assert_eq!((0..5).map(|_| submit(&policy, &channels, &mut target)).max(), Some(0));
        while channels[0].poll() {}
    }
}
