//! How an engine that copies registered memory is best used: whether memory that is not registered is
//! worth registering, where that is allowed, or better passes through a ring, and by how many channels.

use memferry_engine::contract::{Acquaintance, CostLine};
use memferry_engine::{MemoryKind, Operation};

use super::{EngineFacts, Facts, PAGE, Path, Plan, Question, Reason, WHOLE_BYTES};

/// A channel more shares a transfer that passes through rings for each so many bytes.
const SHARED_BYTES: u64 = 256 << 10;

/// By so much a way is made to look worse than it is that is taken only for want of another.
const UNWANTED: f64 = 10.0;

/// The best use of an engine for a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Use {
    /// Memory that is not registered stays so.
    pub(super) passing: bool,
    /// How many channels work on it.
    pub(super) channels: usize,
    pub(super) estimate_ns: f64,
    pub(super) reason: Reason,
}

/// Finds the best use of an engine; `None` if it is not one that registers memory itself.
pub(super) fn best_use(engine: &EngineFacts, question: &Question) -> Option<Use> {
    let preparation = engine.preparation?;
    let direct = engine.costs.of(question.source_memory, question.target_memory);
    let sides = host_sides(question);
    let bytes = question.bytes as f64;
    let estimate = |per_byte: f64, startup: f64| startup + bytes * per_byte.max(direct.ns_per_byte);
    if sides == 0 || question.acquaintance == Acquaintance::Known {
        let reason = match preparation.registers {
            _ if sides == 0 => Reason::InDevice,
            true => Reason::Registered,
            false => Reason::RegisteredByOwner,
        };
        let estimate_ns = estimate(0.0, direct.startup_ns);
        return Some(Use { passing: false, channels: 1, estimate_ns, reason });
    }
    let channels = (question.bytes / SHARED_BYTES).clamp(1, engine.channels.max(1) as u64) as usize;
    let (stage, startup) =
        (preparation.stage, |line: CostLine| direct.startup_ns + line.startup_ns);
    // Between two pieces of ordinary memory a ring would mean two copies by processors for one, and to
    // fill a ring takes a processor as long as to fill the memory. For engines that are alone.
    let gains_nothing = sides > 1 || question.operation == Operation::Fill;
    if gains_nothing && !preparation.registers {
        let (passing, reason) = (true, Reason::NotRegistered);
        let estimate_ns = UNWANTED * estimate(stage.ns_per_byte, startup(stage));
        return Some(Use { passing, channels, estimate_ns, reason });
    }
    let registering = match question.acquaintance {
        Acquaintance::NewAndHuge => preparation.register_huge,
        _ => preparation.register,
    };
    // Each piece that is registered has its own start, and its own end.
    let registering =
        CostLine { startup_ns: registering.startup_ns * pieces(question.bytes), ..registering };
    let registered = Use {
        passing: false,
        channels: 1,
        estimate_ns: estimate(registering.ns_per_byte * f64::from(sides), startup(registering)),
        reason: Reason::RegisteredOnTheWay { gb_per_s: registering.gb_per_s() },
    };
    // Registering both takes longer than a processor takes for the copy.
    if sides > 1 {
        let estimate_ns = UNWANTED * registered.estimate_ns;
        return Some(Use { estimate_ns, ..registered });
    }
    let through_rings = Use {
        passing: true,
        channels,
        estimate_ns: estimate(stage.ns_per_byte / channels as f64, startup(stage)),
        reason: Reason::ThroughRings { channels, gb_per_s: stage.gb_per_s() },
    };
    Some(if !preparation.registers || through_rings.estimate_ns <= registered.estimate_ns {
        through_rings
    } else {
        registered
    })
}

/// The plan for an engine that registers memory itself.
pub(super) fn plan(facts: &Facts, question: &Question, engine: usize, best: Use) -> Plan {
    /// The chunks that such an engine claims, several at a time, and in which progress is seen. Those
    /// that pass through rings are no longer than a slot of a ring, and some for each channel.
    const CHUNK_BYTES: u64 = 4 << 20;
    const CHUNKS: u64 = 32;
    const RING_CHUNK_BYTES: u64 = 512 << 10;
    const RING_CHUNKS: u64 = 4;
    /// From here on processors can be of help to an engine that is many times as quick.
    const SPLIT_BYTES: u64 = 16 << 20;
    let bytes = question.bytes;
    let kernel = super::kernel(&facts.profile, question, 2);
    if question.operation == Operation::Move || bytes <= WHOLE_BYTES {
        let plan = Plan::new(Path::Whole { engine }, kernel, best.reason);
        return Plan { passing: best.passing, ..plan };
    }
    let is_shared = question.is_host_only()
        && question.blocking
        && !question.spare_caller
        && bytes >= SPLIT_BYTES;
    let processors = facts.engines.iter().position(|other| {
        other.preparation.is_none()
            && other.capabilities.claims_chunks
            && other.capabilities.operations.contains(question.operation)
    });
    if let Some(processors) = processors.filter(|_| is_shared) {
        let channels = facts.engines[processors].channels.min(facts.spread);
        let chunk_bytes = (facts.profile.chunk_bytes as u64).max(PAGE);
        let path = Path::Split { engine, processors, chunk_bytes, channels };
        return Plan::new(path, kernel, Reason::SplitOverEngines { channels });
    }
    let (chunks, largest) = match best.passing {
        true => (RING_CHUNKS * best.channels as u64, RING_CHUNK_BYTES),
        false => (CHUNKS, CHUNK_BYTES),
    };
    let chunk_bytes = bytes.div_ceil(chunks).next_multiple_of(PAGE).min(largest);
    let path = Path::Chunks { engine, chunk_bytes, channels: best.channels };
    Plan { passing: best.passing, ..Plan::new(path, kernel, best.reason) }
}

/// How many pieces a side is registered in: they double from the first to the largest.
fn pieces(bytes: u64) -> f64 {
    const FIRST: f64 = (1u64 << 20) as f64;
    const LARGEST: f64 = (32u64 << 20) as f64;
    let bytes = bytes as f64;
    1.0 + (bytes.clamp(FIRST, LARGEST) / FIRST).log2() + (bytes / LARGEST).floor()
}

/// How many pieces of ordinary memory the operation touches.
fn host_sides(question: &Question) -> u32 {
    let is_host = |kind| u32::from(kind == MemoryKind::Host);
    match question.operation {
        Operation::Fill => is_host(question.target_memory),
        _ => is_host(question.source_memory) + is_host(question.target_memory),
    }
}
