//! The distance of channels from the calling thread.

use std::sync::Arc;

use memferry_engine::Channel;
use memferry_engine::cpu::SiblingUse;
use memferry_sys::affinity;
use memferry_sys::topology::{Distance, Topology};

/// The place of the calling thread on the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nearness<'a> {
    topology: &'a Topology,
    here: usize,
    sibling: SiblingUse,
}

impl<'a> Nearness<'a> {
    /// The place of the calling thread, and what channels on the other hardware thread of its core are
    /// used for.
    pub(crate) fn of_caller(topology: &'a Topology, sibling: SiblingUse) -> Self {
        Self { topology, here: affinity::current_core(), sibling }
    }

    /// How far the thread of a channel is from the calling thread. A channel without a thread is
    /// everywhere.
    pub(crate) fn distance(&self, channel: &dyn Channel) -> Distance {
        let distance = channel.core().map(|core| self.topology.distance(self.here, core));
        match distance.unwrap_or(Distance::SharedL2) {
            Distance::Sibling if self.sibling == SiblingUse::Near => Distance::SharedL2,
            distance => distance,
        }
    }

    /// The node of memory of the thread of a channel, if it is known.
    pub(crate) fn node_of(&self, channel: &dyn Channel) -> Option<usize> {
        self.topology.node_of(channel.core()?)
    }

    /// Whether a channel is on the other hardware thread of the caller's core, and that is not to be used.
    pub(crate) fn is_unused(&self, channel: &dyn Channel) -> bool {
        self.sibling == SiblingUse::Unused && self.distance(channel) == Distance::Sibling
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
    pub(crate) fn at(topology: &'a Topology, here: usize, sibling: SiblingUse) -> Self {
        Self { topology, here, sibling }
    }
}
