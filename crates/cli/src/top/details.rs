//! One process: tables of its copies, channels, endpoints, peers and caches.

use memferry_bench::results::size;
use memferry_sys::stats::reader::{BlockView, FieldShape, ProcessView};

use super::quantity::{bytes, count, time};
use super::sample::{COPY_FIELDS, Histogram, same_block};
use crate::show::columns::align;

/// A table of a process.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) title: &'static str,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Section {
    /// The heading and the rows as aligned text.
    pub(super) fn lines(&self) -> Vec<String> {
        let all: Vec<_> = std::iter::once(&self.head).chain(&self.rows).cloned().collect();
        align(&all, true)
    }
}

/// What the cells of a block are made of.
struct Change<'a> {
    now: &'a BlockView,
    before: Option<&'a BlockView>,
    seconds: f64,
}

impl Change<'_> {
    /// What was added to a field per second. A block that is new has no rate yet.
    fn rate(&self, field: &str) -> f64 {
        let before = self.before.unwrap_or(self.now).sum(field);
        self.now.sum(field).saturating_sub(before) as f64 / self.seconds.max(1e-9)
    }

    fn total(&self, field: &str) -> String {
        count(self.now.sum(field) as f64)
    }

    fn quantile(&self, field: &str, share: f64) -> String {
        let before = Histogram::of(self.before.map_or(&[], |block| block.values(field)));
        time(Histogram::of(self.now.values(field)).since(&before).quantile(share))
    }

    /// The labels of a field with their counts, without those that are 0.
    fn labels(&self, field: &str) -> String {
        let found = self.now.fields.iter().find(|candidate| candidate.name == field);
        let Some((FieldShape::Labels(labels), values)) = found.map(|f| (&f.shape, &f.values))
        else {
            return String::new();
        };
        let pairs = labels.iter().zip(values).filter(|(_, value)| **value > 0);
        pairs
            .map(|(label, value)| format!("{label} {}", count(*value as f64)))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The name of the block, and the number of what it stands for if it has one.
    fn name(&self) -> String {
        match (self.now.id, self.now.name.as_str()) {
            (None, _) => "(ended)".to_owned(),
            (Some(id), "") => id.to_string(),
            (Some(_), name) => shortened(name),
        }
    }
}

/// The end of a name: names of ranks and jobs differ there.
fn shortened(name: &str) -> String {
    const MAX_CHARS: usize = 24;
    match name.chars().count().checked_sub(MAX_CHARS) {
        None | Some(0) => name.to_owned(),
        Some(more) => std::iter::once('…').chain(name.chars().skip(more + 1)).collect(),
    }
}

type Cells = fn(&Change<'_>) -> Vec<String>;

/// A table of the blocks of a kind.
struct Table {
    kind: &'static str,
    title: &'static str,
    head: &'static [&'static str],
    cells: Cells,
}

const TABLES: [Table; 6] = [
    Table {
        kind: "channel",
        title: "channels",
        head: &["", "done/s", "B/s", "depth", "p50", "p99", "full", "failed", "sleeps", "wakes"],
        cells: |change| {
            vec![
                count(change.rate("completed")),
                bytes(change.rate("bytes")),
                change.total("depth"),
                change.quantile("service_time", 0.5),
                change.quantile("service_time", 0.99),
                change.total("full"),
                change.total("failed"),
                change.total("sleeps"),
                change.total("wakes"),
            ]
        },
    },
    Table {
        kind: "endpoint",
        title: "endpoints",
        head: &["", "peers", "unexpected", "in flight", "sleep/s", "lost peers"],
        cells: |change| {
            vec![
                change.total("peers"),
                change.total("unexpected"),
                change.total("operations"),
                count(change.rate("sleeps")),
                change.total("lost_peers"),
            ]
        },
    },
    Table {
        kind: "peer",
        title: "peers",
        head: &["", "pid", "out/s", "out B/s", "in/s", "in B/s", "p50", "p99", "waits", "fallb"],
        cells: |change| {
            vec![
                change.now.id.map_or_else(String::new, |pid| pid.to_string()),
                count(change.rate("sent")),
                bytes(change.rate("sent_bytes")),
                count(change.rate("received")),
                bytes(change.rate("received_bytes")),
                change.quantile("send_latency", 0.5),
                change.quantile("send_latency", 0.99),
                change.total("waits"),
                change.total("fallbacks"),
            ]
        },
    },
    Table {
        kind: "pins",
        title: "pins",
        head: &["", "hit/s", "miss/s", "evicted", "invalidated", "uncached", "pinned", "entries"],
        cells: |change| {
            vec![
                count(change.rate("hits")),
                count(change.rate("misses")),
                change.total("evictions"),
                change.total("invalidations"),
                change.total("uncached"),
                bytes(change.now.sum("bytes_pinned") as f64),
                change.total("entries"),
            ]
        },
    },
    Table {
        kind: "lookup",
        title: "lookups",
        head: &["", "hit/s", "miss/s", "retries", "filled", "evicted", "attached", "errors"],
        cells: |change| {
            vec![
                count(change.rate("hits")),
                count(change.rate("misses")),
                change.total("retries"),
                change.total("fills"),
                change.total("evictions"),
                change.total("attached"),
                change.total("attach_errors"),
            ]
        },
    },
    Table {
        kind: "thread",
        title: "threads that copy",
        head: &["", "bytes", "waits", "sleeps", "faults", "fallbacks"],
        cells: |change| {
            vec![
                bytes(change.now.sum("copy_bytes") as f64),
                change.total("waits"),
                change.total("sleeps"),
                change.total("faults"),
                change.labels("fallbacks"),
            ]
        },
    },
];

/// The tables of a process that have rows.
pub(super) fn sections(
    before: Option<&ProcessView>,
    now: &ProcessView,
    seconds: f64,
) -> Vec<Section> {
    let tables = TABLES.iter().map(|table| {
        let blocks = now.blocks.iter().filter(|block| block.kind == table.kind);
        let rows = blocks.map(|block| {
            let change = Change { now: block, before: same_block(before, block), seconds };
            std::iter::once(change.name()).chain((table.cells)(&change)).collect()
        });
        let head = table.head.iter().map(|title| (*title).to_owned()).collect();
        Section { title: table.title, head, rows: rows.collect() }
    });
    let sizes = [copies_by_size(now), messages_by_size(now), messages_by_path(now)];
    sizes.into_iter().chain(tables).filter(|section| !section.rows.is_empty()).collect()
}

/// Sums a histogram over the blocks of a kind.
fn summed(process: &ProcessView, kind: &str, field: &str) -> Vec<u64> {
    let mut sum: Vec<u64> = Vec::new();
    for block in process.blocks.iter().filter(|block| block.kind == kind) {
        let values = block.values(field);
        sum.resize(sum.len().max(values.len()), 0);
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(*value));
    }
    sum
}

fn copies_by_size(process: &ProcessView) -> Section {
    let columns = COPY_FIELDS.map(|(path, field)| (path, summed(process, "thread", field)));
    by_size("copies by size and path", &columns)
}

fn messages_by_size(process: &ProcessView) -> Section {
    let field = |name| summed(process, "peer", name);
    by_size(
        "messages by size",
        &[("sent", field("sent_sizes")), ("received", field("received_sizes"))],
    )
}

/// The paths of the messages of each peer, one in a row: all of them side by side are wider than a terminal.
fn messages_by_path(process: &ProcessView) -> Section {
    let mut rows = Vec::new();
    for block in process.blocks.iter().filter(|block| block.kind == "peer") {
        let field = block.fields.iter().find(|field| field.name == "sent");
        let Some(FieldShape::Labels(paths)) = field.map(|field| &field.shape) else { continue };
        let peer = Change { now: block, before: None, seconds: 1.0 }.name();
        for (index, path) in paths.iter().enumerate() {
            let [sent, received] = ["sent", "received"]
                .map(|field| block.values(field).get(index).copied().unwrap_or(0));
            if sent > 0 || received > 0 {
                let [sent, received] = [sent, received].map(|value| count(value as f64));
                rows.push(vec![format!("{peer} {path}"), sent, received]);
            }
        }
    }
    let head = ["", "sent", "received"].map(str::to_owned).to_vec();
    Section { title: "messages by peer and path", head, rows }
}

/// A table with a row for each size class in which anything was counted, and a column for each histogram of which.
fn by_size(title: &'static str, columns: &[(&str, Vec<u64>)]) -> Section {
    let used: Vec<_> =
        columns.iter().filter(|(_, counts)| counts.iter().any(|count| *count > 0)).collect();
    let classes = used.iter().map(|(_, counts)| counts.len()).max().unwrap_or(0);
    let cells =
        |class: usize| used.iter().map(move |(_, counts)| counts.get(class).copied().unwrap_or(0));
    let row = |class: usize| {
        let label = format!("from {}", size::format(1u64.checked_shl(class as u32).unwrap_or(0)));
        let counts =
            cells(class).map(|value| if value == 0 { String::new() } else { count(value as f64) });
        std::iter::once(label).chain(counts).collect()
    };
    let is_used = |class: &usize| cells(*class).any(|value| value > 0);
    let head = std::iter::once("").chain(used.iter().map(|(name, _)| *name)).map(str::to_owned);
    Section { title, head: head.collect(), rows: (0..classes).filter(is_used).map(row).collect() }
}
