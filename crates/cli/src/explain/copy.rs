//! `memferry explain SIZE` prints which path a copy takes on this machine, why, and the measured
//! values behind the decision. It calls the planner of real copies, and copies nothing.

use anyhow::anyhow;
use memferry::engine::cpu::{CpuProfile, ProfileOrigin, SiblingUse};
use memferry::engine::{Kernel, OpenError};
use memferry::plan::{
    self, CopyPlan, CopyPlanContext, CopyQuery, CopyReason, CopyStrategy, EngineSummary, FixedLimit,
};
use memferry::{BuildError, CacheHint, CudaEngine, Ferry, LearnedValues};
use memferry_bench::results::size;
use memferry_sys::topology::Topology;
use serde::Serialize;

use super::devices::{self, EngineTuning, EngineVerdict, RequestedDevices};
use super::gpu::GpuExplanation;
use super::unused::{self, MachineDevices, UnusedDevice};
use crate::show::{self, Paint};

/// The object that `memferry explain --json` prints.
#[derive(Debug, Serialize)]
struct Explanation {
    bytes: u64,
    temperature: &'static str,
    /// The plan for a blocking copy.
    blocking: Choice,
    /// The plan for an asynchronous copy.
    asynchronous: Choice,
    /// All engines, for the blocking copy.
    engines: Vec<EngineVerdict>,
    /// The devices of this machine that no engine uses, each with the reason.
    unused_devices: Vec<UnusedDevice>,
    /// The values by which engines are tuned, with their reasons.
    tuning: Vec<EngineTuning>,
    measured: Vec<MeasuredValue>,
    /// All limits that are the same on every machine, and those that only the user sets.
    fixed: Vec<MeasuredValue>,
    /// The values that adapt while a program runs, and what they start from.
    adapts: AdaptedStart,
    /// The GPU, if one was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuExplanation>,
}

/// The plan for one request.
#[derive(Debug, Serialize)]
struct Choice {
    path: String,
    /// The devices of the engines that take part.
    devices: Vec<String>,
    kernel: &'static str,
    reason: String,
    estimate_us: f64,
    /// The estimate for people.
    #[serde(skip)]
    estimate: String,
}

/// From which values a ferry starts to learn.
#[derive(Debug, Serialize)]
struct AdaptedStart {
    /// The size up to which the caller copies inline.
    inline_bytes: u64,
    /// The time of a submission of a delivery in ns.
    delivery_submit_ns: u64,
    /// Whether blocking copies are shared while that is measured to be faster.
    shares: bool,
    /// The speed with non-temporal stores that groups of small copies are compared with; `None` without
    /// channels that measure them.
    group_gb_per_s: Option<f64>,
}

impl AdaptedStart {
    fn new(learned: &LearnedValues) -> Self {
        Self {
            inline_bytes: learned.inline_bytes,
            delivery_submit_ns: learned.first_submit_ns,
            shares: learned.shares.is_some(),
            group_gb_per_s: learned.groups.first().map(|group| group.worker.streaming_gb_per_s),
        }
    }

    /// One line of text.
    fn line(&self) -> String {
        let shares = if self.shares { "; sharing always" } else { "" };
        let groups = self.group_gb_per_s.map(|speed| {
            format!(
                "; groups of small copies through the caches (non-temporal stores are taken to reach \
                 {speed:.0} GB/s)"
            )
        });
        let groups = groups.unwrap_or_default();
        format!(
            "    A running ferry adapts these. They start as: inline_bytes {}; submitting a delivery {} \
             ns{shares}{groups}.\n",
            size::format(self.inline_bytes),
            self.delivery_submit_ns
        )
    }
}

/// What is printed, and how.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Output {
    /// One JSON object.
    pub(super) json: bool,
    /// All limits in the text.
    pub(super) all: bool,
}

/// A value that decides about copies.
#[derive(Debug, Serialize)]
pub(super) struct MeasuredValue {
    pub(super) name: &'static str,
    pub(super) value: f64,
    pub(super) text: String,
    pub(super) meaning: &'static str,
}

/// Explains a copy, as text or as JSON.
pub(super) fn run(
    question: CopyQuery,
    gpu: Option<usize>,
    devices: &RequestedDevices,
    output: Output,
) -> anyhow::Result<()> {
    let ferry = devices.select(Ferry::builder()).build();
    let ferry = ferry.map_err(|error| with_context(error, gpu.is_some()))?;
    let device = ferry.engine_as::<CudaEngine>().filter(|_| gpu.is_some());
    let device = device.map(|gpu| GpuExplanation::new(gpu.info(), gpu.profile(), &question));
    let explanation = explain(&ferry, question, devices, &MachineDevices::detect(), device)?;
    if output.json {
        return show::print_json(&explanation);
    }
    Ok(show::print(&render(
        &explanation,
        &origin(ferry.plan_context()),
        output.all,
        Paint::for_stdout(),
    ))?)
}

/// Adds to an error of the GPU, if one was requested, that there is none to explain with.
fn with_context(error: BuildError, has_gpu: bool) -> anyhow::Error {
    let is_of_gpu = matches!(
        &error,
        BuildError::Open(OpenError::System { engine, .. } | OpenError::Exhausted { engine })
            if engine == "cuda"
    );
    let error = anyhow::Error::from(error);
    if !has_gpu || !is_of_gpu {
        return error;
    }
    error.context("no GPU to explain with; `memferry doctor` tells what it needs")
}

fn explain(
    ferry: &Ferry,
    question: CopyQuery,
    devices: &RequestedDevices,
    machine: &MachineDevices,
    gpu: Option<GpuExplanation>,
) -> anyhow::Result<Explanation> {
    let facts = ferry.plan_context();
    let choose = |blocking| {
        let question = CopyQuery { blocking, ..question };
        let plan = ferry.explain(&question);
        let plan = plan.ok_or_else(|| anyhow!("no engine reaches this memory: use --gpu"))?;
        let estimate = Estimate::of_plan(facts, &plan, &question);
        anyhow::Ok(Choice {
            path: path(facts, &plan),
            devices: devices::chosen(facts, &plan).flat_map(|on| on.devices.clone()).collect(),
            kernel: kernel(facts, &plan),
            reason: plan.reason.to_string(),
            estimate_us: estimate.ns / 1000.0,
            estimate: estimate.text(),
        })
    };
    let blocking = CopyQuery { blocking: true, ..question };
    let plan = ferry.explain(&blocking);
    let engines = plan.map(|plan| devices.verdicts(facts, &blocking, &plan)).unwrap_or_default();
    Ok(Explanation {
        engines,
        unused_devices: machine.unused(&facts.engines, devices),
        tuning: EngineTuning::of(facts, devices),
        bytes: question.bytes,
        temperature: match question.cache_hint {
            CacheHint::Unknown => "unknown",
            CacheHint::Hot => "hot",
            CacheHint::Cold => "cold",
        },
        blocking: choose(true)?,
        asynchronous: choose(false)?,
        measured: measured(&facts.profile),
        fixed: fixed(&facts.profile),
        adapts: AdaptedStart::new(&ferry.learned()),
        gpu,
    })
}

fn path(facts: &CopyPlanContext, plan: &CopyPlan) -> String {
    let name = |engine: usize| facts.engines[engine].name.as_str();
    match plan.strategy {
        CopyStrategy::Inline if is_by_driver(plan) => "the caller, by the driver's own copy".into(),
        CopyStrategy::Inline => "the caller, at once".into(),
        CopyStrategy::SingleDescriptor { engine } => {
            format!("engine {}, one descriptor on one channel", name(engine))
        }
        CopyStrategy::WorkSharing { engine, chunk_bytes, channels } => format!(
            "engine {}, chunks of {} claimed by {channels} channel(s)",
            name(engine),
            size::format(chunk_bytes)
        ),
        CopyStrategy::HybridWorkSharing { engine, processors, chunk_bytes, channels } => format!(
            "engine {} and up to {channels} channel(s) of {} claim chunks of {}",
            name(engine),
            name(processors),
            size::format(chunk_bytes)
        ),
        CopyStrategy::FixedParts { engine, .. } => {
            format!("engine {}, fixed parts on one channel", name(engine))
        }
    }
}

/// Whether the caller makes the copy, and the driver of a device moves the bytes.
fn is_by_driver(plan: &CopyPlan) -> bool {
    matches!(plan.reason, CopyReason::ShortDeviceCopy { .. })
}

/// The name of the kernel that the processors use; `none` if a device copies everything.
fn kernel(facts: &CopyPlanContext, plan: &CopyPlan) -> &'static str {
    match plan.strategy {
        CopyStrategy::Inline if is_by_driver(plan) => "none",
        CopyStrategy::SingleDescriptor { engine }
        | CopyStrategy::WorkSharing { engine, .. }
        | CopyStrategy::FixedParts { engine, .. }
            if facts.engines[engine].is_device() =>
        {
            "none"
        }
        _ => plan.kernel.name(),
    }
}

/// The estimated duration of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Estimate {
    pub(super) ns: f64,
    /// Where the data is taken to be; `None` if that makes no difference, as a device copies.
    data: Option<DataPlace>,
}

/// Where an estimate takes the data to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataPlace {
    Cache,
    Memory,
}

impl Estimate {
    /// The estimate of the planner, by which it compares engines: data in no cache.
    pub(super) fn of_engine(
        facts: &CopyPlanContext,
        engine: &EngineSummary,
        question: &CopyQuery,
    ) -> Self {
        let data = (!engine.is_device()).then_some(DataPlace::Memory);
        Self { ns: plan::estimate_ns(facts, engine, question), data }
    }

    /// The estimate of a plan. It is that of the planner, except for what the planner does not estimate:
    /// copies by the caller, and copies by processors that leave the data in the cache.
    pub(super) fn of_plan(facts: &CopyPlanContext, plan: &CopyPlan, question: &CopyQuery) -> Self {
        let alone = |engine: usize| Self::of_engine(facts, &facts.engines[engine], question);
        let engine = match plan.strategy {
            // The driver stages, as fast as one channel, without the hand-over.
            CopyStrategy::Inline if is_by_driver(plan) => {
                let costs = facts.engines.iter().find_map(|engine| engine.registration_costs);
                let ns = costs.map_or(0.0, |costs| costs.staging.estimate_ns(question.bytes));
                return Self { ns, data: None };
            }
            // Both copy at the same time, each in proportion to its speed.
            CopyStrategy::HybridWorkSharing { engine, processors, .. } => {
                let (device, processors) = (alone(engine), alone(processors));
                let ns = 1.0 / (1.0 / device.ns + 1.0 / processors.ns);
                return Self { ns, data: processors.data };
            }
            _ => plan.strategy.engine(),
        };
        let is_by_processors = engine.is_none_or(|engine| !facts.engines[engine].is_device());
        let is_cached = plan.kernel == Kernel::Cached && question.cache_hint != CacheHint::Cold;
        match engine {
            Some(engine) if !is_by_processors || !is_cached => alone(engine),
            _ => Self::of_processors(&facts.profile, plan, question, is_cached),
        }
    }

    /// The estimate of a plan for one or two processors: start-up time plus bytes divided by bandwidth.
    fn of_processors(
        profile: &CpuProfile,
        plan: &CopyPlan,
        question: &CopyQuery,
        is_cached: bool,
    ) -> Self {
        let is_shared =
            question.blocking && matches!(plan.strategy, CopyStrategy::WorkSharing { .. });
        let startup_ns =
            if plan.strategy == CopyStrategy::Inline { 0.0 } else { profile.handover_ns };
        let (gb_per_s, data) = match is_cached {
            true if is_shared => (2.0 * profile.cached_gb_per_s, DataPlace::Cache),
            true => (profile.cached_gb_per_s, DataPlace::Cache),
            false => (profile.stream_gb_per_s, DataPlace::Memory),
        };
        Self { ns: startup_ns + question.bytes as f64 / gb_per_s, data: Some(data) }
    }

    /// The time, and where the data is taken to be.
    pub(super) fn text(&self) -> String {
        let data = match self.data {
            Some(DataPlace::Cache) => " (data in the cache)",
            Some(DataPlace::Memory) => " (data in no cache)",
            None => "",
        };
        format!("{}{data}", duration(self.ns / 1000.0))
    }
}

fn origin(facts: &CopyPlanContext) -> String {
    match &facts.profile.origin {
        ProfileOrigin::Measured => "measured just now".into(),
        ProfileOrigin::Saved(path) => format!("from {}", path.display()),
        ProfileOrigin::BuiltIn => "not measured: built-in values".into(),
        ProfileOrigin::Rejected(why) => {
            format!("built-in values: measured and not kept, because {why}")
        }
    }
}

/// The values of the profile, and what follows from them. What this machine does not have is left out.
fn measured(profile: &CpuProfile) -> Vec<MeasuredValue> {
    let bytes = |name, value: usize, meaning| MeasuredValue {
        name,
        value: value as f64,
        text: if value == usize::MAX { "never".into() } else { size::format(value as u64) },
        meaning,
    };
    let number = |name, value: f64, unit: &str, meaning| MeasuredValue {
        name,
        value,
        text: format!("{value:.0} {unit}"),
        meaning,
    };
    let mut values = vec![
        number("handover_ns", profile.handover_ns, "ns", "a cache line to another core"),
        MeasuredValue {
            name: "remote_line_ns",
            value: profile.remote_line_ns,
            text: format!("{:.1} ns", profile.remote_line_ns),
            meaning: "reading a line that another core wrote, in a row of them",
        },
        number("cached_gb_per_s", profile.cached_gb_per_s, "GB/s", "one core, data in its cache"),
        number("stream_gb_per_s", profile.stream_gb_per_s, "GB/s", "one core, data in no cache"),
        number(
            "pair_stream_gb_per_s",
            profile.pair_stream_gb_per_s,
            "GB/s",
            "two cores, data in no cache",
        ),
        bytes("inline_bytes", profile.inline_bytes, "asynchronous copies up to this run at once"),
        bytes("split_bytes", profile.split_bytes, "blocking copies are shared from here on"),
        bytes("stream_bytes", profile.stream_bytes, "one party streams from here on"),
        bytes(
            "shared_stream_bytes",
            profile.shared_stream_bytes,
            "several parties stream from here on",
        ),
        number("wake_ns", profile.wake_ns, "ns", "waking a channel that sleeps, for the caller"),
        bytes(
            "backlog",
            plan::max_backlog_bytes(profile) as usize,
            "of a channel, from which the next copies go to another",
        ),
    ];
    if profile.sibling_gain > 0.0 {
        let meaning = match profile.sibling_use() {
            SiblingUse::Near => {
                "speed of a copy shared with the core's other hardware thread, against one core alone: it \
                 is used as the nearest core"
            }
            SiblingUse::Last => {
                "speed of a copy shared with the core's other hardware thread, against one core alone: it \
                 is used after other cores"
            }
            SiblingUse::Unused => {
                "speed of a copy shared with the core's other hardware thread, against one core alone: it \
                 is not used"
            }
        };
        for (name, value, meaning) in [
            ("sibling_gain", profile.sibling_gain, meaning),
            (
                "neighbour_gain",
                profile.neighbour_gain,
                "the same for a copy shared with the nearest other core",
            ),
        ] {
            // Where no other core is allowed, there is no gain of it.
            if value > 0.0 {
                values.push(MeasuredValue { name, value, text: format!("{value:.2}×"), meaning });
            }
        }
    }
    if Topology::of_machine().nodes() > 1 {
        values.extend([
            number(
                "node_query_ns",
                profile.node_query_ns,
                "ns",
                "asking for the nodes of a copy's source and target",
            ),
            bytes(
                "placed_bytes",
                plan::placed_bytes(profile) as usize,
                "copies from here on prefer channels on the nodes of their memory",
            ),
        ]);
    }
    values
}

/// The limits that are not measured.
fn fixed(profile: &CpuProfile) -> Vec<MeasuredValue> {
    let chunk = MeasuredValue {
        name: "chunk_bytes",
        value: profile.chunk_bytes as f64,
        text: size::format(profile.chunk_bytes as u64),
        meaning: "the largest chunk, unless it is set",
    };
    let line = |limit: &FixedLimit| MeasuredValue {
        name: limit.name,
        value: limit.value,
        text: match limit.unit {
            "bytes" => size::format(limit.value as u64),
            "percent" => format!("{} %", limit.value),
            "×" => format!("{}×", limit.value),
            "ns" => nanoseconds(limit.value),
            unit => format!("{} {unit}", limit.value),
        },
        meaning: limit.decides,
    };
    std::iter::once(chunk).chain(plan::FIXED_LIMITS.iter().map(line)).collect()
}

/// A time in the largest unit in which it is a whole number.
fn nanoseconds(ns: f64) -> String {
    match ns {
        ns if ns >= 1e6 && ns % 1e6 == 0.0 => format!("{} ms", ns / 1e6),
        ns if ns >= 1e3 && ns % 1e3 == 0.0 => format!("{} µs", ns / 1e3),
        ns => format!("{ns} ns"),
    }
}

/// The number of limits that the text shows by default, which come first.
fn important_limits() -> usize {
    1 + plan::FIXED_LIMITS.iter().take_while(|limit| limit.is_important).count()
}

fn render(explanation: &Explanation, origin: &str, all: bool, paint: Paint) -> String {
    let temperature = match explanation.temperature {
        "unknown" => String::new(),
        word => format!("{word} "),
    };
    let way = explanation.gpu.as_ref().map_or(String::new(), GpuExplanation::route);
    let title = format!("a {temperature}copy of {}{way}", size::format(explanation.bytes));
    let mut text = format!("{}\n", paint.bold(&title));
    for (name, choice) in
        [("blocking", &explanation.blocking), ("asynchronous", &explanation.asynchronous)]
    {
        let devices = match &choice.devices[..] {
            [] => String::new(),
            names => format!("    on        {}\n", unused::join(names)),
        };
        text += &format!(
            "\n  {}\n    path      {}\n{devices}    kernel    {}\n    because   {}\n    estimate  {}\n",
            paint.bold(name),
            choice.path,
            choice.kernel,
            choice.reason,
            choice.estimate
        );
    }
    text += &format!("\n  {}\n", paint.bold("engines, for the blocking copy"));
    for EngineVerdict { engine, devices, verdict, .. } in &explanation.engines {
        text += &format!("    {engine:<9} {verdict}\n");
        if !devices.is_empty() {
            text += &format!("    {:<9} on {}\n", "", unused::join(devices));
        }
    }
    if !explanation.unused_devices.is_empty() {
        text += &format!("\n  {}\n", paint.bold("devices that are not used"));
        text += &unused::lines(&explanation.unused_devices);
    }
    for tuning in &explanation.tuning {
        text += &format!("\n  {}\n{}", paint.bold(&tuning.title()), tuning.lines());
    }
    text += &format!("\n  {} ({origin})\n", paint.bold("what the planner goes by"));
    let lines = |facts: &[MeasuredValue], width: usize| -> String {
        let line =
            |f: &MeasuredValue| format!("    {:<width$} {:>9}  {}\n", f.name, f.text, f.meaning);
        facts.iter().map(line).collect()
    };
    text += &lines(&explanation.measured, 21);
    text += "    The builder, or MEMFERRY_INLINE_BYTES, _SPLIT_BYTES, _STREAM_BYTES (both) and _CHUNK_BYTES, \
         can set these sizes.\n";
    text += &format!("\n  {}\n", paint.bold("the same on every machine"));
    let shown = if all { explanation.fixed.len() } else { important_limits() };
    text += &lines(&explanation.fixed[..shown], 21);
    if !all {
        let more = explanation.fixed.len() - shown;
        text += &format!("    {more} more decide about details: --all shows them.\n");
    }
    text += &explanation.adapts.line();
    if let Some(gpu) = &explanation.gpu {
        text += &format!("\n  {} (measured just now)\n", paint.bold(&gpu.title()));
        text += &lines(&gpu.measured, 22);
    }
    text
}

pub(super) fn duration(us: f64) -> String {
    match us {
        us if us < 1.0 => format!("{:.0} ns", us * 1000.0),
        us if us < 1000.0 => format!("{us:.1} µs"),
        us => format!("{:.1} ms", us / 1000.0),
    }
}

#[cfg(test)]
mod tests;
