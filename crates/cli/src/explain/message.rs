//! `memferry explain --message SIZE` prints which path a message takes, for every kind of memory,
//! pair of cores and permission, with the cost of each path and the origin of the limits.

mod text;

use memferry::engine::runtime::profile_store::ProfileOrigin;
use memferry::message::EndpointBuilder;
use memferry::message::plan::{
    self, AccessMethod, BufferEnds, Locality, MessagePlanContext, MessageQuery, PathKind,
};
use memferry::sys::affinity;
use serde::Serialize;

use crate::show::{self, Paint};

/// The object that `memferry explain --message SIZE --json` prints.
#[derive(Debug, Serialize)]
struct Explanation {
    bytes: u64,
    /// The cores that remain beside two processes that exchange messages.
    spare_cores: usize,
    cases: Vec<Case>,
    lines: Vec<PathCost>,
    limits: Vec<PathLimit>,
    costs: Vec<CostValue>,
    /// The origin of the costs.
    profile: String,
    /// Whether `MEMFERRY_CMA=off` is set, which denies all cross-memory access.
    switched_off: bool,
}

/// The plan for a message in one situation.
#[derive(Debug, Serialize)]
struct Case {
    memory: Memory,
    /// Whether the processes may read and write each other's memory.
    permitted: bool,
    cores: &'static str,
    path: &'static str,
    reason: String,
    estimate_us: Option<f64>,
    /// What is prefaulted before the copy, and why.
    prefault: String,
    /// The plan if the target is not resident: never touched, discarded or swapped out.
    if_absent: IfNotResident,
    /// The plan if the receive was posted ahead, by a call that does not wait for it, and the sender has had
    /// time to copy such messages.
    if_ahead: IfAhead,
}

/// The plan for a message whose receive was posted ahead.
#[derive(Debug, Serialize)]
struct IfAhead {
    path: &'static str,
    reason: String,
}

/// The plan for a message whose target is not resident.
#[derive(Debug, Serialize)]
struct IfNotResident {
    path: &'static str,
    reason: String,
    prefault: String,
}

/// The memory of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Memory {
    /// Ordinary memory.
    Ordinary,
    /// A shareable buffer, which the peer maps.
    Shareable,
}

impl Memory {
    fn access_method(self) -> AccessMethod {
        match self {
            Self::Ordinary => AccessMethod::CrossMemory,
            Self::Shareable => AccessMethod::Mapped,
        }
    }
}

/// The cost of one path. `None` stands for a value that the planner does not know.
#[derive(Debug, Serialize)]
struct PathCost {
    cores: &'static str,
    memory: Memory,
    path: &'static str,
    startup_ns: Option<f64>,
    gb_per_s: Option<f64>,
    estimate_us: Option<f64>,
}

/// The size from which, or up to which, a path is used.
#[derive(Debug, Serialize)]
struct PathLimit {
    cores: &'static str,
    name: &'static str,
    bytes: u64,
    origin: String,
}

/// A measured value from which the costs of paths are calculated.
#[derive(Debug, Serialize)]
struct CostValue {
    cores: &'static str,
    name: &'static str,
    value: f64,
    measured: bool,
}

/// Explains a message, as text or as JSON.
pub(crate) fn run(bytes: u64, json: bool) -> anyhow::Result<()> {
    let cores = affinity::allowed_cores();
    let has_far = Locality::SeparateCache.pair_of(&cores).is_some();
    let kinds = if has_far { &Locality::ALL[..] } else { &Locality::ALL[..1] };
    // Endpoints count spare cores in the same way: two processes occupy a core each, and channels
    // run only on cores that this process may use.
    let spare = affinity::online_cores().saturating_sub(2).min(cores.len().saturating_sub(1));
    let mut explanation = explain(&EndpointBuilder::new().plan_context()?, bytes, kinds, spare);
    explanation.switched_off = memferry_sys::settings::is_switched_off("MEMFERRY_CMA");
    if json {
        return show::print_json(&explanation);
    }
    Ok(show::print(&text::render(&explanation, Paint::for_stdout()))?)
}

fn explain(
    facts: &MessagePlanContext,
    bytes: u64,
    kinds: &[Locality],
    spare_cores: usize,
) -> Explanation {
    let (mut cases, mut lines, mut limits, mut costs) = (vec![], vec![], vec![], vec![]);
    for &closeness in kinds {
        cases.extend(cases_of(facts, bytes, closeness, spare_cores));
        lines.extend(lines_of(facts, bytes, closeness));
        limits.extend(limits_of(facts, closeness));
        costs.extend(costs_of(facts, closeness));
    }
    let profile = match &facts.profile.origin {
        ProfileOrigin::Measured => "measured just now".into(),
        ProfileOrigin::Saved(path) => format!("from {}", path.display()),
        ProfileOrigin::BuiltIn => "not measured: built-in values".into(),
        ProfileOrigin::Rejected(why) => {
            format!("built-in values: measured and not kept, because {why}")
        }
    };
    let switched_off = false;
    Explanation { bytes, spare_cores, cases, lines, limits, costs, profile, switched_off }
}

fn cases_of(
    facts: &MessagePlanContext,
    bytes: u64,
    closeness: Locality,
    spare_cores: usize,
) -> impl Iterator<Item = Case> {
    let situations = [
        (Memory::Ordinary, true),
        (Memory::Shareable, true),
        (Memory::Ordinary, false),
        (Memory::Shareable, false),
    ];
    situations.into_iter().map(move |(memory, permitted)| {
        // Mapped memory needs no permission.
        let way = match (memory, permitted) {
            (Memory::Ordinary, false) => AccessMethod::None,
            _ => memory.access_method(),
        };
        let (receiver_reads, sender_writes, sender_is_busy) = (way, way, false);
        let question = MessageQuery {
            bytes,
            receiver_access: receiver_reads,
            sender_access: sender_writes,
            locality: closeness,
            spare_cores,
            sender_is_busy,
            is_ahead: false,
            nonresident: BufferEnds::default(),
        };
        let plan = plan::message(facts, &question, permitted);
        let absent = BufferEnds { source: false, target: true };
        let fresh =
            plan::message(facts, &MessageQuery { nonresident: absent, ..question }, permitted);
        let ahead = plan::message(facts, &MessageQuery { is_ahead: true, ..question }, permitted);
        let line = facts.profile.path_costs(closeness).of(plan.path, way);
        Case {
            memory,
            permitted,
            cores: closeness.name(),
            path: plan.path.name(),
            reason: plan.reason.to_string(),
            estimate_us: line.map(|line| line.estimate_ns(bytes) / 1000.0),
            prefault: plan.prefault.reason.to_string(),
            if_absent: IfNotResident {
                path: fresh.path.name(),
                reason: fresh.reason.to_string(),
                prefault: fresh.prefault.reason.to_string(),
            },
            if_ahead: IfAhead { path: ahead.path.name(), reason: ahead.reason.to_string() },
        }
    })
}

fn lines_of(
    facts: &MessagePlanContext,
    bytes: u64,
    closeness: Locality,
) -> impl Iterator<Item = PathCost> {
    let lines = facts.profile.path_costs(closeness);
    let paths = PathKind::ALL.into_iter().flat_map(|path| {
        let mapped = matches!(path, PathKind::Single | PathKind::Cooperative);
        let memory: &[Memory] = match path {
            PathKind::Offload => &[Memory::Shareable],
            _ if mapped => &[Memory::Ordinary, Memory::Shareable],
            _ => &[Memory::Ordinary],
        };
        memory.iter().map(move |&memory| (path, memory))
    });
    paths.map(move |(path, memory)| {
        let line = lines.of(path, memory.access_method());
        // An inline message fits into one cell.
        let fits = path != PathKind::Inline || bytes <= plan::INLINE_LIMIT;
        PathCost {
            cores: closeness.name(),
            memory,
            path: path.name(),
            startup_ns: line.map(|line| line.startup_ns),
            gb_per_s: line.map(|line| line.gb_per_s()).filter(|speed| speed.is_finite()),
            estimate_us: line.filter(|_| fits).map(|line| line.estimate_ns(bytes) / 1000.0),
        }
    })
}

fn limits_of(facts: &MessagePlanContext, closeness: Locality) -> Vec<PathLimit> {
    let limit =
        |name, bytes, origin: String| PathLimit { cores: closeness.name(), name, bytes, origin };
    let costs = match facts.profile.measured(closeness).is_empty() {
        true => "where two lines with built-in costs cross",
        false => "where two measured lines cross",
    };
    let set = |variable: &str, by_hand: Option<u64>, otherwise: &str| match by_hand {
        Some(_) => format!("set by {variable}"),
        None => otherwise.to_owned(),
    };
    let (hand, eager) = (&facts.thresholds, plan::eager_limit);
    let cooperative = |way| plan::cooperative_limit(facts, closeness, way);
    let bounded = |way| {
        let lines = facts.profile.path_costs(closeness);
        let crossing = plan::path_costs::crossover(lines.single(way), lines.cooperative(way));
        if crossing < cooperative(way) { "two chunks of the smallest size" } else { costs }
    };
    let eager_origin = set("MEMFERRY_EAGER_BYTES", hand.eager_bytes, costs);
    let together = |way| set("MEMFERRY_COOPERATIVE_BYTES", hand.cooperative_bytes, bounded(way));
    // The sender assumes that every receiver shares its cache.
    let near = Locality::SharedCache;
    let mut limits = Vec::new();
    if closeness == near {
        limits.extend([
            limit("inline up to", plan::INLINE_LIMIT, "what a cell of the ring holds".into()),
            limit("eager up to", eager(facts, near, true), eager_origin.clone()),
            limit("eager, not permitted, up to", eager(facts, near, false), eager_origin),
        ]);
    }
    limits.extend([
        limit(
            "cooperative from",
            cooperative(AccessMethod::CrossMemory),
            together(AccessMethod::CrossMemory),
        ),
        limit(
            "cooperative, shareable, from",
            cooperative(AccessMethod::Mapped),
            together(AccessMethod::Mapped),
        ),
    ]);
    if closeness == near {
        let origin = set("MEMFERRY_OFFLOAD_BYTES", hand.offload_bytes, "the second-level cache");
        limits.push(limit("offload, shareable, from", plan::offload_limit(facts), origin));
    }
    limits
}

fn costs_of(facts: &MessagePlanContext, closeness: Locality) -> impl Iterator<Item = CostValue> {
    let measured = facts.profile.measured(closeness);
    let values = measured.costs(closeness).values().into_iter().zip(measured.values());
    plan::CorePairCosts::NAMES.into_iter().zip(values).map(move |(name, (value, measured))| {
        CostValue { cores: closeness.name(), name, value, measured: measured.is_some() }
    })
}

#[cfg(test)]
mod tests;
