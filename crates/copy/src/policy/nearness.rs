//! The distance of channels from the calling thread.

use std::sync::Arc;

use memferry_engine::Channel;
use memferry_sys::affinity;
use memferry_sys::topology::{Distance, Topology};

/// The place of the calling thread on the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nearness<'a> {
    topology: &'a Topology,
    here: usize,
}

impl<'a> Nearness<'a> {
    /// The place of the calling thread.
    pub(crate) fn of_caller(topology: &'a Topology) -> Self {
        Self { topology, here: affinity::current_core() }
    }

    /// How far the thread of a channel is from the calling thread. A channel without a thread is
    /// everywhere.
    pub(crate) fn distance(&self, channel: &dyn Channel) -> Distance {
        match channel.core() {
            Some(core) => self.topology.distance(self.here, core),
            None => Distance::SharedL2,
        }
    }

    /// The index of the nearest of the first `count` channels, or `current` if that is as near. Of those
    /// with the same distance the first.
    pub(super) fn nearest(
        &self,
        channels: &[Arc<dyn Channel>],
        count: usize,
        current: usize,
    ) -> usize {
        let distance = |index: usize| (self.distance(&*channels[index]), index);
        (0..channels.len().min(count))
            .chain([current])
            .min_by_key(|&index| distance(index))
            .unwrap_or(current)
    }

    #[cfg(test)]
    pub(super) fn at(topology: &'a Topology, here: usize) -> Self {
        Self { topology, here }
    }
}
