//! The planner: pure functions from a context and a query to a plan with its reason.
//!
//! The same query always gets the same plan. The planner measures nothing and has no side effects,
//! so `memferry explain` can print a plan without executing it.

mod fixed_limits;
mod limits;
mod reason;
mod registration;

use memferry_engine::contract::{
    CopyDirection, RegistrationCosts, RegistrationMode, ReuseHint, TuningFact,
};
use memferry_engine::cpu::CpuProfile;
use memferry_engine::{Capabilities, CostLine, Engine, Kernel, MemoryKind, Opcode};

pub use fixed_limits::{FIXED_LIMITS, FixedLimit};
pub(crate) use limits::{
    ALWAYS_INLINE_BYTES, ALWAYS_SHARED_BYTES, MAX_CALLER_BYTES, SINGLE_DESCRIPTOR_BYTES,
    STREAM_SEGMENT_BYTES, worth_waking_at,
};
use limits::{COLD_STREAM_BYTES, MIN_CHUNK, MIN_SHARE};
pub use limits::{max_backlog_bytes, placed_bytes, worth_waking};
pub use reason::CopyReason;

use crate::error::ValidationError;
use crate::request::CacheHint;
use memferry_sys::stats::kinds::CopyPath;

/// Minimum size in bytes of transfers whose memory engines record for reuse: unmapping monitored
/// memory costs time.
pub const MIN_TRACKED_BYTES: u64 = 1 << 20;
/// The chunks of a shared transfer for each thread that may claim them.
const CHUNKS_PER_PARTY: u64 = 4;
/// Maximum size in bytes of a chunk that a device copies by one descriptor: a device takes tens of
/// microseconds for it, and then progress is visible.
pub(crate) const MAX_DEVICE_CHUNK: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Approximate ratio of the cached copy speed, at which the limit of inline copies was measured, to the
/// copy speed from memory.
const COLD_FACTOR: u64 = 8;

/// The planner's view of an engine.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::EngineSummary;
///
/// let ferry = Ferry::new()?;
/// let engines: &[EngineSummary] = &ferry.plan_context().engines;
/// assert!(engines.iter().any(|engine| engine.name == "cpu" && !engine.is_device()));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct EngineSummary {
    /// The engine's name.
    pub name: String,
    /// The names of its devices.
    pub devices: Vec<String>,
    /// The engine's capabilities.
    pub capabilities: Capabilities,
    /// The cost line of each direction.
    pub costs: DirectionCosts,
    /// The registration costs, if the engine registers memory itself.
    pub registration_costs: Option<RegistrationCosts>,
    /// The number of open channels.
    pub channels: usize,
    /// The values by which the engine is tuned, with their reasons.
    pub tuning: Vec<TuningFact>,
}

impl EngineSummary {
    /// Returns whether the engine is a device. Processors access all host memory without
    /// registration, and make progress by threads of their own.
    pub fn is_device(&self) -> bool {
        self.capabilities.registration != RegistrationMode::NotRequired
            || !self.capabilities.auto_progress
    }

    /// Returns the size in bytes of the chunks of a transfer in fixed parts. Descriptors end at chunks,
    /// so those of a device that pages do not limit are as long as its descriptors may be.
    fn part_chunk_bytes(&self, largest_chunk: u64) -> u64 {
        // An engine without a limit of its own, such as a wrapped processor, gains nothing by it.
        let limit = self.capabilities.max_descriptor_bytes;
        if !self.is_device() || self.capabilities.boundary_bytes.is_some() || limit == usize::MAX {
            return largest_chunk;
        }
        largest_chunk.max(MAX_DEVICE_CHUNK.min(limit as u64))
    }
}

/// The cost lines of an engine, one for each direction.
///
/// ```
/// use memferry::MemoryKind;
/// use memferry::engine::CostLine;
/// use memferry::plan::DirectionCosts;
///
/// let costs = DirectionCosts::uniform(CostLine::from_bandwidth(1000.0, 10.0));
/// assert_eq!(costs.of(MemoryKind::Host, MemoryKind::Device).startup_ns, 1000.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DirectionCosts([[CostLine; 2]; 2]);

impl DirectionCosts {
    /// Returns the measured costs of an engine.
    pub fn measured(engine: &dyn Engine) -> Self {
        use MemoryKind::{Device, Host};
        let row =
            |source| [Host, Device].map(|target| engine.cost(CopyDirection { source, target }));
        Self([row(Host), row(Device)])
    }

    /// Returns the same cost line for all directions.
    pub fn uniform(line: CostLine) -> Self {
        Self([[line; 2]; 2])
    }

    /// Returns the cost line of one direction.
    pub fn of(&self, source: MemoryKind, target: MemoryKind) -> CostLine {
        self.0[source as usize][target as usize]
    }
}

/// The input of the planner: machine and settings.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::{CopyPlanContext, CopyQuery, plan};
///
/// let ferry = Ferry::new()?;
/// let context: &CopyPlanContext = ferry.plan_context();
/// assert!(plan(context, &CopyQuery::copy(4 << 20, true)).is_some());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CopyPlanContext {
    /// The measured profile, with the overrides of the builder.
    pub profile: CpuProfile,
    /// The engines; the first one wins among equals.
    pub engines: Vec<EngineSummary>,
    /// The maximum number of channels that share one transfer.
    pub spread: usize,
}

impl CopyPlanContext {
    /// The error of a request for which there is no plan.
    pub fn no_engine(&self, question: &CopyQuery) -> ValidationError {
        let engines: Vec<&str> = self.engines.iter().map(|engine| engine.name.as_str()).collect();
        ValidationError::NoEngine {
            operation: question.operation,
            source_memory: question.source_memory,
            target_memory: question.target_memory,
            engines: if engines.is_empty() { "it has none".to_owned() } else { engines.join(", ") },
        }
    }
}

/// The properties of a request that the plan depends on.
///
/// ```
/// use memferry::plan::CopyQuery;
/// use memferry::{CacheHint, Ferry};
///
/// let query = CopyQuery { cache_hint: CacheHint::Cold, ..CopyQuery::copy(4 << 20, true) };
/// let plan = Ferry::new()?.explain(&query).expect("every engine copies host memory");
/// println!("{:?}: {}", plan.strategy, plan.reason);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct CopyQuery {
    /// The operation.
    pub operation: Opcode,
    /// The length in bytes.
    pub bytes: u64,
    /// Whether the caller waits for completion in the same call.
    pub blocking: bool,
    /// Where the data is expected to be.
    pub cache_hint: CacheHint,
    /// Whether the caller's core and caches stay unused.
    pub no_caller_assist: bool,
    /// The kind of memory of the source.
    pub source_memory: MemoryKind,
    /// The kind of memory of the target.
    pub target_memory: MemoryKind,
    /// The reuse hint of engines that register memory: the lower one of source and target.
    pub reuse: ReuseHint,
}

impl CopyQuery {
    /// Returns the query of a copy in host memory with default options.
    pub fn copy(bytes: u64, blocking: bool) -> Self {
        Self {
            operation: Opcode::Copy,
            bytes,
            blocking,
            cache_hint: CacheHint::Unknown,
            no_caller_assist: false,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
            reuse: ReuseHint::FirstUse,
        }
    }

    fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }
}

/// How a request is executed, and by which engine.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::{CopyQuery, CopyStrategy};
///
/// let plan = Ferry::new()?.explain(&CopyQuery::copy(16, true)).expect("a plan");
/// assert_eq!(plan.strategy, CopyStrategy::Inline); // too small for a channel
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyStrategy {
    /// The caller executes the request inline.
    Inline,
    /// One descriptor on one channel executes the request.
    SingleDescriptor {
        /// The index of the engine.
        engine: usize,
    },
    /// Several channels and a waiting caller claim chunks.
    WorkSharing {
        /// The index of the engine.
        engine: usize,
        /// The chunk size in bytes.
        chunk_bytes: u64,
        /// The maximum number of channels that get a work offer; see [`worth_waking`].
        channels: usize,
    },
    /// Channels of two engines and a waiting caller claim chunks, each as fast as it copies.
    HybridWorkSharing {
        /// The index of the faster engine.
        engine: usize,
        /// The index of the processor engine.
        processors: usize,
        /// The chunk size in bytes. The faster engine claims many chunks at a time.
        chunk_bytes: u64,
        /// The maximum number of processor channels that get a work offer.
        channels: usize,
    },
    /// One channel gets fixed parts within the limits of the engine.
    FixedParts {
        /// The index of the engine.
        engine: usize,
        /// The chunk size in bytes: the granularity of visible progress.
        chunk_bytes: u64,
    },
}

impl CopyStrategy {
    /// Returns the path as which `memferry top` counts it.
    pub(crate) fn counted(&self) -> CopyPath {
        match self {
            Self::Inline => CopyPath::Inline,
            Self::SingleDescriptor { .. } => CopyPath::Single,
            Self::WorkSharing { .. } => CopyPath::Shared,
            Self::HybridWorkSharing { .. } => CopyPath::Hybrid,
            Self::FixedParts { .. } => CopyPath::Parts,
        }
    }

    /// Returns the engine that gets the request, or the faster one of two; `None` if the caller
    /// executes it inline.
    pub fn engine(&self) -> Option<usize> {
        match *self {
            Self::Inline => None,
            Self::SingleDescriptor { engine }
            | Self::WorkSharing { engine, .. }
            | Self::HybridWorkSharing { engine, .. }
            | Self::FixedParts { engine, .. } => Some(engine),
        }
    }
}

/// The plan of a request, with its reason.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::{CopyPlan, CopyQuery};
///
/// let plan: CopyPlan = Ferry::new()?.explain(&CopyQuery::copy(16, true)).expect("a plan");
/// assert_eq!(plan.kernel.name(), "cached");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyPlan {
    /// How the request is executed, and by which engine.
    pub strategy: CopyStrategy,
    /// The inner loop with which a processor copies.
    pub kernel: Kernel,
    /// Whether unregistered memory stays unregistered.
    pub transient: bool,
    /// The reason of the decision.
    pub reason: CopyReason,
}

impl CopyPlan {
    fn new(path: CopyStrategy, kernel: Kernel, reason: CopyReason) -> Self {
        Self { strategy: path, kernel, transient: false, reason }
    }
}

/// Plans a request. Returns `None` if no engine can execute it.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::{CopyQuery, plan};
///
/// let ferry = Ferry::new()?;
/// let found = plan(ferry.plan_context(), &CopyQuery::copy(4 << 20, true)).expect("a plan");
/// println!("{}", found.reason);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn plan(facts: &CopyPlanContext, question: &CopyQuery) -> Option<CopyPlan> {
    let profile = &facts.profile;
    if question.bytes == 0 {
        return Some(CopyPlan::new(
            CopyStrategy::Inline,
            Kernel::Cached,
            CopyReason::NothingToMove,
        ));
    }
    if question.is_host_only()
        && let Some(reason) = caller_reason(profile, question)
    {
        let kernel = kernel(profile, question, 1);
        return Some(CopyPlan::new(CopyStrategy::Inline, kernel, reason));
    }
    let Some(engine) = choose_engine(facts, question) else {
        // The calling processor can execute every operation on host memory.
        return question.is_host_only().then(|| {
            let kernel = kernel(profile, question, 1);
            CopyPlan::new(CopyStrategy::Inline, kernel, CopyReason::NoEngineKnowsOperation)
        });
    };
    Some(plan_for_engine(facts, question, engine))
}

/// Plans a blocking request of host memory that the caller executes alone, because that was measured to
/// be faster.
pub(crate) fn by_caller(facts: &CopyPlanContext, question: &CopyQuery) -> CopyPlan {
    let kernel = kernel(&facts.profile, question, 1);
    CopyPlan::new(CopyStrategy::Inline, kernel, CopyReason::SharingIsSlower)
}

/// Plans a blocking copy of registered host memory that an engine makes without processors, because that was
/// measured to be faster.
pub(crate) fn by_engine(facts: &CopyPlanContext, question: &CopyQuery, engine: usize) -> CopyPlan {
    let alone = CopyQuery { no_caller_assist: true, reuse: ReuseHint::Reused, ..*question };
    plan_for_engine(facts, &alone, engine)
}

/// Returns the reason why the caller executes the request alone, or `None` if an engine gets it.
fn caller_reason(profile: &CpuProfile, question: &CopyQuery) -> Option<CopyReason> {
    let bytes = question.bytes;
    if question.no_caller_assist {
        return None;
    }
    if question.blocking && bytes < profile.split_bytes as u64 {
        let limit_bytes = profile.split_bytes as u64;
        return Some(CopyReason::TooSmallToShare { limit_bytes });
    }
    if question.blocking && question.operation == Opcode::Move {
        return Some(CopyReason::OverlappingAndBlocking);
    }
    let inline_bytes = match question.cache_hint {
        CacheHint::Cold => profile.inline_bytes as u64 / COLD_FACTOR,
        _ => profile.inline_bytes as u64,
    };
    if !question.blocking && bytes <= inline_bytes {
        let (limit_bytes, handover_ns) = (inline_bytes, profile.handover_ns);
        return Some(CopyReason::CheaperThanHandoff { limit_bytes, handover_ns });
    }
    None
}

/// Returns the cheapest engine that can execute the request, the first one among equals.
fn choose_engine(facts: &CopyPlanContext, question: &CopyQuery) -> Option<usize> {
    let is_able = |engine: &EngineSummary| {
        let capabilities = &engine.capabilities;
        engine.channels > 0
            && capabilities.operations.contains(question.operation)
            && capabilities.memory.contains(question.source_memory)
            && capabilities.memory.contains(question.target_memory)
    };
    // Fast path: most ferries have one engine, and most transfers are too short for a comparison of
    // costs.
    if let [only] = &facts.engines[..] {
        return is_able(only).then_some(0);
    }
    let able = facts.engines.iter().enumerate().filter(|(_, engine)| is_able(engine));
    let cost = |engine: &EngineSummary| cost_ns(facts, engine, question);
    able.min_by(|(_, a), (_, b)| cost(a).total_cmp(&cost(b))).map(|(index, _)| index)
}

/// Returns the estimated time in nanoseconds of a request on an engine.
pub fn estimate_ns(facts: &CopyPlanContext, engine: &EngineSummary, question: &CopyQuery) -> f64 {
    if let Some(best) = registration::best_choice(engine, question) {
        return best.estimate_ns;
    }
    let line = engine.costs.of(question.source_memory, question.target_memory);
    if !engine.capabilities.claims_chunks || question.bytes <= SINGLE_DESCRIPTOR_BYTES {
        return line.estimate_ns(question.bytes);
    }
    // Several parties share the copy: each one adds the bandwidth that the second of two added in
    // the measurement.
    let helper = usize::from(question.blocking && !question.no_caller_assist);
    let parties = engine.channels.min(facts.spread) + helper;
    let profile = &facts.profile;
    let added = (profile.pair_stream_gb_per_s / profile.stream_gb_per_s - 1.0).max(0.0);
    let speed_up = 1.0 + added * (parties.max(1) - 1) as f64;
    line.startup_ns + line.ns_per_byte * question.bytes as f64 / speed_up
}

/// Returns the cost of a request on an engine: its estimated time in nanoseconds, doubled for
/// processors, so that a device which is nearly as fast leaves them free.
fn cost_ns(facts: &CopyPlanContext, engine: &EngineSummary, question: &CopyQuery) -> f64 {
    let factor = if engine.is_device() { 1.0 } else { 2.0 };
    factor * estimate_ns(facts, engine, question)
}

fn plan_for_engine(facts: &CopyPlanContext, question: &CopyQuery, engine: usize) -> CopyPlan {
    let bytes = question.bytes;
    let chosen = &facts.engines[engine];
    if let Some(best) = registration::best_choice(chosen, question) {
        return registration::plan(facts, question, engine, best);
    }
    let largest_chunk = (facts.profile.chunk_bytes as u64).max(PAGE);
    if !chosen.capabilities.claims_chunks {
        return if question.operation == Opcode::Move {
            let kernel = kernel(&facts.profile, question, 1);
            CopyPlan::new(
                CopyStrategy::SingleDescriptor { engine },
                kernel,
                CopyReason::Overlapping,
            )
        } else {
            let chunk_bytes = chosen.part_chunk_bytes(largest_chunk);
            let path = CopyStrategy::FixedParts { engine, chunk_bytes };
            let kernel = kernel(&facts.profile, question, 1);
            let pinned = chosen.capabilities.registration == RegistrationMode::BySubmitter;
            let reason = if pinned { CopyReason::PinnedParts } else { CopyReason::FixedParts };
            CopyPlan::new(path, kernel, reason)
        };
    }
    let helper = u64::from(question.blocking && !question.no_caller_assist);
    if question.operation == Opcode::Move || bytes <= SINGLE_DESCRIPTOR_BYTES {
        let reason = match question.operation {
            Opcode::Move => CopyReason::Overlapping,
            _ => CopyReason::OneDescriptorSuffices { limit_bytes: SINGLE_DESCRIPTOR_BYTES },
        };
        let kernel = kernel(&facts.profile, question, 1);
        return CopyPlan::new(CopyStrategy::SingleDescriptor { engine }, kernel, reason);
    }
    let most = chosen.channels.min(facts.spread).max(1) as u64;
    let least = if helper > 0 { MIN_SHARE } else { MIN_CHUNK };
    let channels = most.min(bytes.div_ceil(least)).max(1);
    let parties = channels + helper;
    let chunk_bytes = bytes
        .div_ceil((channels + 1) * CHUNKS_PER_PARTY)
        .next_multiple_of(PAGE)
        .clamp(MIN_CHUNK.min(largest_chunk), largest_chunk);
    CopyPlan::new(
        CopyStrategy::WorkSharing { engine, chunk_bytes, channels: channels as usize },
        kernel(&facts.profile, question, parties),
        CopyReason::WorkSharing { parties, blocking: question.blocking },
    )
}

/// Chooses the kernel: through the caches, or with non-temporal stores.
fn kernel(profile: &CpuProfile, question: &CopyQuery, parties: u64) -> Kernel {
    if question.operation == Opcode::Crc {
        // Nothing is stored.
        return Kernel::Cached;
    }
    let measured = if parties > 1 { profile.shared_stream_bytes } else { profile.stream_bytes };
    let from = match question.cache_hint {
        _ if question.no_caller_assist => COLD_STREAM_BYTES.min(measured as u64),
        CacheHint::Unknown => measured as u64,
        CacheHint::Hot => 2 * measured as u64,
        CacheHint::Cold => COLD_STREAM_BYTES.min(measured as u64),
    };
    if question.bytes >= from { Kernel::Stream(profile.streaming) } else { Kernel::Cached }
}

#[cfg(test)]
mod tests;
