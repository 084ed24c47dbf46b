//! The channels that get a work offer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use memferry_engine::Channel;
use memferry_engine::cpu::SiblingUse;
use memferry_sys::topology::{self, Distance, Topology};

use super::{ActiveEngine, FerryCore};
use crate::plan;
use crate::policy::{Choice, Nearness, PolicyKind};
use crate::request::Request;

/// Where the memory of a copy is. Address 0 stands for none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyMemory {
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) bytes: u64,
}

impl CopyMemory {
    /// The memory of a request.
    pub(super) fn of(request: &Request<'_>) -> Self {
        Self { source: request.source, target: request.target, bytes: request.length }
    }
}

impl FerryCore {
    /// Returns up to `count` channels of a device, starting with the least loaded one. All channels
    /// use the same copy engines, so the first one suffices while it is idle.
    pub(super) fn least_loaded_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        count: usize,
    ) -> ChannelSelection<'a> {
        let outstanding = open.channels.iter().map(|channel| channel.outstanding_bytes());
        let first = outstanding.enumerate().min_by_key(|(_, bytes)| *bytes);
        let first = first.map_or(0, |(index, _)| index);
        let mut chosen = ChannelSelection::default();
        for turn in 0..count.min(open.channels.len()) {
            chosen.push(&open.channels[(first + turn) % open.channels.len()]);
        }
        chosen
    }

    /// Selects at most `count` channels that get a work offer: those that are awake, and as many
    /// sleeping ones as the copy is worth waking. If the caller does not wait, the first one in order is
    /// always among them: the channel that the policy chose, unless another is nearer to the memory. A waiting caller needs none. Returns none if the policy leaves the copy to the caller.
    /// Of more channels than `count`, those near the caller are preferred, or near that memory. A channel on
    /// the other hardware thread of the caller's core is left out if sharing with it does not pay.
    pub(crate) fn select_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        memory: CopyMemory,
        count: usize,
        blocking: bool,
    ) -> ChannelSelection<'a> {
        let bytes = memory.bytes;
        let mut chosen = ChannelSelection::default();
        let Choice::Channel { index, first_channel: first_lane } =
            self.policy.choose(&open.channels, bytes)
        else {
            return chosen;
        };
        let lanes = &open.channels[first_lane..];
        let in_turn =
            || (0..lanes.len()).map(|turn| &lanes[(index - first_lane + turn) % lanes.len()]);
        let sibling = self.plan_context.profile.sibling_use();
        if lanes.len() > count || sibling == SiblingUse::Unused {
            let mut near: Vec<_> = in_turn().collect();
            let place = Nearness::of_caller(Topology::of_machine(), sibling);
            leave_out_unused(&mut near, place, usize::from(!blocking));
            if near.len() > count {
                let nodes = nodes_of(memory, plan::placed_bytes(&self.plan_context.profile));
                let is_in_turn = self.policy.kind() == PolicyKind::RoundRobin;
                sort_by_distance(&mut near, place, &nodes, is_in_turn);
            }
            self.fill_selection(&mut chosen, near.into_iter(), count, bytes, blocking);
        } else {
            self.fill_selection(&mut chosen, in_turn(), count, bytes, blocking);
        }
        chosen
    }

    /// Selects from channels in the order of preference: the awake ones, then sleeping ones that are
    /// worth waking.
    fn fill_selection<'a>(
        &self,
        chosen: &mut ChannelSelection<'a>,
        channels: impl Iterator<Item = &'a Arc<dyn Channel>> + Clone,
        count: usize,
        bytes: u64,
        blocking: bool,
    ) {
        let mut asleep = 0;
        for (turn, channel) in channels.clone().enumerate() {
            if (turn > 0 || blocking) && channel.is_asleep() {
                asleep += 1;
            } else if chosen.len() < count {
                chosen.push(channel);
            }
        }
        let room = asleep.min(count - chosen.len());
        if room > 0 {
            let worth = self.worth_waking(bytes, blocking).min(room);
            // A channel that fell asleep or woke up since the loop above gets two work offers or
            // none; both are harmless.
            let sleeping = channels.filter(|channel| channel.is_asleep());
            sleeping.take(worth).for_each(|channel| chosen.push(channel));
        }
    }

    /// Returns how many sleeping channels to wake. The bytes of copies that are too small for a
    /// wakeup add up, so that a program that makes many small copies gets its channels after a few
    /// of them.
    fn worth_waking(&self, bytes: u64, blocking: bool) -> usize {
        let profile = &self.plan_context.profile;
        self.pay_for_waking(bytes, |owed| plan::worth_waking(profile, owed, blocking))
    }

    /// Whether to wake a channel for a small copy that the caller would otherwise execute: of such
    /// copies, the speed is measured. Where all channels that are awake have too much, the caller has
    /// copied long enough once that has taken as long as waking one: so it never takes more than twice
    /// the time of the better choice.
    pub(super) fn is_worth_waking_for_small(&self, bytes: u64) -> bool {
        let (profile, speed) = (&self.plan_context.profile, self.inline_limit.gb_per_s());
        let worth = |owed: u64| match self.policy.in_flight_bytes() {
            0 => plan::worth_waking_at(speed, profile, owed, false),
            _ => usize::from(owed as f64 / speed >= profile.wake_ns),
        };
        self.pay_for_waking(bytes, worth) > 0
    }

    fn pay_for_waking(&self, bytes: u64, worth: impl FnOnce(u64) -> usize) -> usize {
        let owed = self.unwoken_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let worth = worth(owed);
        if worth > 0 {
            self.unwoken_bytes.store(0, Ordering::Relaxed);
        }
        worth
    }
}

/// Removes channels with which sharing does not pay, behind the first `kept`.
fn leave_out_unused(channels: &mut Vec<&Arc<dyn Channel>>, place: Nearness<'_>, kept: usize) {
    let mut left = kept;
    channels.retain(|channel| {
        let is_kept = left > 0;
        left = left.saturating_sub(1);
        is_kept || !place.is_unused(&***channel)
    });
}

/// Returns the nodes of the memory of a large copy, on a machine with several: that of the target, then that
/// of the source. Memory that was never written has none.
fn nodes_of(memory: CopyMemory, min_bytes: u64) -> Vec<usize> {
    if Topology::of_machine().nodes() < 2 || memory.bytes < min_bytes {
        return Vec::new();
    }
    topology::memory_nodes([memory.target, memory.source]).into_iter().flatten().collect()
}

/// Sorts channels by the distance of their threads from the calling thread: those first that share
/// caches with it, and one on the same core last, unless that is measured to be as good. The first one
/// stays the first: the policy chose it. Channels on the first of the `nodes` of memory come before all
/// others, also before that one if it is on another node, unless the policy is to use all channels in
/// turn; those on the next node come after them. Channels without a thread keep their order.
fn sort_by_distance(
    channels: &mut [&Arc<dyn Channel>],
    near: Nearness<'_>,
    nodes: &[usize],
    is_in_turn: bool,
) {
    let rank = |channel: &dyn Channel| {
        let node = near.node_of(channel);
        nodes.iter().position(|wanted| Some(*wanted) == node).unwrap_or(nodes.len())
    };
    let distance = |channel: &&Arc<dyn Channel>| match channel.core() {
        Some(_) => (rank(&***channel), near.distance(&***channel)),
        None => (usize::MAX, Distance::OtherNode),
    };
    let first_stays = is_in_turn || rank(&**channels[0]) == 0;
    channels[usize::from(first_stays)..].sort_by_cached_key(distance);
}

/// The channels that get a work offer. Usually there is one, for which no list is allocated.
#[derive(Default)]
pub(crate) struct ChannelSelection<'a> {
    first: Option<&'a Arc<dyn Channel>>,
    others: Vec<&'a Arc<dyn Channel>>,
}

impl<'a> ChannelSelection<'a> {
    fn push(&mut self, channel: &'a Arc<dyn Channel>) {
        match self.first {
            None => self.first = Some(channel),
            Some(_) => self.others.push(channel),
        }
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = &'a Arc<dyn Channel>> {
        self.first.into_iter().chain(self.others)
    }

    /// Splits the selection into the channel that the caller submits to, an awake one without work
    /// if there is any, and those that it passes the work on to; the last of these is the next.
    pub(crate) fn split_first(self) -> (Self, Vec<Weak<dyn Channel>>) {
        let Self { mut first, mut others } = self;
        if let Some(first) = &mut first
            && first.is_asleep()
            && let Some(awake) = others
                .iter_mut()
                .find(|channel| !channel.is_asleep() && channel.outstanding_bytes() == 0)
        {
            std::mem::swap(first, awake);
        }
        let passed_on = others.into_iter().rev().map(Arc::downgrade).collect();
        (Self { first, others: Vec::new() }, passed_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::sticky::tests::{LoadedChannel, machine};

    /// A channel on each core.
    fn channels(cores: usize) -> Vec<Arc<dyn Channel>> {
        let channel = |core| LoadedChannel { core: Some(core), ..LoadedChannel::default() };
        (0..cores).map(|core| Arc::new(channel(core)) as Arc<dyn Channel>).collect()
    }

    fn cores(channels: &[&Arc<dyn Channel>]) -> Vec<usize> {
        channels.iter().filter_map(|channel| channel.core()).collect()
    }

    #[test]
    fn channels_on_the_node_of_the_target_come_first_and_then_those_of_the_source() {
        let topology = machine(&["0", "1", "2", "3", "4", "5"], &["0-1", "2-3", "4-5"]);
        let channels = channels(6);
        let sorted = |here, nodes: &[usize]| {
            let mut sorted: Vec<_> = channels.iter().collect();
            let place = Nearness::at(topology, here, SiblingUse::Last);
            sort_by_distance(&mut sorted, place, nodes, false);
            cores(&sorted)
        };
        assert_eq!(sorted(3, &[]), [0, 2, 1, 4, 5, 3], "the first one was chosen");
        assert_eq!(sorted(3, &[2, 1]), [4, 5, 2, 3, 0, 1]);
        assert_eq!(sorted(5, &[0, 1]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(sorted(5, &[1, 1]), [2, 3, 4, 0, 1, 5]);
    }

    #[test]
    fn a_sibling_is_used_as_it_was_measured() {
        let topology = machine(&["0,2", "1,3", "0,2", "1,3"], &["0-3"]);
        let channels = channels(4);
        let selected = |sibling, kept| {
            let place = Nearness::at(topology, 0, sibling);
            let mut selected: Vec<_> = channels.iter().skip(1).collect();
            leave_out_unused(&mut selected, place, kept);
            selected.sort_by_key(|channel| place.distance(&***channel));
            cores(&selected)
        };
        assert_eq!(selected(SiblingUse::Last, 0), [1, 3, 2]);
        assert_eq!(selected(SiblingUse::Near, 0), [2, 1, 3]);
        assert_eq!(selected(SiblingUse::Unused, 0), [1, 3]);
        assert_eq!(selected(SiblingUse::Unused, 2), [1, 3, 2], "those that are kept stay");
    }
}
