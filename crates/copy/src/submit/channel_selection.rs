//! The channels that get a work offer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_engine::Channel;

use super::{ActiveEngine, FerryCore};
use crate::plan;
use crate::policy::Choice;

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
    /// sleeping ones as the copy is worth waking. If the caller does not wait, the channel that the
    /// policy chose is always among them; a waiting caller needs none. Returns none if the policy
    /// leaves the copy to the caller.
    pub(super) fn select_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        bytes: u64,
        count: usize,
        blocking: bool,
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
        let mut asleep = 0;
        for (turn, channel) in in_turn().enumerate() {
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
            in_turn()
                .filter(|channel| channel.is_asleep())
                .take(worth)
                .for_each(|c| chosen.push(c));
        }
        chosen
    }

    /// Returns how many sleeping channels to wake. The bytes of copies that are too small for a
    /// wakeup add up, so that a program that makes many small copies gets its channels after a few
    /// of them.
    fn worth_waking(&self, bytes: u64, blocking: bool) -> usize {
        let owed = self.unwoken_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let worth = plan::worth_waking(&self.plan_context.profile, owed, blocking);
        if worth > 0 {
            self.unwoken_bytes.store(0, Ordering::Relaxed);
        }
        worth
    }
}

/// The channels that get a work offer. Usually there is one, for which no list is allocated.
#[derive(Default)]
pub(super) struct ChannelSelection<'a> {
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

    pub(super) fn into_iter(self) -> impl Iterator<Item = &'a Arc<dyn Channel>> {
        self.first.into_iter().chain(self.others)
    }
}
