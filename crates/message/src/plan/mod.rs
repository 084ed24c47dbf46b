//! Which path a message takes, and why: pure functions of what was measured and what is asked.
//!
//! The sender decides whether a message goes at once ([`at_once`]) or waits in its memory until
//! the receiver has a place for it; then the receiver, who knows both sides, decides how it comes
//! ([`rendezvous`]). Limits come from measured cost lines, and can be set by hand.

mod calibrate;
pub mod closeness;
pub mod costs;
pub mod lines;
pub mod pinning;
mod profile;
mod reason;

pub use closeness::Closeness;
pub use costs::{Costs, Measurement};
pub use lines::Lines;
pub use pinning::{Ends, PinReason, Pinning, Populating};
pub use profile::Profile;
pub use reason::Reason;

use crate::wire::INLINE_BYTES;
use pinning::FRESH_ALONE_LIMIT;

/// The ways a message can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PathKind {
    /// In a cell of the ring.
    Inline,
    /// Copied through the shared space, sent at once.
    Eager,
    /// One copy, by the receiver.
    Single,
    /// One copy, by both sides, chunk by chunk.
    Cooperative,
    /// One copy, by the copy engines of the receiver's process.
    Offload,
    /// Copied through the shared space, when the receiver asks for it.
    Pipeline,
}

impl PathKind {
    /// All of them, in the order of growing messages.
    pub const ALL: [Self; 6] =
        [Self::Inline, Self::Eager, Self::Single, Self::Cooperative, Self::Offload, Self::Pipeline];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Eager => "eager",
            Self::Single => "single",
            Self::Cooperative => "cooperative",
            Self::Offload => "offload",
            Self::Pipeline => "pipeline",
        }
    }

    /// The path of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }
}

/// How one side gets at the memory of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// Not at all.
    None,
    /// By the system call for cross-memory access.
    Cross,
    /// By plain loads and stores: it is mapped here.
    Near,
}

/// Limits set by hand; what is not set comes from measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Messages up to this size are sent at once.
    pub eager_bytes: Option<u64>,
    /// Messages from this size on are copied by both sides.
    pub cooperative_bytes: Option<u64>,
    /// Messages from this size on go to the copy engines, where there are spare cores.
    pub offload_bytes: Option<u64>,
    /// Every message that waits takes this path, if it is possible.
    pub path: Option<PathKind>,
    /// Whether memory is brought in before it is copied.
    pub pinning: Pinning,
}

/// What the planner goes by.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Measured lines.
    pub profile: Profile,
    /// What was set by hand.
    pub limits: Limits,
    /// The second-level cache of a core.
    pub l2_bytes: u64,
    /// From this size on, plain copies go around the caches.
    pub stream_bytes: u64,
    /// Whether a device is among the copy engines of this process.
    pub has_device: bool,
}

/// What is known of a message that waits at the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// How many bytes will be copied.
    pub bytes: u64,
    /// How the receiver gets at the source.
    pub receiver_reads: Way,
    /// How the sender gets at the target.
    pub sender_writes: Way,
    /// What the cores of the two sides share.
    pub closeness: Closeness,
    /// Cores that no process of the conversation needs.
    pub spare_cores: usize,
    /// The sender has a message of this side to fetch, so it will have no time to help.
    pub sender_is_busy: bool,
    /// Which memory is not there: it was never touched, was discarded or is swapped out.
    pub absent: Ends,
}

/// The decision for one message.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The path.
    pub path: PathKind,
    /// The size of a chunk or fragment.
    pub chunk_bytes: u32,
    /// The first bytes that the receiver copies through its cache although engines do the rest.
    pub warm_bytes: u64,
    /// Whether plain copies go around the caches.
    pub streams: bool,
    /// Why.
    pub reason: Reason,
    /// What the receiver brings in before it copies, and why.
    pub populating: Populating,
}

/// The largest message that is sent at once. `reachable`: whether a single copy is possible.
pub fn eager_limit(facts: &Facts, closeness: Closeness, reachable: bool) -> u64 {
    let lines = facts.profile.lines(closeness);
    let by_hand = facts.limits.eager_bytes.map(|bytes| bytes.min(LARGEST_EAGER_LIMIT));
    by_hand.unwrap_or_else(|| {
        let other = if reachable { lines.single(Way::Cross) } else { lines.pipeline };
        lines::crossing(lines.eager, other).clamp(SMALLEST_EAGER_LIMIT, LARGEST_MEASURED_LIMIT)
    })
}

/// The largest message that goes in a cell of the ring.
pub const INLINE_LIMIT: u64 = INLINE_BYTES as u64;
const SMALLEST_EAGER_LIMIT: u64 = 1 << 10;
const LARGEST_MEASURED_LIMIT: u64 = 64 << 10;
/// Longer messages are never sent at once: a receiver has to keep those that it did not ask for.
pub const LARGEST_EAGER_LIMIT: u64 = 128 << 10;

/// The smallest message that both sides copy, if both can. `way`: how they get at the memory.
pub fn cooperative_limit(facts: &Facts, closeness: Closeness, way: Way) -> u64 {
    let lines = facts.profile.lines(closeness);
    facts.limits.cooperative_bytes.unwrap_or_else(|| {
        lines::crossing(lines.single(way), lines.together(way)).max(2 * SMALLEST_CHUNK)
    })
}

/// The smallest message in mapped memory that goes to the copy engines, if cores are spare.
pub fn offload_limit(facts: &Facts) -> u64 {
    facts.limits.offload_bytes.unwrap_or(facts.l2_bytes)
}

/// The decision of the sender: `None` if the message must wait for the receiver.
pub fn at_once(facts: &Facts, bytes: u64, closeness: Closeness, reachable: bool) -> Option<Plan> {
    let plan = |path, reason| {
        Some(Plan {
            path,
            chunk_bytes: fragment_bytes(bytes),
            warm_bytes: 0,
            streams: false,
            reason,
            populating: Populating::nothing(PinReason::NothingToDo),
        })
    };
    if bytes <= INLINE_LIMIT {
        return plan(PathKind::Inline, Reason::FitsCell { limit_bytes: INLINE_LIMIT });
    }
    let limit_bytes = eager_limit(facts, closeness, reachable);
    if bytes > limit_bytes {
        return None;
    }
    let by_hand = facts.limits.eager_bytes.is_some();
    plan(PathKind::Eager, Reason::QuickerThroughSpace { limit_bytes, by_hand })
}

/// The decision on a message, by whoever takes it. A sender does not know on which core its
/// receiver will be, and takes it as near.
pub fn message(facts: &Facts, question: &Question, reachable: bool) -> Plan {
    at_once(facts, question.bytes, Closeness::SharedCache, reachable)
        .unwrap_or_else(|| rendezvous(facts, question))
}

/// The decision of the receiver on a message that waits at the sender.
pub fn rendezvous(facts: &Facts, question: &Question) -> Plan {
    let Question {
        bytes,
        receiver_reads,
        sender_writes,
        closeness,
        spare_cores,
        sender_is_busy,
        absent,
    } = *question;
    let plan = |path, reason| {
        let streams = bytes >= facts.stream_bytes;
        let chunk_bytes = match path {
            PathKind::Cooperative => cooperative_chunk(bytes, sender_writes),
            PathKind::Pipeline => fragment_bytes(bytes),
            _ => SINGLE_STEP,
        };
        let warm_bytes =
            if path == PathKind::Offload { (facts.l2_bytes / 4).min(bytes / 4) } else { 0 };
        let populating = pinning::populating(facts, question, path);
        Plan { path, chunk_bytes, warm_bytes, streams, reason, populating }
    };
    if receiver_reads == Way::None {
        return plan(PathKind::Pipeline, Reason::OutOfReach);
    }
    if let Some(path) = facts.limits.path
        && is_possible(path, question)
    {
        return plan(path, Reason::ByHand);
    }
    if receiver_reads == Way::Near && facts.has_device && bytes >= DEVICE_LIMIT {
        return plan(PathKind::Offload, Reason::Device { limit_bytes: DEVICE_LIMIT });
    }
    let offload_from = offload_limit(facts);
    let by_hand = facts.limits.offload_bytes.is_some();
    if receiver_reads == Way::Near && bytes >= offload_from && (spare_cores > 0 || by_hand) {
        return plan(PathKind::Offload, Reason::SpareCores { cores: spare_cores, offload_from });
    }
    if sender_writes == Way::None {
        return plan(PathKind::Single, Reason::SenderCannotWrite);
    }
    let limit_bytes = cooperative_limit(facts, closeness, receiver_reads);
    if bytes < limit_bytes {
        return plan(PathKind::Single, Reason::TooSmallToShare { limit_bytes });
    }
    if sender_is_busy && bytes < BUSY_LIMIT {
        return plan(PathKind::Single, Reason::SenderIsBusy);
    }
    if absent.target && bytes <= FRESH_ALONE_LIMIT && pinning::looks(facts, bytes) {
        return plan(PathKind::Single, Reason::FreshTarget { limit_bytes: FRESH_ALONE_LIMIT });
    }
    plan(PathKind::Cooperative, Reason::BothCopy { limit_bytes })
}

/// From this size on the two sides of an exchange are hardly done at the same time, and the one
/// that is helps the other.
const BUSY_LIMIT: u64 = 2 << 20;

/// From this size on a device copies mapped memory, which costs no core: below, caches are quicker. It
/// registers the memory when it comes for the second time, and leaves it to cores before that.
const DEVICE_LIMIT: u64 = 16 << 20;

fn is_possible(path: PathKind, question: &Question) -> bool {
    match path {
        PathKind::Inline | PathKind::Eager => false,
        PathKind::Single => true,
        PathKind::Cooperative => question.sender_writes != Way::None,
        PathKind::Offload => question.receiver_reads == Way::Near,
        PathKind::Pipeline => true,
    }
}

/// Below this, a system call costs more than the bytes it moves.
const SMALLEST_CHUNK: u64 = 16 << 10;
/// What a receiver copies alone before it looks at its other messages again.
const SINGLE_STEP: u32 = 1 << 20;

/// Two chunks for a small message, larger ones for a large one: measured.
fn cooperative_chunk(bytes: u64, way: Way) -> u32 {
    let chunk = match (way, bytes) {
        (Way::Near, 0..=0x7_FFFF) => (bytes / 4).next_multiple_of(4096).clamp(8 << 10, 32 << 10),
        (Way::Near, _) => 128 << 10,
        // The receiver begins a little earlier, and takes the larger part.
        (_, 0..=0x3_FFFF) => (bytes / 16 * 9).next_multiple_of(4096).max(SMALLEST_CHUNK),
        (_, 0x4_0000..=0x7_FFFF) => 128 << 10,
        (_, 0x8_0000..=0x7F_FFFF) => 256 << 10,
        _ => 512 << 10,
    };
    // A record counts chunks in 24 bits.
    chunk.max(bytes.div_ceil(1 << 23)).min(1 << 30) as u32
}

/// Fragments are small where the first one is waited for, large where many follow.
pub(crate) fn fragment_bytes(bytes: u64) -> u32 {
    match bytes {
        0..=0x3_FFFF => 8 << 10,
        _ => 32 << 10,
    }
}

#[cfg(test)]
mod tests;
