//! Deciding how a request is carried out: pure functions from facts to a choice with its reason.
//!
//! The same question always gets the same answer, nothing is measured and nothing is touched here,
//! so `memferry explain` can print what would happen without doing it.

mod preparing;
mod reason;

use memferry_engine::contract::{Acquaintance, Direction, Preparation, Registration};
use memferry_engine::cpu::Profile;
use memferry_engine::{Capabilities, CostLine, Engine, Kernel, MemoryKind, Operation};

pub use reason::Reason;

use crate::request::Temperature;

/// Asynchronous transfers up to this size are one descriptor; larger ones are chunks that can be
/// claimed, which costs one more cache line but lets a waiting caller help.
pub(crate) const WHOLE_BYTES: u64 = 16 << 10;
/// Memory of smaller transfers is not remembered by engines that register it: unmapping watched memory
/// costs time.
pub const REMEMBERED_BYTES: u64 = 1 << 20;
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
    /// What it costs, for each direction.
    pub costs: Costs,
    /// What making memory ready costs, if it registers memory itself.
    pub preparation: Option<Preparation>,
    /// How many channels are open.
    pub channels: usize,
}

impl EngineFacts {
    /// Whether it is a device, and not processors: those reach all memory as it is.
    pub fn is_device(&self) -> bool {
        self.capabilities.registration != Registration::NotNeeded
    }
}

/// What an engine costs, for each direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs([[CostLine; 2]; 2]);

impl Costs {
    /// The costs of an engine.
    pub fn measured(engine: &dyn Engine) -> Self {
        use MemoryKind::{Device, Host};
        let row = |source| [Host, Device].map(|target| engine.cost(Direction { source, target }));
        Self([row(Host), row(Device)])
    }

    /// The same for all directions.
    pub fn uniform(line: CostLine) -> Self {
        Self([[line; 2]; 2])
    }

    /// The cost of one direction.
    pub fn of(&self, source: MemoryKind, target: MemoryKind) -> CostLine {
        self.0[source as usize][target as usize]
    }
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
    /// What engines that register memory know of it, of the lesser known side.
    pub acquaintance: Acquaintance,
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
            acquaintance: Acquaintance::New,
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
    /// Chunks that channels of two engines, and a waiting caller, claim: each as many as it is
    /// quick.
    Split {
        /// Which engine.
        engine: usize,
        /// Which engine of processors.
        processors: usize,
        /// How large a chunk is. The first engine claims many at a time.
        chunk_bytes: u64,
        /// How many channels of processors are invited at most.
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

impl Path {
    /// The engine that it is given to, or given to first; `None` if the caller carries it out.
    pub fn engine(&self) -> Option<usize> {
        match *self {
            Self::Caller => None,
            Self::Whole { engine }
            | Self::Chunks { engine, .. }
            | Self::Split { engine, .. }
            | Self::Parts { engine, .. } => Some(engine),
        }
    }
}

/// A decision and its reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Who carries it out.
    pub path: Path,
    /// How a processor moves the bytes.
    pub kernel: Kernel,
    /// Whether memory that is not registered stays so.
    pub passing: bool,
    /// Why.
    pub reason: Reason,
}

impl Plan {
    fn new(path: Path, kernel: Kernel, reason: Reason) -> Self {
        Self { path, kernel, passing: false, reason }
    }
}

/// Decides. `None`: no engine can do this.
pub fn plan(facts: &Facts, question: &Question) -> Option<Plan> {
    let profile = &facts.profile;
    if question.bytes == 0 {
        return Some(Plan::new(Path::Caller, Kernel::Cached, Reason::NothingToMove));
    }
    if question.is_host_only()
        && let Some(reason) = caller_reason(profile, question)
    {
        let kernel = kernel(profile, question, 1);
        return Some(Plan::new(Path::Caller, kernel, reason));
    }
    let Some(engine) = choose_engine(facts, question) else {
        // A processor can do everything on ordinary memory.
        return question.is_host_only().then(|| {
            let kernel = kernel(profile, question, 1);
            Plan::new(Path::Caller, kernel, Reason::NoEngineKnowsOperation)
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
    let cost = |engine: &EngineFacts| cost_ns(facts, engine, question);
    able.min_by(|(_, a), (_, b)| cost(a).total_cmp(&cost(b))).map(|(index, _)| index)
}

/// What a request is expected to take if it is given to an engine.
pub fn estimate_ns(facts: &Facts, engine: &EngineFacts, question: &Question) -> f64 {
    if let Some(best) = preparing::best_use(engine, question) {
        return best.estimate_ns;
    }
    let line = engine.costs.of(question.source_memory, question.target_memory);
    if !engine.capabilities.claims_chunks || question.bytes <= WHOLE_BYTES {
        return line.estimate_ns(question.bytes);
    }
    // Several parties share it: each adds what the second of two was measured to add.
    let helper = usize::from(question.blocking && !question.spare_caller);
    let parties = engine.channels.min(facts.spread) + helper;
    let profile = &facts.profile;
    let added = (profile.pair_stream_gb_per_s / profile.stream_gb_per_s - 1.0).max(0.0);
    let speed_up = 1.0 + added * (parties.max(1) - 1) as f64;
    line.startup_ns + line.ns_per_byte * question.bytes as f64 / speed_up
}

/// What a request costs if it is given to an engine: its time, and where it is processors' time,
/// twice that. They have something better to do while a device is nearly as quick.
fn cost_ns(facts: &Facts, engine: &EngineFacts, question: &Question) -> f64 {
    let factor = if engine.is_device() { 1.0 } else { 2.0 };
    factor * estimate_ns(facts, engine, question)
}

fn plan_for_engine(facts: &Facts, question: &Question, engine: usize) -> Plan {
    let bytes = question.bytes;
    let chosen = &facts.engines[engine];
    if let Some(best) = preparing::best_use(chosen, question) {
        return preparing::plan(facts, question, engine, best);
    }
    let largest_chunk = (facts.profile.chunk_bytes as u64).max(PAGE);
    if !chosen.capabilities.claims_chunks {
        return if question.operation == Operation::Move {
            let kernel = kernel(&facts.profile, question, 1);
            Plan::new(Path::Whole { engine }, kernel, Reason::Overlapping)
        } else {
            let path = Path::Parts { engine, chunk_bytes: largest_chunk };
            let kernel = kernel(&facts.profile, question, 1);
            let pinned = chosen.capabilities.registration == Registration::ByMemoryLayer;
            let reason = if pinned { Reason::CutAndPinned } else { Reason::CutForEngine };
            Plan::new(path, kernel, reason)
        };
    }
    let helper = u64::from(question.blocking && !question.spare_caller);
    if question.operation == Operation::Move || bytes <= WHOLE_BYTES {
        let reason = match question.operation {
            Operation::Move => Reason::Overlapping,
            _ => Reason::OneDescriptorSuffices { limit_bytes: WHOLE_BYTES },
        };
        let kernel = kernel(&facts.profile, question, 1);
        return Plan::new(Path::Whole { engine }, kernel, reason);
    }
    let most = chosen.channels.min(facts.spread).max(1) as u64;
    let channels = most.min(bytes.div_ceil(SMALLEST_CHUNK)).max(1);
    let parties = channels + helper;
    let chunk_bytes = bytes
        .div_ceil((channels + 1) * CHUNKS_PER_PARTY)
        .next_multiple_of(PAGE)
        .clamp(SMALLEST_CHUNK.min(largest_chunk), largest_chunk);
    Plan::new(
        Path::Chunks { engine, chunk_bytes, channels: channels as usize },
        kernel(&facts.profile, question, parties),
        Reason::Shared { parties, blocking: question.blocking },
    )
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
