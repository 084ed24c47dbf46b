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
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{ChannelOptions, Engine};
/// use memferry::policy::{Choice, PolicyKind};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let channels = [engine.open_channel(&ChannelOptions::default())?];
/// let choice = PolicyKind::RoundRobin.build().choose(&channels, 4096);
/// assert_eq!(choice, Choice::Channel { index: 0, first_channel: 0 });
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
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
///
/// ```
/// use memferry::policy::{Policy, PolicyKind};
///
/// let policy: Box<dyn Policy> = PolicyKind::Sticky.build();
/// assert_eq!(policy.name(), "sticky");
/// ```
pub trait Policy: Send + Sync + Debug {
    /// Returns the name used in settings and reports.
    fn name(&self) -> &'static str;

    /// Chooses one of `channels`, which is not empty.
    fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice;
}

/// The built-in policies.
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
