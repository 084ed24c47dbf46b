//! `memferry explain SIZE`: which path a copy takes on this machine, why, and the measured values
//! behind the decision. It asks the planner that real copies ask, and copies nothing.

use anyhow::{Context, anyhow};
use memferry::engine::Kernel;
use memferry::engine::cpu::{Origin, Profile};
use memferry::plan::{self, Facts, Path, Plan, Question};
use memferry::{Ferry, Gpu, Temperature};
use serde::Serialize;

use super::gpu::Device;
use crate::show::{self, Paint};
use crate::size;

/// Everything `memferry explain --json` prints.
#[derive(Debug, Serialize)]
struct Explanation {
    bytes: u64,
    temperature: &'static str,
    /// For a caller that waits at once.
    blocking: Choice,
    /// For a caller that goes on.
    asynchronous: Choice,
    measured: Vec<Fact>,
    /// The GPU that takes part, if one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<Device>,
}

/// What would be done with one request.
#[derive(Debug, Serialize)]
struct Choice {
    path: String,
    kernel: &'static str,
    reason: String,
    estimate_us: f64,
}

/// A value that the planner goes by.
#[derive(Debug, Serialize)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) value: f64,
    pub(super) text: String,
    pub(super) meaning: &'static str,
}

/// Explains a copy, as text or as JSON.
pub(super) fn run(question: Question, gpu: Option<usize>, json: bool) -> anyhow::Result<()> {
    let ferry = match gpu {
        Some(number) => {
            let ferry = Ferry::builder().gpu(Gpu::Number(number)).build();
            ferry.context("no GPU to explain with; `memferry doctor` tells what it needs")?
        }
        None => Ferry::new()?,
    };
    let device = ferry.gpu().filter(|_| gpu.is_some());
    let device = device.map(|gpu| Device::new(gpu.facts(), gpu.rates(), &question));
    let explanation = explain(ferry.facts(), question, device)?;
    if json {
        return show::print_json(&explanation);
    }
    Ok(show::print(&render(&explanation, &origin(ferry.facts()), Paint::for_stdout()))?)
}

fn explain(facts: &Facts, question: Question, gpu: Option<Device>) -> anyhow::Result<Explanation> {
    let choose = |blocking| {
        let question = Question { blocking, ..question };
        let plan = plan::plan(facts, &question);
        let plan = plan.ok_or_else(|| anyhow!("no engine reaches this memory: use --gpu"))?;
        anyhow::Ok(Choice {
            path: path(facts, &plan),
            kernel: kernel(facts, &plan),
            reason: plan.reason.to_string(),
            estimate_us: estimate_ns(facts, &plan, &question) / 1000.0,
        })
    };
    Ok(Explanation {
        bytes: question.bytes,
        temperature: match question.temperature {
            Temperature::Unknown => "unknown",
            Temperature::Hot => "hot",
            Temperature::Cold => "cold",
        },
        blocking: choose(true)?,
        asynchronous: choose(false)?,
        measured: measured(&facts.profile),
        gpu,
    })
}

fn path(facts: &Facts, plan: &Plan) -> String {
    let name = |engine: usize| facts.engines[engine].name.as_str();
    match plan.path {
        Path::Caller => "the caller, at once".into(),
        Path::Whole { engine } => format!("engine {}, one descriptor on one channel", name(engine)),
        Path::Chunks { engine, chunk_bytes, channels } => format!(
            "engine {}, chunks of {} claimed by {channels} channel(s)",
            name(engine),
            size::format(chunk_bytes)
        ),
        Path::Split { engine, processors, chunk_bytes, channels } => format!(
            "engine {} and up to {channels} channel(s) of {} claim chunks of {}",
            name(engine),
            name(processors),
            size::format(chunk_bytes)
        ),
        Path::Parts { engine, .. } => {
            format!("engine {}, fixed parts on one channel", name(engine))
        }
    }
}

/// How processors move bytes, where they have a part in it.
fn kernel(facts: &Facts, plan: &Plan) -> &'static str {
    match plan.path {
        Path::Whole { engine } | Path::Chunks { engine, .. } | Path::Parts { engine, .. }
            if facts.engines[engine].is_device() =>
        {
            "none"
        }
        _ => plan.kernel.name(),
    }
}

/// What the plan is expected to take.
fn estimate_ns(facts: &Facts, plan: &Plan, question: &Question) -> f64 {
    let alone = |engine: usize| plan::estimate_ns(facts, &facts.engines[engine], question);
    match plan.path {
        // Each does as much as it is quick.
        Path::Split { engine, processors, .. } => {
            1.0 / (1.0 / alone(engine) + 1.0 / alone(processors))
        }
        Path::Whole { engine } | Path::Chunks { engine, .. }
            if facts.engines[engine].preparation.is_some() =>
        {
            alone(engine)
        }
        _ => processors_ns(&facts.profile, plan, question.bytes, question.blocking),
    }
}

/// The measured line for a plan of processors alone: start-up plus bytes over bandwidth.
fn processors_ns(profile: &Profile, plan: &Plan, bytes: u64, blocking: bool) -> f64 {
    let shared = blocking && matches!(plan.path, Path::Chunks { .. });
    let startup = if plan.path == Path::Caller { 0.0 } else { profile.handover_ns };
    let gb_per_s = match plan.kernel {
        Kernel::Cached if shared => 2.0 * profile.cached_gb_per_s,
        Kernel::Cached => profile.cached_gb_per_s,
        Kernel::Stream(_) if shared => profile.pair_stream_gb_per_s,
        Kernel::Stream(_) => profile.stream_gb_per_s,
    };
    startup + bytes as f64 / gb_per_s
}

fn origin(facts: &Facts) -> String {
    match &facts.profile.origin {
        Origin::Measured => "measured just now".into(),
        Origin::Saved(path) => format!("from {}", path.display()),
        Origin::BuiltIn => "not measured: built-in values".into(),
        Origin::NotKept(why) => format!("built-in values: measured and not kept, because {why}"),
    }
}

fn measured(profile: &Profile) -> Vec<Fact> {
    let bytes = |name, value: usize, meaning| Fact {
        name,
        value: value as f64,
        text: if value == usize::MAX { "never".into() } else { size::format(value as u64) },
        meaning,
    };
    let number = |name, value: f64, unit: &str, meaning| Fact {
        name,
        value,
        text: format!("{value:.0} {unit}"),
        meaning,
    };
    vec![
        number("handover_ns", profile.handover_ns, "ns", "a cache line to another core"),
        number("cached_gb_per_s", profile.cached_gb_per_s, "GB/s", "one core, data in its cache"),
        number("stream_gb_per_s", profile.stream_gb_per_s, "GB/s", "one core, around the caches"),
        number(
            "pair_stream_gb_per_s",
            profile.pair_stream_gb_per_s,
            "GB/s",
            "two cores, around the caches",
        ),
        bytes("inline_bytes", profile.inline_bytes, "asynchronous copies up to this run at once"),
        bytes("split_bytes", profile.split_bytes, "blocking copies are shared from here on"),
        bytes("stream_bytes", profile.stream_bytes, "one party streams from here on"),
        bytes(
            "shared_stream_bytes",
            profile.shared_stream_bytes,
            "several parties stream from here on",
        ),
        bytes("chunk_bytes", profile.chunk_bytes, "the largest chunk"),
    ]
}

fn render(explanation: &Explanation, origin: &str, paint: Paint) -> String {
    let temperature = match explanation.temperature {
        "unknown" => String::new(),
        word => format!("{word} "),
    };
    let way = explanation.gpu.as_ref().map_or(String::new(), Device::way);
    let title = format!("a {temperature}copy of {}{way}", size::format(explanation.bytes));
    let mut text = format!("{}\n", paint.bold(&title));
    for (name, choice) in
        [("blocking", &explanation.blocking), ("asynchronous", &explanation.asynchronous)]
    {
        text += &format!(
            "\n  {}\n    path      {}\n    kernel    {}\n    because   {}\n    estimate  {}\n",
            paint.bold(name),
            choice.path,
            choice.kernel,
            choice.reason,
            duration(choice.estimate_us)
        );
    }
    text += &format!("\n  {} ({origin})\n", paint.bold("what the planner goes by"));
    let lines = |facts: &[Fact], width: usize| -> String {
        let line = |f: &Fact| format!("    {:<width$} {:>9}  {}\n", f.name, f.text, f.meaning);
        facts.iter().map(line).collect()
    };
    text += &lines(&explanation.measured, 21);
    text +=
        "    Each *_bytes value can be set by the builder or as MEMFERRY_INLINE_BYTES and so on.\n";
    if let Some(gpu) = &explanation.gpu {
        text += &format!("\n  {} (measured just now)\n", paint.bold(&gpu.title()));
        text += &lines(&gpu.measured, 22);
    }
    text
}

fn duration(us: f64) -> String {
    match us {
        us if us < 1.0 => format!("{:.0} ns", us * 1000.0),
        us if us < 1000.0 => format!("{us:.1} µs"),
        us => format!("{:.1} ms", us / 1000.0),
    }
}

#[cfg(test)]
mod tests;
