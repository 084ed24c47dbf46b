//! Plans for engines that copy registered memory: whether unregistered memory is registered, where
//! that is allowed, or copied through staging buffers, and by how many channels.

use memferry_engine::contract::{CostLine, ReuseHint};
use memferry_engine::{MemoryKind, Opcode};

use super::{
    CopyPlan, CopyPlanContext, CopyQuery, CopyReason, CopyStrategy, EngineSummary, PAGE,
    SINGLE_DESCRIPTOR_BYTES,
};

/// One more channel shares a staged transfer for each multiple of this size in bytes.
pub(super) const SHARED_BYTES: u64 = 256 << 10;

/// Penalty factor on the estimate of a route that is used only if there is no other.
pub(super) const LAST_RESORT_FACTOR: f64 = 10.0;

/// Maximum chunk size in bytes of registered memory. The engine claims several chunks at a time, and
/// progress is visible per chunk.
pub(super) const CHUNK_BYTES: u64 = 4 << 20;
/// The chunks of a transfer of registered memory.
pub(super) const CHUNKS: u64 = 32;
/// Maximum size in bytes of a staged chunk: at most as long as a slot of the staging buffer.
pub(super) const RING_CHUNK_BYTES: u64 = 512 << 10;
/// The staged chunks of each channel.
pub(super) const RING_CHUNKS: u64 = 4;
/// Minimum size in bytes at which processors speed up an engine that is many times as fast.
pub(super) const SPLIT_BYTES: u64 = 16 << 20;
/// The size in bytes of the first range of a side that is registered. The next ones double.
pub(super) const FIRST_REGISTERED: u64 = 1 << 20;
/// The maximum size in bytes of such a range.
pub(super) const MAX_REGISTERED: u64 = 32 << 20;

/// The best use of an engine for a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RegistrationChoice {
    /// Whether unregistered memory stays unregistered.
    pub(super) transient: bool,
    /// The number of channels that share the transfer.
    pub(super) channels: usize,
    pub(super) estimate_ns: f64,
    pub(super) reason: CopyReason,
}

/// Returns the best use of an engine; `None` if the engine does not register memory itself.
pub(super) fn best_choice(
    engine: &EngineSummary,
    question: &CopyQuery,
) -> Option<RegistrationChoice> {
    let preparation = engine.registration_costs?;
    let direct = engine.costs.of(question.source_memory, question.target_memory);
    let sides = host_sides(question);
    let bytes = question.bytes as f64;
    let estimate = |per_byte: f64, startup: f64| startup + bytes * per_byte.max(direct.ns_per_byte);
    if sides == 0 || question.reuse == ReuseHint::Reused {
        let reason = match preparation.registers {
            _ if sides == 0 => CopyReason::InDevice,
            true => CopyReason::Registered,
            false => CopyReason::RegisteredByOwner,
        };
        let estimate_ns = estimate(0.0, direct.startup_ns);
        return Some(RegistrationChoice { transient: false, channels: 1, estimate_ns, reason });
    }
    let channels = (question.bytes / SHARED_BYTES).clamp(1, engine.channels.max(1) as u64) as usize;
    let (stage, startup) =
        (preparation.staging, |line: CostLine| direct.startup_ns + line.startup_ns);
    // A staged copy from host memory to host memory makes processors copy twice, and filling a
    // staging buffer takes a processor as long as filling the target. Such requests therefore get
    // this engine only if it is the only one.
    let gains_nothing = sides > 1 || question.operation == Opcode::Fill;
    if gains_nothing && !preparation.registers {
        let (passing, reason) = (true, CopyReason::NotRegistered);
        let estimate_ns = LAST_RESORT_FACTOR * estimate(stage.ns_per_byte, startup(stage));
        return Some(RegistrationChoice { transient: passing, channels, estimate_ns, reason });
    }
    let registering = match question.reuse {
        ReuseHint::FirstUseHugePages => preparation.register_huge,
        _ => preparation.register,
    };
    // Each registered range has its own startup cost.
    let registering = CostLine {
        startup_ns: registering.startup_ns * registration_count(question.bytes),
        ..registering
    };
    let registered = RegistrationChoice {
        transient: false,
        channels: 1,
        estimate_ns: estimate(registering.ns_per_byte * f64::from(sides), startup(registering)),
        reason: CopyReason::RegisterWhileCopying { gb_per_s: registering.gb_per_s() },
    };
    // Registering both sides takes longer than a copy by a processor.
    if sides > 1 {
        let estimate_ns = LAST_RESORT_FACTOR * registered.estimate_ns;
        return Some(RegistrationChoice { estimate_ns, ..registered });
    }
    let through_rings = RegistrationChoice {
        transient: true,
        channels,
        estimate_ns: estimate(stage.ns_per_byte / channels as f64, startup(stage)),
        reason: CopyReason::StagedThroughPinned { channels, gb_per_s: stage.gb_per_s() },
    };
    Some(if !preparation.registers || through_rings.estimate_ns <= registered.estimate_ns {
        through_rings
    } else {
        registered
    })
}

/// Returns the plan for an engine that registers memory itself.
pub(super) fn plan(
    facts: &CopyPlanContext,
    question: &CopyQuery,
    engine: usize,
    best: RegistrationChoice,
) -> CopyPlan {
    let bytes = question.bytes;
    let kernel = super::kernel(&facts.profile, question, 2);
    if question.operation == Opcode::Move || bytes <= SINGLE_DESCRIPTOR_BYTES {
        let plan = CopyPlan::new(CopyStrategy::SingleDescriptor { engine }, kernel, best.reason);
        return CopyPlan { transient: best.transient, ..plan };
    }
    let is_shared = question.is_host_only()
        && question.blocking
        && !question.no_caller_assist
        && bytes >= SPLIT_BYTES;
    let processors = facts.engines.iter().position(|other| {
        other.registration_costs.is_none()
            && other.capabilities.claims_chunks
            && other.capabilities.operations.contains(question.operation)
    });
    if let Some(processors) = processors.filter(|_| is_shared) {
        let channels = facts.engines[processors].channels.min(facts.spread);
        let chunk_bytes = (facts.profile.chunk_bytes as u64).max(PAGE);
        let path = CopyStrategy::HybridWorkSharing { engine, processors, chunk_bytes, channels };
        return CopyPlan::new(path, kernel, CopyReason::SplitOverEngines { channels });
    }
    let (chunks, largest) = match best.transient {
        true => (RING_CHUNKS * best.channels as u64, RING_CHUNK_BYTES),
        false => (CHUNKS, CHUNK_BYTES),
    };
    let chunk_bytes = bytes.div_ceil(chunks).next_multiple_of(PAGE).min(largest);
    let path = CopyStrategy::WorkSharing { engine, chunk_bytes, channels: best.channels };
    CopyPlan { transient: best.transient, ..CopyPlan::new(path, kernel, best.reason) }
}

/// Returns the number of ranges in which a side is registered: their sizes double from
/// [`FIRST_REGISTERED`] to [`MAX_REGISTERED`].
fn registration_count(bytes: u64) -> f64 {
    const FIRST: f64 = FIRST_REGISTERED as f64;
    const MAX: f64 = MAX_REGISTERED as f64;
    let bytes = bytes as f64;
    1.0 + (bytes.clamp(FIRST, MAX) / FIRST).log2() + (bytes / MAX).floor()
}

/// Returns how many of source and target are host memory that the operation accesses.
fn host_sides(question: &CopyQuery) -> u32 {
    let is_host = |kind| u32::from(kind == MemoryKind::Host);
    match question.operation {
        Opcode::Fill => is_host(question.target_memory),
        _ => is_host(question.source_memory) + is_host(question.target_memory),
    }
}
