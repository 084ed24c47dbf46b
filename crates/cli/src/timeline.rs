//! `memferry bench NAME --trace FILE.json`: the transfers of a bench as a timeline in the Chrome trace format, which
//! browsers show (`chrome://tracing`, `ui.perfetto.dev`). It collects the `tracing` spans that every transfer has.

use std::fmt;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use memferry_bench::results::size;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The most events of a timeline. A browser shows no more, and a bench may start millions of transfers.
const MAX_EVENTS: usize = 200_000;

/// Collects spans and their events.
#[derive(Debug, Clone)]
pub(crate) struct Timeline {
    start: Instant,
    events: Arc<Mutex<Vec<Value>>>,
}

impl Timeline {
    /// Collects from now on.
    pub(crate) fn start() -> anyhow::Result<Self> {
        let timeline = Self { start: Instant::now(), events: Arc::default() };
        tracing::subscriber::set_global_default(
            tracing_subscriber::registry().with(timeline.clone()),
        )
        .context("another subscriber of `tracing` is set")?;
        Ok(timeline)
    }

    /// Writes what was collected, and returns how many events it has.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<usize> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        name_tracks(&mut events);
        let failed = || format!("the trace {} cannot be written", path.display());
        let mut file = BufWriter::new(std::fs::File::create(path).with_context(failed)?);
        serde_json::to_writer(
            &mut file,
            &json!({"displayTimeUnit": "ns", "traceEvents": &*events}),
        )?;
        file.flush().with_context(failed)?;
        Ok(events.len())
    }

    fn push(&self, phase: &str, name: &str, id: &Id, fields: Map<String, Value>) {
        let event = json!({
            "ph": phase,
            "name": name,
            "cat": "memferry",
            "ts": self.start.elapsed().as_nanos() as f64 / 1000.0,
            "pid": std::process::id(),
            "tid": thread_number(),
            "args": fields,
            // A string: a browser reads numbers as floating point, to which many of these are the same. Local: a
            // lane of this process.
            "id2": {"local": format!("{:#x}", id.into_u64())},
        });
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // An end is never left out: its begin is there.
        if events.len() < MAX_EVENTS || phase == "e" {
            events.push(event);
        }
    }
}

/// Names the process and its threads, as a browser shows them.
fn name_tracks(events: &mut Vec<Value>) {
    let process = std::process::id();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut names = vec![("process_name", process, format!("memferry {}", words.join(" ")))];
    let mut threads: Vec<u32> =
        events.iter().filter_map(|event| event["tid"].as_u64()).map(|tid| tid as u32).collect();
    threads.sort_unstable();
    threads.dedup();
    for thread in threads {
        let path = format!("/proc/self/task/{thread}/comm");
        // A thread that has ended has no name any more.
        let name = std::fs::read_to_string(path).unwrap_or_default();
        names.push(("thread_name", thread, name.trim().to_owned()));
    }
    let named = |(kind, tid, name): (&str, u32, String)| json!({"ph": "M", "name": kind, "pid": process, "tid": tid, "args": {"name": name}});
    events.splice(0..0, names.into_iter().filter(|(_, _, name)| !name.is_empty()).map(named));
}

/// The name of a span, and of its lane: what it does, on which path, and how large it is. Browsers put spans of one
/// name into one lane, so sizes are in classes.
fn lane(span: &str, fields: &Map<String, Value>) -> String {
    let text = |field: &str| fields.get(field).and_then(Value::as_str);
    // Without the details of a path.
    let word =
        |field: &str| text(field).and_then(|text| text.split_whitespace().next()).map(spaced);
    let mut name = word("operation").unwrap_or_else(|| span.to_owned());
    if let Some(path) = word("path") {
        name = format!("{name}, {path}");
    }
    match fields.get("bytes").and_then(Value::as_u64).and_then(u64::checked_ilog2) {
        Some(class) => format!("{name}, from {}", size::format(1 << class)),
        None => name,
    }
}

/// `WorkSharing` as `work sharing`.
fn spaced(word: &str) -> String {
    let letters = word.chars().enumerate().flat_map(|(place, letter)| {
        let space = (place > 0 && letter.is_uppercase()).then_some(' ');
        space.into_iter().chain(letter.to_lowercase())
    });
    letters.collect()
}

/// A span that was collected, with its name and what is known at its end.
struct Started {
    name: String,
    result: Map<String, Value>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Timeline {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let is_full =
            || self.events.lock().unwrap_or_else(PoisonError::into_inner).len() >= MAX_EVENTS;
        let Some(span) = context.span(id).filter(|_| !is_full()) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let name = lane(attributes.metadata().name(), &fields.0);
        self.push("b", &name, id, fields.0);
        span.extensions_mut().insert(Started { name, result: Map::new() });
    }

    /// The event `completed` has the result of a transfer, whose span ends right after it.
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut extensions = span.extensions_mut();
        let Some(started) = extensions.get_mut::<Started>() else { return };
        if fields.0.get("message").is_some_and(|message| message == "completed") {
            fields.0.remove("message");
            started.result = fields.0;
        } else {
            self.push("n", &started.name, &span.id(), fields.0);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        if let Some(Started { name, result }) = span.extensions_mut().remove() {
            self.push("e", &name, &id, result);
        }
    }
}

/// The number of the calling thread.
fn thread_number() -> u64 {
    rustix::thread::gettid().as_raw_nonzero().get() as u64
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests of this process may copy too: this many bytes are copied by no other.
    const BYTES: usize = (1 << 20) + 12_345;

    #[test]
    fn every_transfer_begins_and_ends_once() {
        let timeline = Timeline::start().unwrap();
        let ferry = memferry::Ferry::new().unwrap();
        let (source, mut target) = (vec![7u8; BYTES], vec![0u8; BYTES]);
        let transfers = (0..3).map(|_| {
            let request = memferry::Request::copy(source.as_ptr(), target.as_mut_ptr(), BYTES);
            // SAFETY: both live until the end of the test, and the copies are made one after another.
            let transfer = unsafe { ferry.start_raw(request) }.unwrap();
            transfer.wait().unwrap();
            transfer
        });
        // An end counts when a wait returns, even if there are owners of the transfer left.
        let transfers: Vec<_> = transfers.collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(timeline.write(file.path()).unwrap() >= 6);
        let text = std::fs::read_to_string(file.path()).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &'static str| events.iter().filter(move |event| event["ph"] == phase);
        let begins: Vec<_> = of("b").filter(|begin| begin["args"]["bytes"] == BYTES).collect();
        assert_eq!(begins.len(), transfers.len());
        for begin in begins {
            let name = begin["name"].as_str().unwrap();
            assert!(name.starts_with("copy, ") && name.ends_with(", from 1 MiB"), "{name}");
            assert!(begin["id2"]["local"].as_str().is_some_and(|id| id.starts_with("0x")));
            let ends: Vec<_> = of("e").filter(|end| end["id2"] == begin["id2"]).collect();
            assert_eq!(ends.len(), 1, "{begin} {ends:?}");
            assert_eq!(ends[0]["args"]["failed"], false);
            assert!(ends[0]["ts"].as_f64() > begin["ts"].as_f64());
        }
        let names = |kind: &str| events.iter().filter(|event| event["name"] == kind).count();
        assert!(names("process_name") == 1 && names("thread_name") >= 1);
    }
}
