//! The planner of a port: the path of a message, and whether the memory of the message is resident.

use memferry_sys::affinity;
use memferry_sys::shared_memory::Protection;

use super::config::PortConfig;
use super::peer_table::ConnectedPeer;
use crate::connection::{Connection, PeerBuffer};
use crate::path::{CooperativeCopy, ResidencyCache};
use crate::plan::pinning::{self, Copier};
use crate::plan::{
    self, AccessMethod, BufferEnds, Locality, MessagePlan, MessagePlanContext, MessageQuery,
    PathKind, Pinning,
};
use crate::segments::Segment;

/// Maximum number of consecutive fast receives. Everything else is polled between them.
const MAX_FAST_IN_ROW: u32 = 64;

/// The planner of a port.
#[derive(Debug)]
pub(crate) struct Planner {
    pub(super) context: MessagePlanContext,
    /// Maximum size in bytes of a message that is sent without a request: to a receiver that cannot read the
    /// memory of this process, and to one that can.
    eager_limits: [u64; 2],
    /// Memory that is known to be resident.
    pub(super) residency: ResidencyCache,
    /// The peer of the last fast receive, and the number of consecutive fast receives.
    pub(super) last_fast_peer: usize,
    fast_receives_in_row: u32,
}

/// Cores of this host, for this process and its peers here.
#[derive(Debug, Clone, Copy)]
pub(super) struct CoreBudget {
    /// Cores that neither this process nor its peers need.
    pub(super) spare: usize,
    /// Whether this process and its peers are more processes than cores.
    pub(super) oversubscribed: bool,
}

/// A message to be fetched from the memory of its sender.
pub(super) struct Fetch<'a> {
    pub(super) bytes: u64,
    pub(super) target: &'a [Segment],
    pub(super) source: &'a PeerBuffer,
    /// How the receiver reaches the source.
    pub(super) method: AccessMethod,
    pub(super) sender_core: u16,
    pub(super) cores: CoreBudget,
    /// The sender is expected to copy, because the receive was posted ahead.
    pub(super) is_ahead: bool,
}

impl Planner {
    pub(super) fn new(config: &PortConfig) -> Self {
        let context = config.plan_context();
        Self {
            eager_limits: [false, true]
                .map(|reachable| plan::eager_limit(&context, Locality::SharedCache, reachable)),
            context,
            residency: ResidencyCache::default(),
            last_fast_peer: 0,
            fast_receives_in_row: 0,
        }
    }

    /// Maximum size in bytes of a message that is sent without a request. `reachable`: the receiver can read
    /// the memory of this process.
    #[inline]
    pub(super) fn eager_limit(&self, reachable: bool) -> u64 {
        self.eager_limits[usize::from(reachable)]
    }

    /// Whether the next receive may be a fast one. This is `false` once in [`MAX_FAST_IN_ROW`] calls.
    #[inline]
    pub(super) fn allows_fast_receive(&mut self) -> bool {
        self.fast_receives_in_row = (self.fast_receives_in_row + 1) % MAX_FAST_IN_ROW;
        self.fast_receives_in_row != 0
    }

    /// Whether memory is prefaulted.
    pub(crate) fn pinning(&self) -> Pinning {
        self.context.thresholds.pinning
    }

    /// Changes whether memory is prefaulted. No other limit depends on it.
    pub(crate) fn set_pinning(&mut self, pinning: Pinning) {
        self.context.thresholds.pinning = pinning;
    }

    /// Plans how a receiver copies a message out of its sender's memory.
    pub(super) fn plan_fetch(
        &mut self,
        connection: &ConnectedPeer,
        fetch: &Fetch<'_>,
    ) -> MessagePlan {
        let nonresident = self.nonresident_ends(fetch);
        plan::rendezvous(&self.context, &connection.plan_query(fetch, nonresident))
    }

    /// The ends of a message that the receiver may have to prefault. The source matters only to engines.
    fn nonresident_ends(&mut self, fetch: &Fetch<'_>) -> BufferEnds {
        let Self { context, residency, .. } = self;
        if !pinning::checks_residency(context, fetch.bytes) {
            return BufferEnds::default();
        }
        BufferEnds {
            source: fetch.bytes >= plan::offload_limit(context)
                && residency.is_buffer_nonresident(fetch.source, fetch.bytes),
            target: residency.is_nonresident(fetch.target, fetch.bytes),
        }
    }

    /// The memory that a sender prefaults when it copies for its receiver.
    pub(super) fn sender_prefault(
        &mut self,
        source: &[Segment],
        together: &CooperativeCopy,
    ) -> BufferEnds {
        let Self { context, residency, .. } = self;
        let (bytes, Some(target)) = (together.length(), together.target()) else {
            return BufferEnds::default();
        };
        let method = if matches!(target, PeerBuffer::Mapped { .. }) {
            AccessMethod::Mapped
        } else {
            AccessMethod::CrossMemory
        };
        let can = pinning::prefaultable(PathKind::Cooperative, Copier::Sender, method);
        match context.thresholds.pinning {
            Pinning::On => can,
            _ if !pinning::checks_residency(context, bytes) => BufferEnds::default(),
            _ => BufferEnds {
                source: can.source && residency.is_nonresident(source, bytes),
                target: can.target && residency.is_buffer_nonresident(target, bytes),
            },
        }
    }
}

impl ConnectedPeer {
    /// The query to the planner for a message.
    fn plan_query(&self, fetch: &Fetch<'_>, nonresident: BufferEnds) -> MessageQuery {
        MessageQuery {
            bytes: fetch.bytes,
            receiver_access: fetch.method,
            sender_access: sender_access(&self.wire, fetch.target),
            locality: Locality::of(fetch.sender_core.into(), affinity::current_core()),
            spare_cores: fetch.cores.spare,
            // If processes share cores, the sender is most likely not running.
            sender_is_busy: fetch.cores.oversubscribed
                || self.pending_rts > 0
                || !self.send_queue.is_empty(),
            is_ahead: fetch.is_ahead,
            nonresident,
        }
    }
}

/// How the sender will access the target: shareable regions are shared when the target is described to it.
fn sender_access(wire: &Connection, target: &[Segment]) -> AccessMethod {
    let shareable = |segment: &Segment| wire.shareable_region(segment).is_some();
    if target.iter().all(shareable) {
        AccessMethod::Mapped
    } else {
        wire.peer_access_method(target, Protection::ReadWrite)
    }
}
