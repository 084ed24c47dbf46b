//! How transfers are spread over the channels of an engine.

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

/// A choice of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The channel of this index; if more are wanted, those that follow it, in a circle inside
    /// `first_lane..` up to the last channel.
    Channel {
        /// Where to begin.
        index: usize,
        /// The first of the channels that may be used.
        first_lane: usize,
    },
    /// None: the caller should do it, because every channel would make it wait.
    Caller,
}

/// Chooses a channel for each transfer. Called from many threads at once.
pub trait Policy: Send + Sync + Debug {
    /// The name used in settings and reports.
    fn name(&self) -> &'static str;

    /// Chooses among `channels`, which are never empty.
    fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice;
}

/// The policies that come with the crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// One after the other.
    RoundRobin,
    /// A lane of its own for small transfers, which never wait behind large ones.
    Dedicated,
    /// The channel with the fewest outstanding bytes.
    Adaptive,
    /// The one used last, while it keeps up; then the next.
    #[default]
    Sticky,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::RoundRobin, Self::Dedicated, Self::Adaptive, Self::Sticky];

    /// The policy of a name, as in `MEMFERRY_POLICY`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.build().name() == name)
    }

    /// The policy itself, with its usual settings.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Dedicated => Box::new(Dedicated::default()),
            Self::Adaptive => Box::new(Adaptive),
            Self::Sticky => Box::new(Sticky::default()),
        }
    }
}
