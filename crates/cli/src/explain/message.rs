//! `memferry explain --message SIZE`: which path a message takes, for every kind of memory, cores
//! and permission that there is, with the cost of each path and where the limits come from.

mod text;

use memferry::engine::saved::Origin;
use memferry::message::Builder;
use memferry::message::plan::{self, Closeness, Ends, Facts, PathKind, Question, Way};
use memferry::sys::affinity;
use serde::Serialize;

use crate::show::{self, Paint};

/// Everything `memferry explain --message SIZE --json` prints.
#[derive(Debug, Serialize)]
struct Explanation {
    bytes: u64,
    /// Cores that two processes which talk to each other leave free.
    spare_cores: usize,
    cases: Vec<Case>,
    lines: Vec<Line>,
    limits: Vec<Limit>,
    costs: Vec<Cost>,
    /// Where the costs come from.
    profile: String,
    /// `MEMFERRY_CMA=off` is set: nothing is permitted.
    switched_off: bool,
}

/// What would be done with a message in one situation.
#[derive(Debug, Serialize)]
struct Case {
    memory: Memory,
    /// Whether the processes may read and write each other's memory.
    permitted: bool,
    cores: &'static str,
    path: &'static str,
    reason: String,
    estimate_us: Option<f64>,
    /// What is brought in before it is copied, and why.
    brings_in: String,
    /// The same where the target is not in memory: never touched, discarded or swapped out.
    if_absent: IfAbsent,
}

/// What would be done with a message whose target is not in memory.
#[derive(Debug, Serialize)]
struct IfAbsent {
    path: &'static str,
    reason: String,
    brings_in: String,
}

/// What the message lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Memory {
    /// Anything.
    Ordinary,
    /// Memferry's own, which the other side maps.
    Shareable,
}

impl Memory {
    fn way(self) -> Way {
        match self {
            Self::Ordinary => Way::Cross,
            Self::Shareable => Way::Near,
        }
    }
}

/// The cost of one path. What is not there is not known to the planner of messages.
#[derive(Debug, Serialize)]
struct Line {
    cores: &'static str,
    memory: Memory,
    path: &'static str,
    startup_ns: Option<f64>,
    gb_per_s: Option<f64>,
    estimate_us: Option<f64>,
}

/// Where one path ends and the next begins.
#[derive(Debug, Serialize)]
struct Limit {
    cores: &'static str,
    name: &'static str,
    bytes: u64,
    origin: String,
}

/// A value that lines are made of.
#[derive(Debug, Serialize)]
struct Cost {
    cores: &'static str,
    name: &'static str,
    value: f64,
    measured: bool,
}

/// Explains a message, as text or as JSON.
pub(crate) fn run(bytes: u64, json: bool) -> anyhow::Result<()> {
    let cores = affinity::allowed_cores();
    let has_far = Closeness::Apart.pair_of(&cores).is_some();
    let kinds = if has_far { &Closeness::ALL[..] } else { &Closeness::ALL[..1] };
    // As endpoints count them: two processes, and channels only where this one may run.
    let spare = affinity::online_cores().saturating_sub(2).min(cores.len().saturating_sub(1));
    let mut explanation = explain(&Builder::new().facts()?, bytes, kinds, spare);
    explanation.switched_off = std::env::var_os("MEMFERRY_CMA").is_some_and(|word| word == "off");
    if json {
        return show::print_json(&explanation);
    }
    Ok(show::print(&text::render(&explanation, Paint::for_stdout()))?)
}

fn explain(facts: &Facts, bytes: u64, kinds: &[Closeness], spare_cores: usize) -> Explanation {
    let (mut cases, mut lines, mut limits, mut costs) = (vec![], vec![], vec![], vec![]);
    for &closeness in kinds {
        cases.extend(cases_of(facts, bytes, closeness, spare_cores));
        lines.extend(lines_of(facts, bytes, closeness));
        limits.extend(limits_of(facts, closeness));
        costs.extend(costs_of(facts, closeness));
    }
    let profile = match &facts.profile.origin {
        Origin::Measured => "measured just now".into(),
        Origin::Saved(path) => format!("from {}", path.display()),
        Origin::BuiltIn => "not measured: built-in values".into(),
        Origin::NotKept(why) => format!("built-in values: measured and not kept, because {why}"),
    };
    let switched_off = false;
    Explanation { bytes, spare_cores, cases, lines, limits, costs, profile, switched_off }
}

fn cases_of(
    facts: &Facts,
    bytes: u64,
    closeness: Closeness,
    spare_cores: usize,
) -> impl Iterator<Item = Case> {
    let situations = [
        (Memory::Ordinary, true),
        (Memory::Shareable, true),
        (Memory::Ordinary, false),
        (Memory::Shareable, false),
    ];
    situations.into_iter().map(move |(memory, permitted)| {
        // What is mapped needs no permission.
        let way = match (memory, permitted) {
            (Memory::Ordinary, false) => Way::None,
            _ => memory.way(),
        };
        let (receiver_reads, sender_writes, sender_is_busy) = (way, way, false);
        let question = Question {
            bytes,
            receiver_reads,
            sender_writes,
            closeness,
            spare_cores,
            sender_is_busy,
            absent: Ends::default(),
        };
        let plan = plan::message(facts, &question, permitted);
        let absent = Ends { source: false, target: true };
        let fresh = plan::message(facts, &Question { absent, ..question }, permitted);
        let line = facts.profile.lines(closeness).of(plan.path, way);
        Case {
            memory,
            permitted,
            cores: closeness.name(),
            path: plan.path.name(),
            reason: plan.reason.to_string(),
            estimate_us: line.map(|line| line.estimate_ns(bytes) / 1000.0),
            brings_in: plan.populating.reason.to_string(),
            if_absent: IfAbsent {
                path: fresh.path.name(),
                reason: fresh.reason.to_string(),
                brings_in: fresh.populating.reason.to_string(),
            },
        }
    })
}

fn lines_of(facts: &Facts, bytes: u64, closeness: Closeness) -> impl Iterator<Item = Line> {
    let lines = facts.profile.lines(closeness);
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
        let line = lines.of(path, memory.way());
        // A cell holds no more.
        let fits = path != PathKind::Inline || bytes <= plan::INLINE_LIMIT;
        Line {
            cores: closeness.name(),
            memory,
            path: path.name(),
            startup_ns: line.map(|line| line.startup_ns),
            gb_per_s: line.map(|line| line.gb_per_s()).filter(|speed| speed.is_finite()),
            estimate_us: line.filter(|_| fits).map(|line| line.estimate_ns(bytes) / 1000.0),
        }
    })
}

fn limits_of(facts: &Facts, closeness: Closeness) -> Vec<Limit> {
    let limit =
        |name, bytes, origin: String| Limit { cores: closeness.name(), name, bytes, origin };
    let costs = match facts.profile.measured(closeness).is_empty() {
        true => "where two lines with built-in costs cross",
        false => "where two measured lines cross",
    };
    let set = |variable: &str, by_hand: Option<u64>, otherwise: &str| match by_hand {
        Some(_) => format!("set by {variable}"),
        None => otherwise.to_owned(),
    };
    let (hand, eager) = (&facts.limits, plan::eager_limit);
    let cooperative = |way| plan::cooperative_limit(facts, closeness, way);
    let bounded = |way| {
        let lines = facts.profile.lines(closeness);
        let crossing = plan::lines::crossing(lines.single(way), lines.together(way));
        if crossing < cooperative(way) { "two chunks of the smallest size" } else { costs }
    };
    let eager_origin = set("MEMFERRY_EAGER_BYTES", hand.eager_bytes, costs);
    let together = |way| set("MEMFERRY_COOPERATIVE_BYTES", hand.cooperative_bytes, bounded(way));
    // The sender takes every receiver as near.
    let near = Closeness::SharedCache;
    let mut limits = Vec::new();
    if closeness == near {
        limits.extend([
            limit("inline up to", plan::INLINE_LIMIT, "what a cell of the ring holds".into()),
            limit("eager up to", eager(facts, near, true), eager_origin.clone()),
            limit("eager, not permitted, up to", eager(facts, near, false), eager_origin),
        ]);
    }
    limits.extend([
        limit("cooperative from", cooperative(Way::Cross), together(Way::Cross)),
        limit("cooperative, shareable, from", cooperative(Way::Near), together(Way::Near)),
    ]);
    if closeness == near {
        let origin = set("MEMFERRY_OFFLOAD_BYTES", hand.offload_bytes, "the second-level cache");
        limits.push(limit("offload, shareable, from", plan::offload_limit(facts), origin));
    }
    limits
}

fn costs_of(facts: &Facts, closeness: Closeness) -> impl Iterator<Item = Cost> {
    let measured = facts.profile.measured(closeness);
    let values = measured.costs(closeness).values().into_iter().zip(measured.values());
    plan::Costs::NAMES.into_iter().zip(values).map(move |(name, (value, measured))| Cost {
        cores: closeness.name(),
        name,
        value,
        measured: measured.is_some(),
    })
}

#[cfg(test)]
mod tests;
