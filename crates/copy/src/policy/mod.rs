//! Policies that distribute transfers over the channels of an engine.
//!
//! The set of policies is closed: a ferry uses one of [`PolicyKind`]. Every submission asks the policy
//! for a channel, so the policy is an enum, which the compiler inlines into the submit path. A program
//! that wants another distribution opens a ferry for each group of channels.

mod adaptive;
pub(crate) mod dedicated;
mod nearness;
mod round_robin;
pub(crate) mod sticky;

use std::sync::Arc;

use memferry_engine::Channel;
use memferry_engine::cpu::CpuProfile;

use crate::plan;
use adaptive::Adaptive;
use dedicated::Dedicated;
pub(crate) use nearness::Nearness;
use round_robin::RoundRobin;
use sticky::Sticky;

/// The channels that a policy chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The channel with this index; further channels follow it cyclically within `first_channel..`.
    Channel {
        /// The index of the first channel to use.
        index: usize,
        /// The index of the first channel that may be used.
        first_channel: usize,
    },
    /// No channel: the caller executes the transfer, because it would wait in every channel.
    Caller,
}

/// The policies.
///
/// ```
/// use memferry::Ferry;
/// use memferry::policy::PolicyKind;
///
/// let ferry = Ferry::builder().policy(PolicyKind::Adaptive).build()?;
/// assert_eq!(ferry.policy().name(), "adaptive");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// All channels in cyclic order.
    RoundRobin,
    /// One channel is reserved for small transfers, which never wait behind large ones.
    Dedicated,
    /// The channel with the fewest outstanding bytes.
    Adaptive,
    /// The channel used last, until its backlog is too large; then the least loaded one, of several
    /// the nearest to the calling thread.
    #[default]
    Sticky,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::RoundRobin, Self::Dedicated, Self::Adaptive, Self::Sticky];

    /// Returns the policy with this name, as in `MEMFERRY_POLICY`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the name used in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Dedicated => "dedicated",
            Self::Adaptive => "adaptive",
            Self::Sticky => "sticky",
        }
    }
}

/// The policy of a ferry with its state. Many threads call it concurrently, and some policies write
/// their state: it has cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) enum Policy {
    RoundRobin(RoundRobin),
    Dedicated(Dedicated),
    Adaptive(Adaptive),
    Sticky(Sticky),
}

impl Policy {
    pub(crate) fn new(kind: PolicyKind, profile: &CpuProfile) -> Self {
        match kind {
            PolicyKind::RoundRobin => Self::RoundRobin(RoundRobin::default()),
            PolicyKind::Dedicated => Self::Dedicated(Dedicated),
            PolicyKind::Adaptive => Self::Adaptive(Adaptive),
            PolicyKind::Sticky => {
                let max_backlog_bytes = plan::max_backlog_bytes(profile);
                Self::Sticky(Sticky::new(max_backlog_bytes, profile.sibling_use()))
            }
        }
    }

    pub(crate) fn kind(&self) -> PolicyKind {
        match self {
            Self::RoundRobin(_) => PolicyKind::RoundRobin,
            Self::Dedicated(_) => PolicyKind::Dedicated,
            Self::Adaptive(_) => PolicyKind::Adaptive,
            Self::Sticky(_) => PolicyKind::Sticky,
        }
    }

    /// About how many bytes are in flight in all channels, if a channel had too much of them and the
    /// policy knows it.
    #[inline]
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        match self {
            Self::RoundRobin(_) | Self::Dedicated(_) | Self::Adaptive(_) => 0,
            Self::Sticky(policy) => policy.in_flight_bytes(),
        }
    }

    /// Chooses one of `channels`, which is not empty, for several transfers together: their bytes and
    /// the longest one. Small transfers are small however many come together.
    pub(crate) fn choose_for_run(
        &self,
        channels: &[Arc<dyn Channel>],
        bytes: u64,
        longest: u64,
    ) -> Choice {
        match self {
            Self::Dedicated(policy) => policy.choose(channels, longest),
            _ => self.choose(channels, bytes),
        }
    }

    /// Chooses one of `channels`, which is not empty.
    #[inline(always)]
    pub(crate) fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice {
        match self {
            Self::RoundRobin(policy) => policy.choose(channels),
            Self::Dedicated(policy) => policy.choose(channels, bytes),
            Self::Adaptive(policy) => policy.choose(channels),
            Self::Sticky(policy) => policy.choose(channels, bytes),
        }
    }
}
