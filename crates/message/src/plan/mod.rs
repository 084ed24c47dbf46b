//! The planner of messages: pure functions from measured costs and a query to a path and its
//! reason.
//!
//! The sender decides whether a message is sent at once ([`inline_or_eager`]) or announced; the
//! receiver of an announcement, who knows both sides, decides how the message is copied
//! ([`rendezvous`]). Limits come from measured cost lines, and can be configured.

mod calibrate;
pub mod costs;
pub mod locality;
pub mod path_costs;
pub mod pinning;
mod profile;
mod reason;

pub use costs::{CorePairCosts, Measurement};
pub use locality::Locality;
pub use path_costs::PathCosts;
pub use pinning::{BufferEnds, Pinning, PrefaultPlan, PrefaultReason};
pub use profile::MessageProfile;
pub use reason::MessageReason;

use crate::control::INLINE_BYTES;
use pinning::NONRESIDENT_SINGLE_LIMIT;

/// The ways a message can take.
///
/// ```
/// use memferry::message::{Endpoint, PathKind};
///
/// let endpoint = Endpoint::builder().path(PathKind::Pipeline).open("doc-path")?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PathKind {
    /// In a cell of the ring.
    Inline,
    /// Through the bounce ring, without a reply of the receiver.
    Eager,
    /// One copy, by the receiver.
    Single,
    /// One copy, by both sides, chunk by chunk.
    Cooperative,
    /// One copy, by the copy engines of the receiver's process.
    Offload,
    /// Through the bounce ring, after the receiver's reply.
    Pipeline,
}

impl PathKind {
    /// All paths, in the order of growing messages.
    pub const ALL: [Self; 6] =
        [Self::Inline, Self::Eager, Self::Single, Self::Cooperative, Self::Offload, Self::Pipeline];

    /// The name of the path.
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

    /// The path with a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }
}

/// How one side accesses the memory of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessMethod {
    /// No access.
    None,
    /// By the system calls for cross-memory access.
    CrossMemory,
    /// By loads and stores: the memory is mapped.
    Mapped,
}

/// Configured limits; those not set come from measurements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathThresholds {
    /// Messages up to this size are sent eagerly.
    pub eager_bytes: Option<u64>,
    /// Messages from this size are copied by both sides.
    pub cooperative_bytes: Option<u64>,
    /// Messages from this size are copied by engines, if there are spare cores.
    pub offload_bytes: Option<u64>,
    /// Every announced message takes this path, if it is possible.
    pub path: Option<PathKind>,
    /// Whether memory is prefaulted before it is copied.
    pub pinning: Pinning,
}

/// The inputs of the planner that do not depend on the message.
#[derive(Debug, Clone)]
pub struct MessagePlanContext {
    /// The measured cost lines.
    pub profile: MessageProfile,
    /// The configured limits.
    pub thresholds: PathThresholds,
    /// The size of a core's second-level cache.
    pub l2_bytes: u64,
    /// From this size, copies of mapped memory use non-temporal stores.
    pub stream_bytes: u64,
    /// Whether a device is among the copy engines of this process.
    pub has_device: bool,
}

/// The properties of an announced message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageQuery {
    /// The number of bytes to copy.
    pub bytes: u64,
    /// The receiver's access to the source.
    pub receiver_access: AccessMethod,
    /// The sender's access to the target.
    pub sender_access: AccessMethod,
    /// The locality of the two sides' cores.
    pub locality: Locality,
    /// Cores that no connected process needs.
    pub spare_cores: usize,
    /// The sender has a message of this side to fetch, so it will not help.
    pub sender_is_busy: bool,
    /// The receive was posted ahead, by a call that does not wait for it, and senders of such messages
    /// have had time to copy them.
    pub is_ahead: bool,
    /// The ends that are not resident: never touched, discarded or swapped out.
    pub nonresident: BufferEnds,
}

/// The plan of one message.
#[derive(Debug, Clone, PartialEq)]
pub struct MessagePlan {
    /// The path.
    pub path: PathKind,
    /// The size of a chunk or fragment.
    pub chunk_bytes: u32,
    /// The first bytes, which the receiver copies through its cache while engines copy the rest.
    pub cached_bytes: u64,
    /// Whether copies of mapped memory use non-temporal stores.
    pub streams: bool,
    /// The reason of the choice.
    pub reason: MessageReason,
    /// The ends that the receiver prefaults, and the reason.
    pub prefault: PrefaultPlan,
}

/// The maximum length of an eager message. `reachable`: whether a single copy is possible.
pub fn eager_limit(context: &MessagePlanContext, locality: Locality, reachable: bool) -> u64 {
    let path_costs = context.profile.path_costs(locality);
    let configured = context.thresholds.eager_bytes.map(|bytes| bytes.min(MAX_EAGER_LIMIT));
    configured.unwrap_or_else(|| {
        let other = if reachable {
            path_costs.single(AccessMethod::CrossMemory)
        } else {
            path_costs.pipeline
        };
        path_costs::crossover(path_costs.eager, other).clamp(MIN_EAGER_LIMIT, MAX_MEASURED_LIMIT)
    })
}

/// The maximum length of an inline message.
pub const INLINE_LIMIT: u64 = INLINE_BYTES as u64;
const MIN_EAGER_LIMIT: u64 = 1 << 10;
const MAX_MEASURED_LIMIT: u64 = 64 << 10;
/// The upper bound of the eager limit: a receiver must buffer unexpected eager messages.
pub const MAX_EAGER_LIMIT: u64 = 128 << 10;

/// The minimum length of a cooperative message, if both sides can copy. `method`: their access to
/// the memory.
pub fn cooperative_limit(
    context: &MessagePlanContext,
    locality: Locality,
    method: AccessMethod,
) -> u64 {
    let path_costs = context.profile.path_costs(locality);
    context.thresholds.cooperative_bytes.unwrap_or_else(|| {
        path_costs::crossover(path_costs.single(method), path_costs.cooperative(method))
            .max(2 * min_chunk(method))
    })
}

/// The minimum length of a message in mapped memory that engines copy, if there are spare cores.
pub fn offload_limit(context: &MessagePlanContext) -> u64 {
    context.thresholds.offload_bytes.unwrap_or(context.l2_bytes)
}

/// The decision of the sender: `None` if the message must be announced.
pub fn inline_or_eager(
    context: &MessagePlanContext,
    bytes: u64,
    locality: Locality,
    reachable: bool,
) -> Option<MessagePlan> {
    let plan = |path, reason| {
        Some(MessagePlan {
            path,
            chunk_bytes: fragment_bytes(bytes),
            cached_bytes: 0,
            streams: false,
            reason,
            prefault: PrefaultPlan::none(PrefaultReason::NothingToDo),
        })
    };
    if bytes <= INLINE_LIMIT {
        return plan(PathKind::Inline, MessageReason::FitsCell { limit_bytes: INLINE_LIMIT });
    }
    let limit_bytes = eager_limit(context, locality, reachable);
    if bytes > limit_bytes {
        return None;
    }
    let configured = context.thresholds.eager_bytes.is_some();
    plan(PathKind::Eager, MessageReason::EagerIsCheaper { limit_bytes, is_configured: configured })
}

/// The decision on a message by both sides. A sender does not know the receiver's core, and assumes
/// a shared cache.
pub fn message(context: &MessagePlanContext, query: &MessageQuery, reachable: bool) -> MessagePlan {
    inline_or_eager(context, query.bytes, Locality::SharedCache, reachable)
        .unwrap_or_else(|| rendezvous(context, query))
}

/// The decision of the receiver on an announced message.
pub fn rendezvous(context: &MessagePlanContext, query: &MessageQuery) -> MessagePlan {
    let MessageQuery {
        bytes,
        receiver_access,
        sender_access,
        locality,
        spare_cores,
        sender_is_busy,
        is_ahead,
        nonresident,
    } = *query;
    let plan = |path, reason| {
        let streams = bytes >= context.stream_bytes;
        let chunk_bytes = match path {
            PathKind::Cooperative if reason == MessageReason::ReceivedAhead => whole_chunk(bytes),
            PathKind::Cooperative => cooperative_chunk(bytes, sender_access),
            PathKind::Pipeline => fragment_bytes(bytes),
            _ => SINGLE_STEP,
        };
        let cached_bytes =
            if path == PathKind::Offload { (context.l2_bytes / 4).min(bytes / 4) } else { 0 };
        let prefault = pinning::prefault_plan(context, query, path);
        MessagePlan { path, chunk_bytes, cached_bytes, streams, reason, prefault }
    };
    if receiver_access == AccessMethod::None {
        return plan(PathKind::Pipeline, MessageReason::PeerUnreachable);
    }
    if let Some(path) = context.thresholds.path
        && is_possible(path, query)
    {
        return plan(path, MessageReason::Configured);
    }
    if receiver_access == AccessMethod::Mapped && context.has_device && bytes >= DEVICE_LIMIT {
        return plan(PathKind::Offload, MessageReason::Device { limit_bytes: DEVICE_LIMIT });
    }
    let offload_from = offload_limit(context);
    let configured = context.thresholds.offload_bytes.is_some();
    if receiver_access == AccessMethod::Mapped
        && bytes >= offload_from
        && (spare_cores > 0 || configured)
    {
        return plan(
            PathKind::Offload,
            MessageReason::SpareCores { cores: spare_cores, offload_from },
        );
    }
    if sender_access == AccessMethod::None {
        return plan(PathKind::Single, MessageReason::SenderCannotWrite);
    }
    let limit_bytes = cooperative_limit(context, locality, receiver_access);
    // Mapped memory is copied in the time that the sender's answer takes.
    let is_worth_help = bytes >= MIN_AHEAD
        && [receiver_access, sender_access] == [AccessMethod::CrossMemory; 2]
        && context.thresholds.cooperative_bytes.is_none()
        && !sender_is_busy
        && !nonresident.target;
    if bytes < limit_bytes && is_ahead && is_worth_help {
        return plan(PathKind::Cooperative, MessageReason::ReceivedAhead);
    }
    if bytes < limit_bytes {
        return plan(PathKind::Single, MessageReason::TooSmallToShare { limit_bytes });
    }
    if sender_is_busy && bytes < BUSY_LIMIT {
        return plan(PathKind::Single, MessageReason::SenderIsBusy);
    }
    if nonresident.target
        && bytes <= NONRESIDENT_SINGLE_LIMIT
        && pinning::checks_residency(context, bytes)
    {
        return plan(
            PathKind::Single,
            MessageReason::TargetNotResident { limit_bytes: NONRESIDENT_SINGLE_LIMIT },
        );
    }
    plan(PathKind::Cooperative, MessageReason::Cooperative { limit_bytes })
}

/// From this size, the two sides of an exchange rarely finish at the same time, and the first one
/// helps the other.
const BUSY_LIMIT: u64 = 2 << 20;

/// From this size, a device copies mapped memory, which uses no core; below, caches are faster. The
/// device registers memory on its second use, and leaves the first copy to cores.
const DEVICE_LIMIT: u64 = 16 << 20;

fn is_possible(path: PathKind, query: &MessageQuery) -> bool {
    match path {
        PathKind::Inline | PathKind::Eager => false,
        PathKind::Single => true,
        PathKind::Cooperative => query.sender_access != AccessMethod::None,
        PathKind::Offload => query.receiver_access == AccessMethod::Mapped,
        PathKind::Pipeline => true,
    }
}

/// The minimum chunk of a cooperative message. In smaller chunks, a system call costs more than the
/// copy of its bytes, and mapped memory more than the news of the chunk.
fn min_chunk(method: AccessMethod) -> u64 {
    if method == AccessMethod::Mapped { 16 << 10 } else { 24 << 10 }
}
/// The minimum length of a message that is left to its sender: a shorter one is copied in the time that the
/// answer takes.
const MIN_AHEAD: u64 = 8 << 10;
/// The bytes that a receiver copies alone before it polls its other messages.
const SINGLE_STEP: u32 = 1 << 20;

/// The chunk size of a message that one side copies.
fn whole_chunk(bytes: u64) -> u32 {
    bytes.next_multiple_of(4096).min(1 << 30) as u32
}

/// The chunk size, from measurements: two chunks for a small message, larger chunks for a large
/// one.
fn cooperative_chunk(bytes: u64, method: AccessMethod) -> u32 {
    let chunk = match (method, bytes) {
        (AccessMethod::Mapped, 0..=0x7_FFFF) => {
            (bytes / 4).next_multiple_of(4096).clamp(8 << 10, 32 << 10)
        }
        (AccessMethod::Mapped, _) => 128 << 10,
        // The receiver starts earlier, and copies the larger part.
        (_, 0..=0x3_FFFF) => (bytes / 16 * 9).next_multiple_of(4096).max(min_chunk(method)),
        (_, 0x4_0000..=0x7_FFFF) => 128 << 10,
        (_, 0x8_0000..=0x7F_FFFF) => 256 << 10,
        _ => 512 << 10,
    };
    // A claim slot counts chunks in 24 bits.
    chunk.max(bytes.div_ceil(1 << 23)).min(1 << 30) as u32
}

/// The fragment size: small for a short message, whose first fragment is waited for; large for a
/// long one.
pub(crate) fn fragment_bytes(bytes: u64) -> u32 {
    match bytes {
        0..=0x3_FFFF => 8 << 10,
        _ => 32 << 10,
    }
}

#[cfg(test)]
mod tests;
