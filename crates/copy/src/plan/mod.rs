//! Deciding how a request is carried out: pure functions from facts to a choice with its reason.
//!
//! The same question always gets the same answer, nothing is measured and nothing is touched here,
//! so `memferry explain` can print what would happen without doing it.

mod reason;

use memferry_engine::contract::Registration;
use memferry_engine::cpu::Profile;
use memferry_engine::{Capabilities, CostLine, Kernel, MemoryKind, Operation};

pub use reason::Reason;

use crate::request::Temperature;

/// Asynchronous transfers up to this size are one descriptor; larger ones are chunks that can be
/// claimed, which costs one more cache line but lets a waiting caller help.
pub(crate) const WHOLE_BYTES: u64 = 16 << 10;
const SMALLEST_CHUNK: u64 = 32 << 10;
const CHUNKS_PER_PARTY: u64 = 4;
const PAGE: u64 = 4096;

/// What the planner knows of an engine.
#[derive(Debug, Clone)]
pub struct EngineFacts {
    /// Its name.
    pub name: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// What it costs.
    pub cost: CostLine,
    /// How many channels are open.
    pub channels: usize,
}

/// What the planner knows of the machine and the settings.
#[derive(Debug, Clone)]
pub struct Facts {
    /// What was measured, with the builder's corrections.
    pub profile: Profile,
    /// The engines, in order of preference among equals.
    pub engines: Vec<EngineFacts>,
    /// The most channels that one transfer is spread over.
    pub spread: usize,
}

/// What is asked, as far as it matters for the plan.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    /// What to do.
    pub operation: Operation,
    /// With how many bytes.
    pub bytes: u64,
    /// Whether the caller waits for it at once.
    pub blocking: bool,
    /// Where the data is expected to be.
    pub temperature: Temperature,
    /// Whether the caller's core and caches are to be left alone.
    pub spare_caller: bool,
    /// Where the source is.
    pub source_memory: MemoryKind,
    /// Where the target is.
    pub target_memory: MemoryKind,
}

impl Question {
    /// A copy inside ordinary memory about which nothing else is known.
    pub fn copy(bytes: u64, blocking: bool) -> Self {
        Self {
            operation: Operation::Copy,
            bytes,
            blocking,
            temperature: Temperature::Unknown,
            spare_caller: false,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
        }
    }

    fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }
}

/// Who carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// The caller, at once.
    Caller,
    /// One descriptor on one channel.
    Whole {
        /// Which engine.
        engine: usize,
    },
    /// Chunks that several channels, and a waiting caller, claim.
    Chunks {
        /// Which engine.
        engine: usize,
        /// How large a chunk is.
        chunk_bytes: u64,
        /// How many channels are invited at most; see [`worth_waking`].
        channels: usize,
    },
    /// Fixed parts on one channel, cut as the engine demands.
    Parts {
        /// Which engine.
        engine: usize,
        /// How finely progress can be seen.
        chunk_bytes: u64,
    },
}

/// A decision and its reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Who carries it out.
    pub path: Path,
    /// How a processor moves the bytes.
    pub kernel: Kernel,
    /// Why.
    pub reason: Reason,
}

/// Decides. `None`: no engine can do this.
pub fn plan(facts: &Facts, question: &Question) -> Option<Plan> {
    let profile = &facts.profile;
    if question.bytes == 0 {
        let (path, kernel) = (Path::Caller, Kernel::Cached);
        return Some(Plan { path, kernel, reason: Reason::NothingToMove });
    }
    if question.is_host_only()
        && let Some(reason) = caller_reason(profile, question)
    {
        let kernel = kernel(profile, question, 1);
        return Some(Plan { path: Path::Caller, kernel, reason });
    }
    let Some(engine) = choose_engine(facts, question) else {
        // A processor can do everything on ordinary memory.
        return question.is_host_only().then(|| Plan {
            path: Path::Caller,
            kernel: kernel(profile, question, 1),
            reason: Reason::NoEngineKnowsOperation,
        });
    };
    Some(plan_for_engine(facts, question, engine))
}

/// Why the caller should do it alone, if it should.
fn caller_reason(profile: &Profile, question: &Question) -> Option<Reason> {
    let bytes = question.bytes;
    if question.spare_caller {
        return None;
    }
    if question.blocking && bytes < profile.split_bytes as u64 {
        let limit_bytes = profile.split_bytes as u64;
        return Some(Reason::TooSmallToShare { limit_bytes });
    }
    if question.blocking && question.operation == Operation::Move {
        return Some(Reason::OverlappingAndBlocking);
    }
    /// Memory is about so many times slower than the cache that the limit was measured in.
    const COLD_FACTOR: u64 = 8;
    let inline_bytes = match question.temperature {
        Temperature::Cold => profile.inline_bytes as u64 / COLD_FACTOR,
        _ => profile.inline_bytes as u64,
    };
    if !question.blocking && bytes <= inline_bytes {
        let (limit_bytes, handover_ns) = (inline_bytes, profile.handover_ns);
        return Some(Reason::QuickerThanHandOver { limit_bytes, handover_ns });
    }
    None
}

/// The cheapest engine that can do it; the first of equals.
fn choose_engine(facts: &Facts, question: &Question) -> Option<usize> {
    let is_able = |engine: &EngineFacts| {
        let capabilities = &engine.capabilities;
        engine.channels > 0
            && capabilities.operations.contains(question.operation)
            && capabilities.memory.contains(question.source_memory)
            && capabilities.memory.contains(question.target_memory)
    };
    // Most ferries have one engine, and most transfers are too short for a comparison.
    if let [only] = &facts.engines[..] {
        return is_able(only).then_some(0);
    }
    let able = facts.engines.iter().enumerate().filter(|(_, engine)| is_able(engine));
    let estimate = |engine: &EngineFacts| engine.cost.estimate_ns(question.bytes);
    able.min_by(|(_, a), (_, b)| estimate(a).total_cmp(&estimate(b))).map(|(index, _)| index)
}

fn plan_for_engine(facts: &Facts, question: &Question, engine: usize) -> Plan {
    let bytes = question.bytes;
    let chosen = &facts.engines[engine];
    let largest_chunk = (facts.profile.chunk_bytes as u64).max(PAGE);
    if !chosen.capabilities.claims_chunks {
        return if question.operation == Operation::Move {
            let kernel = kernel(&facts.profile, question, 1);
            Plan { path: Path::Whole { engine }, kernel, reason: Reason::Overlapping }
        } else {
            let path = Path::Parts { engine, chunk_bytes: largest_chunk };
            let kernel = kernel(&facts.profile, question, 1);
            let pinned = chosen.capabilities.registration == Registration::ByMemoryLayer;
            let reason = if pinned { Reason::CutAndPinned } else { Reason::CutForEngine };
            Plan { path, kernel, reason }
        };
    }
    let helper = u64::from(question.blocking && !question.spare_caller);
    if question.operation == Operation::Move || bytes <= WHOLE_BYTES {
        let reason = match question.operation {
            Operation::Move => Reason::Overlapping,
            _ => Reason::OneDescriptorSuffices { limit_bytes: WHOLE_BYTES },
        };
        let kernel = kernel(&facts.profile, question, 1);
        return Plan { path: Path::Whole { engine }, kernel, reason };
    }
    let most = chosen.channels.min(facts.spread).max(1) as u64;
    let channels = most.min(bytes.div_ceil(SMALLEST_CHUNK)).max(1);
    let parties = channels + helper;
    let chunk_bytes = bytes
        .div_ceil((channels + 1) * CHUNKS_PER_PARTY)
        .next_multiple_of(PAGE)
        .clamp(SMALLEST_CHUNK.min(largest_chunk), largest_chunk);
    Plan {
        path: Path::Chunks { engine, chunk_bytes, channels: channels as usize },
        kernel: kernel(&facts.profile, question, parties),
        reason: Reason::Shared { parties, blocking: question.blocking },
    }
}

/// How many sleeping channels it pays to wake for so many bytes: the caller's time for waking them
/// should be small beside the time that the copy takes, and very small if the caller goes on.
pub fn worth_waking(profile: &Profile, bytes: u64, blocking: bool) -> usize {
    let small_beside = if blocking { 8.0 } else { 32.0 };
    let alone = if bytes < profile.stream_bytes as u64 {
        profile.cached_gb_per_s
    } else {
        profile.stream_gb_per_s
    };
    (bytes as f64 / alone / (small_beside * profile.wake_ns)) as usize
}

/// Through the caches or around them.
fn kernel(profile: &Profile, question: &Question, parties: u64) -> Kernel {
    /// Cold data streams from here on: below, a copy is over before it disturbs anything.
    const COLD_STREAM_BYTES: u64 = 256 << 10;
    let measured = if parties > 1 { profile.shared_stream_bytes } else { profile.stream_bytes };
    let from = match question.temperature {
        _ if question.spare_caller => COLD_STREAM_BYTES.min(measured as u64),
        Temperature::Unknown => measured as u64,
        Temperature::Hot => 2 * measured as u64,
        Temperature::Cold => COLD_STREAM_BYTES.min(measured as u64),
    };
    if question.bytes >= from { Kernel::Stream(profile.streaming) } else { Kernel::Cached }
}

#[cfg(test)]
mod tests;
