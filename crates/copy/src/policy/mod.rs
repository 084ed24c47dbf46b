//! Policies that distribute transfers over the channels of an engine.

mod adaptive;
mod dedicated;
mod round_robin;
mod sticky;

use std::fmt::Debug;
use std::sync::Arc;

use memferry_engine::Channel;

pub use adaptive::Adaptive;
pub use dedicated::Dedicated;
pub use round_robin::RoundRobin;
pub use sticky::Sticky;

/// The channels that a policy chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
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

/// Chooses a channel for each transfer. Many threads call it concurrently.
pub trait Policy: Send + Sync + Debug {
    /// Returns the name used in settings and reports.
    fn name(&self) -> &'static str;

    /// Chooses one of `channels`, which is not empty.
    fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice;
}

/// The built-in policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// All channels in cyclic order.
    RoundRobin,
    /// One channel is reserved for small transfers, which never wait behind large ones.
    Dedicated,
    /// The channel with the fewest outstanding bytes.
    Adaptive,
    /// The channel used last, until its backlog is too large; then the next one.
    #[default]
    Sticky,
}

impl PolicyKind {
    /// All built-in policies.
    pub const ALL: [Self; 4] = [Self::RoundRobin, Self::Dedicated, Self::Adaptive, Self::Sticky];

    /// Returns the policy with this name, as in `MEMFERRY_POLICY`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.build().name() == name)
    }

    /// Creates the policy with its default settings.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Dedicated => Box::new(Dedicated::default()),
            Self::Adaptive => Box::new(Adaptive),
            Self::Sticky => Box::new(Sticky::default()),
        }
    }
}
