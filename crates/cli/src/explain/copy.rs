//! `memferry explain SIZE`: which path a copy takes on this machine, why, and the measured values
//! behind the decision. It asks the planner that real copies ask, and copies nothing.

use memferry::engine::Kernel;
use memferry::engine::cpu::{Origin, Profile};
use memferry::plan::{Facts, Path, Plan, Question};
use memferry::{Ferry, Temperature};
use serde::Serialize;

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
struct Fact {
    name: &'static str,
    value: f64,
    text: String,
    meaning: &'static str,
}

/// Explains a copy, as text or as JSON.
pub(crate) fn run(bytes: u64, temperature: Temperature, json: bool) -> anyhow::Result<()> {
    let ferry = Ferry::new()?;
    let explanation = explain(ferry.facts(), bytes, temperature);
    if json {
        return show::print_json(&explanation);
    }
    Ok(show::print(&render(&explanation, &origin(ferry.facts()), Paint::for_stdout()))?)
}

fn explain(facts: &Facts, bytes: u64, temperature: Temperature) -> Explanation {
    let choose = |blocking| {
        let question = Question { temperature, ..Question::copy(bytes, blocking) };
        let plan = memferry::plan::plan(facts, &question);
        let plan = plan.expect("a processor can copy ordinary memory");
        Choice {
            path: path(facts, &plan),
            kernel: plan.kernel.name(),
            reason: plan.reason.to_string(),
            estimate_us: estimate_ns(&facts.profile, &plan, bytes, blocking) / 1000.0,
        }
    };
    Explanation {
        bytes,
        temperature: match temperature {
            Temperature::Unknown => "unknown",
            Temperature::Hot => "hot",
            Temperature::Cold => "cold",
        },
        blocking: choose(true),
        asynchronous: choose(false),
        measured: measured(&facts.profile),
    }
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

/// The measured line for the plan: start-up plus bytes over bandwidth.
fn estimate_ns(profile: &Profile, plan: &Plan, bytes: u64, blocking: bool) -> f64 {
    let shared = blocking && matches!(plan.path, Path::Chunks { .. } | Path::Split { .. });
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
    let title = format!("a {temperature}copy of {}", size::format(explanation.bytes));
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
    for fact in &explanation.measured {
        text += &format!("    {:<21} {:>9}  {}\n", fact.name, fact.text, fact.meaning);
    }
    text +=
        "    Each *_bytes value can be set by the builder or as MEMFERRY_INLINE_BYTES and so on.\n";
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
mod tests {
    use memferry::engine::cpu::ProfileSource;

    use super::*;

    fn facts() -> Facts {
        let ferry = Ferry::builder()
            .profile(ProfileSource::BuiltIn)
            .channels(1)
            .inline_bytes(4 << 10)
            .split_bytes(256 << 10)
            .stream_bytes(2 << 20)
            .build()
            .unwrap();
        ferry.facts().clone()
    }

    #[test]
    fn small_copies_are_explained_as_the_callers_own() {
        let explanation = explain(&facts(), 4096, Temperature::Unknown);
        assert_eq!(explanation.blocking.path, "the caller, at once");
        assert_eq!(explanation.asynchronous.path, "the caller, at once");
    }

    #[test]
    fn large_copies_name_engine_kernel_and_reason() {
        let explanation = explain(&facts(), 64 << 20, Temperature::Unknown);
        assert!(explanation.blocking.path.contains("engine cpu"));
        assert_ne!(explanation.blocking.kernel, "cached");
        let text = render(&explanation, "not measured", Paint::plain());
        for word in ["a copy of 64 MiB", "blocking", "asynchronous", "because", "split_bytes"] {
            assert!(text.contains(word), "{word} is missing from:\n{text}");
        }
    }

    #[test]
    fn temperature_changes_the_kernel() {
        let kernel = |temperature| explain(&facts(), 1 << 20, temperature).blocking.kernel;
        assert_eq!(kernel(Temperature::Hot), "cached");
        assert_ne!(kernel(Temperature::Cold), "cached");
    }
}
