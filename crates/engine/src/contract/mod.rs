//! What an engine is: the traits [`Engine`] and [`Channel`], and the values that cross them.
//!
//! Descriptors go into a channel by batch; completions come out as a rising sequence number, so
//! asking for one is a load and a compare. A full channel is no error: what was not taken is still
//! the caller's. An engine finishes or fails every descriptor it took, whatever happens.

mod capabilities;
mod cost;
mod descriptor;
mod error;
#[cfg(not(loom))]
mod pins;
#[cfg(loom)]
#[path = "pins_loom.rs"]
mod pins;
#[cfg(not(loom))]
mod regions;
#[cfg(not(loom))]
mod registry;
mod shared;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::completion::Completion;

pub use capabilities::{Capabilities, MemoryKind, MemoryKinds, Operations, Registration};
pub use cost::{CostLine, Direction, Preparation};
pub use descriptor::{Descriptor, Kernel, Operation, Scope};
pub use error::{ExecutionError, OpenError, SubmitError};
#[cfg(not(loom))]
pub use pins::PinnedAt;
pub use pins::{Notice, Pinner, Pins};
#[cfg(not(loom))]
pub use regions::Held;
#[cfg(not(loom))]
pub use registry::{Acquaintance, Holding, Limits, Registry};
pub use shared::{
    FailureLog, as_engine_thread, enter_engine_thread, is_engine_thread, park_by_polling,
};

/// The number of a descriptor in its channel. The first is 1; 0 stands for "none yet".
pub type Sequence = u64;

/// Something that moves bytes.
pub trait Engine: Send + Sync + Debug {
    /// The short name used in plans, settings and reports.
    fn name(&self) -> &str;

    /// What it can do, and what it asks of memory.
    fn capabilities(&self) -> &Capabilities;

    /// What a transfer of a direction costs: start-up plus time per byte, as measured.
    fn cost(&self, direction: Direction) -> CostLine;

    /// What pins memory for it: for engines with
    /// [`Registration::ByMemoryLayer`], which must name one, and for no others. Such an engine is
    /// given descriptors that say where their memory is pinned
    /// ([`Descriptor::pinned_source`], [`Descriptor::pinned_target`]), and fails those that do not.
    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        None
    }

    /// The memory that it registers: for engines with [`Registration::ByEngine`], and for no
    /// others.
    #[cfg(not(loom))]
    fn registry(&self) -> Option<&Registry> {
        None
    }

    /// What making memory ready costs, for engines that have a [`registry`](Engine::registry).
    fn preparation(&self) -> Option<Preparation> {
        None
    }

    /// What kind of memory an address is of, as far as the engine knows.
    fn kind_of(&self, _address: u64) -> Option<MemoryKind> {
        None
    }

    /// Whether it can copy what a caller says is memory of a device: `false` if it is of a device that
    /// is not the engine's.
    fn reaches(&self, _address: u64) -> bool {
        true
    }

    /// Opens an in-order queue. Dropping the last handle of a channel finishes or fails what it
    /// still holds before the drop returns.
    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError>;
}

/// An in-order queue of one engine. Any number of threads may use it at once.
///
/// # Safety
/// Callers give memory back on the channel's word. So `completed` must not reach a number before
/// the descriptor of that number is over, and a descriptor that was taken must not touch its memory
/// after it was finished, dropped, or its number was reached. Numbers rise by one per descriptor in
/// the order of `submit`, without gaps.
///
/// A call that panics must leave the channel such that it can be dropped: the drop of the last handle
/// ends what the channel holds, also if it unwinds, and nothing touches the memory of a descriptor
/// after that descriptor was dropped.
pub unsafe trait Channel: Send + Sync + Debug {
    /// Takes descriptors from the front of `batch` for as long as there is room, leaving `None`
    /// behind for each one taken; `None` entries are skipped. Taking none is no error.
    ///
    /// # Errors
    /// Only when the channel is closed; then nothing was taken.
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError>;

    /// As [`Channel::submit`], for one descriptor. Returns its number, or gives it back: the channel is
    /// full or closed.
    fn submit_one(&self, descriptor: Descriptor) -> Result<Sequence, Descriptor> {
        let mut batch = [Some(descriptor)];
        let taken = self.submit(&mut batch);
        match batch {
            [Some(descriptor)] => Err(descriptor),
            [None] => Ok(taken.map_or(0, |taken| taken.first)),
        }
    }

    /// A completion that ends when `completed()` has come to the number of a descriptor that the
    /// channel took. Does not wait, and takes no room in the channel. `None`: the channel cannot do
    /// that, and its transfers are not kept by their numbers alone.
    fn completion_of(&self, _sequence: Sequence) -> Option<Arc<Completion>> {
        None
    }

    /// Every descriptor up to and including this number is finished, and its data is visible to
    /// the thread that read the number.
    fn completed(&self) -> Sequence;

    /// Why a descriptor failed, if it did and is still remembered. Channels remember at least
    /// their last 64 failures.
    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError>;

    /// Lets a channel without a thread of its own move on; returns whether anything happened.
    /// Channels that drive themselves have nothing to do here.
    fn poll(&self) -> bool;

    /// Blocks until `completed()` reaches `sequence`, or the time is over. A channel without a
    /// thread moves on meanwhile. Returns whether the sequence was reached.
    fn park(&self, sequence: Sequence, timeout: Duration) -> bool;

    /// Whether the channel sleeps, so that a submit would have to wake it. Only a hint: it may
    /// have changed by the time the answer is used.
    fn is_asleep(&self) -> bool {
        false
    }

    /// Wakes the channel if it sleeps. Submitting does this by itself; callers need it only after
    /// changing something that the channel cannot see.
    fn wake(&self);

    /// Refuses new descriptors and finishes or fails those already taken. Returns at once;
    /// `park` tells when it is done.
    fn close(&self);

    /// Bytes taken and not yet finished.
    fn outstanding_bytes(&self) -> u64;

    /// What the channel has done so far.
    fn statistics(&self) -> ChannelStatistics;
}

/// What a submit took: `count` descriptors, numbered from `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The number of the first one taken; without meaning when `count` is 0.
    pub first: Sequence,
    /// How many were taken.
    pub count: usize,
}

impl Taken {
    /// Nothing was taken.
    pub const NONE: Self = Self { first: 0, count: 0 };

    /// The number of the last one taken, or 0.
    pub fn last(&self) -> Sequence {
        if self.count == 0 { 0 } else { self.first + self.count as u64 - 1 }
    }
}

/// Wishes for a new channel. Engines ignore what does not apply to them.
#[derive(Debug, Clone, Default)]
pub struct ChannelOptions {
    /// Bind the channel's thread to this core.
    pub core: Option<usize>,
    /// How many descriptors it holds; rounded up to a power of two.
    pub capacity: Option<usize>,
    /// How long an idle channel looks for work before it sleeps.
    pub spin_ns: Option<u64>,
    /// A name for its thread.
    pub label: Option<String>,
}

/// Counters of one channel, all rising.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelStatistics {
    /// Descriptors taken.
    pub submitted: u64,
    /// Descriptors finished, well or not.
    pub completed: u64,
    /// Descriptors that failed.
    pub failed: u64,
    /// Bytes moved, filled or compared.
    pub bytes: u64,
    /// Times the channel fell asleep.
    pub sleeps: u64,
    /// Times a submit found it asleep and woke it.
    pub wakes: u64,
    /// Submits that found it full and had to keep something.
    pub full: u64,
}

impl std::ops::Add for ChannelStatistics {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            submitted: self.submitted + other.submitted,
            completed: self.completed + other.completed,
            failed: self.failed + other.failed,
            bytes: self.bytes + other.bytes,
            sleeps: self.sleeps + other.sleeps,
            wakes: self.wakes + other.wakes,
            full: self.full + other.full,
        }
    }
}
