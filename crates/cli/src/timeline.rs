//! `memferry bench NAME --trace FILE.json`: the transfers of a bench as a timeline in the Chrome trace format, which
//! browsers show (`chrome://tracing`, `ui.perfetto.dev`). It collects the `tracing` spans that every transfer has.

use std::fmt;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
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
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = || format!("the trace {} cannot be written", path.display());
        let mut file = BufWriter::new(std::fs::File::create(path).with_context(failed)?);
        serde_json::to_writer(
            &mut file,
            &json!({"displayTimeUnit": "ns", "traceEvents": &*events}),
        )?;
        file.flush().with_context(failed)?;
        Ok(events.len())
    }

    fn push(&self, phase: &str, name: &str, id: Option<&Id>, fields: Map<String, Value>) {
        let mut event = json!({
            "ph": phase,
            "name": name,
            "cat": "memferry",
            "ts": self.start.elapsed().as_nanos() as f64 / 1000.0,
            "pid": std::process::id(),
            "tid": thread_number(),
            "args": fields,
        });
        if let Some(id) = id {
            // A string: a browser reads numbers as floating point, to which many of these are the same.
            event["id"] = format!("{:#x}", id.into_u64()).into();
        }
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // An end is never left out: its begin is there.
        if events.len() < MAX_EVENTS || phase == "e" {
            events.push(event);
        }
    }
}

/// A span that was collected. Its id may be used again after its end.
struct Begun;
/// A span whose end was collected.
struct Ended;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Timeline {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let is_full =
            || self.events.lock().unwrap_or_else(PoisonError::into_inner).len() >= MAX_EVENTS;
        let Some(span) = context.span(id).filter(|_| !is_full()) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(Begun);
        self.push("b", attributes.metadata().name(), Some(id), fields.0);
    }

    /// The event `completed` is the end of a transfer: its span ends with its last handle.
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let is_end = fields.0.get("message").is_some_and(|message| message == "completed");
        let mut extensions = span.extensions_mut();
        if extensions.get_mut::<Begun>().is_none() || extensions.get_mut::<Ended>().is_some() {
            return;
        }
        if is_end {
            extensions.insert(Ended);
        }
        self.push(if is_end { "e" } else { "n" }, span.name(), Some(&span.id()), fields.0);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let mut extensions = span.extensions_mut();
        if extensions.get_mut::<Begun>().is_some() && extensions.get_mut::<Ended>().is_none() {
            self.push("e", span.name(), Some(&id), Map::new());
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

    #[test]
    fn every_transfer_begins_and_ends_once() {
        let timeline = Timeline::start().unwrap();
        let ferry = memferry::Ferry::new().unwrap();
        for _ in 0..3 {
            ferry.icopy(vec![7u8; 1 << 20], vec![0u8; 1 << 20]).unwrap().wait().unwrap();
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(timeline.write(file.path()).unwrap() >= 6);
        let text = std::fs::read_to_string(file.path()).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &str| {
            let is_it = |event: &&Value| event["ph"] == phase && event["name"] == "transfer";
            events.iter().filter(is_it).cloned().collect::<Vec<_>>()
        };
        let (begins, ends) = (of("b"), of("e"));
        let large = begins.iter().filter(|event| event["args"]["bytes"] == 1 << 20).count();
        assert_eq!(large, 3);
        assert_eq!(begins.len(), ends.len());
        let is_text = |event: &Value| event["id"].as_str().is_some_and(|id| id.starts_with("0x"));
        assert!(begins.iter().chain(&ends).all(is_text), "{begins:?}");
        assert!(ends.iter().all(|end| end["ts"].as_f64() > begins[0]["ts"].as_f64()));
    }
}
