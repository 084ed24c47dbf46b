//! The channels that get a work offer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use memferry_engine::Channel;
use memferry_sys::topology::{self, Distance, Topology};

use super::{ActiveEngine, FerryCore};
use crate::plan;
use crate::policy::{Choice, Nearness, PolicyKind};

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
    /// always among them: the channel that the policy chose, unless another is nearer to the memory at
    /// `target`. A waiting caller needs none. Returns none if the policy leaves the copy to the caller.
    /// Of more channels than `count`, those near the caller are preferred, or near that memory.
    pub(crate) fn select_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        bytes: u64,
        count: usize,
        blocking: bool,
        target: u64,
    ) -> ChannelSelection<'a> {
        let mut chosen = ChannelSelection::default();
        let Choice::Channel { index, first_channel: first_lane } =
            self.policy.choose(&open.channels, bytes)
        else {
            return chosen;
        };
        let lanes = &open.channels[first_lane..];
        let in_turn =
            || (0..lanes.len()).map(|turn| &lanes[(index - first_lane + turn) % lanes.len()]);
        if lanes.len() > count {
            let mut near: Vec<_> = in_turn().collect();
            sort_by_distance(&mut near, self.policy.kind(), bytes, target);
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

/// Minimum size in bytes of a copy for which the kernel is asked for the node of its target.
pub(crate) const MIN_PLACED_BYTES: u64 = 1 << 20;

/// Sorts channels by the distance of their threads from the calling thread: those first that share
/// caches with it, and one on the same core last. The channel that the policy chose stays the first.
/// On a machine with several nodes of memory, channels on the node of a large target come before all
/// others, also before that one if it is on another node, unless the policy is to use all channels in
/// turn. Channels without a thread keep their order.
fn sort_by_distance(
    channels: &mut [&Arc<dyn Channel>],
    policy: PolicyKind,
    bytes: u64,
    target: u64,
) {
    let topology = Topology::of_machine();
    let is_placed = topology.nodes() > 1 && bytes >= MIN_PLACED_BYTES;
    let node = is_placed.then(|| topology::memory_node(target)).flatten();
    let near = Nearness::of_caller(topology);
    let is_on_node =
        |channel: &dyn Channel| channel.core().is_some_and(|core| topology.node_of(core) == node);
    let chosen_stays =
        node.is_none() || policy == PolicyKind::RoundRobin || is_on_node(&**channels[0]);
    let distance = |channel: &&Arc<dyn Channel>| match channel.core() {
        Some(core) => {
            (node.is_some() && topology.node_of(core) != node, near.distance(&***channel))
        }
        None => (true, Distance::OtherNode),
    };
    channels[usize::from(chosen_stays)..].sort_by_cached_key(distance);
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
