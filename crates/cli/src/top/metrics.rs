//! `memferry top --metrics`: OpenMetrics text. Threads of a process are added up, because they come and go, and so are
//! blocks with the same labels, such as those of two endpoints for one peer: a label set may come only once.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;

use memferry_sys::stats::reader::{BlockView, FieldShape, FieldView, ProcessView};

/// The type of the text over HTTP.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The samples of one metric, with its type.
struct Family {
    kind: &'static str,
    unit: Option<&'static str>,
    samples: String,
}

/// The text of all counters.
pub(super) fn render(processes: &[ProcessView]) -> String {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    for process in processes {
        for block in same_added(process) {
            let labels = labels_of(process, &block);
            block.fields.iter().for_each(|field| add(&mut families, &block.kind, field, &labels));
        }
    }
    let mut text = String::new();
    for (name, family) in &families {
        let _ = writeln!(text, "# TYPE {name} {}", family.kind);
        if let Some(unit) = family.unit {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        text.push_str(&family.samples);
    }
    text.push_str("# EOF\n");
    text
}

/// The blocks of a process, with those that have the same labels as one.
fn same_added(process: &ProcessView) -> Vec<BlockView> {
    let mut sums: BTreeMap<(String, String), BlockView> = BTreeMap::new();
    for block in &process.blocks {
        let key = (block.kind.clone(), labels_of(process, block));
        match sums.entry(key) {
            Entry::Vacant(free) => _ = free.insert(block.clone()),
            Entry::Occupied(mut sum) => add_block(sum.get_mut(), block),
        }
    }
    sums.into_values().collect()
}

fn add_block(sum: &mut BlockView, block: &BlockView) {
    for field in &mut sum.fields {
        let values = field.values.iter_mut().zip(block.values(&field.name));
        values.for_each(|(sum, value)| *sum = sum.wrapping_add(*value));
    }
}

fn labels_of(process: &ProcessView, block: &BlockView) -> String {
    let mut labels = format!("pid=\"{}\",program=\"{}\"", process.pid, escape(&process.name));
    if block.kind != "thread" {
        let id = block.id.map_or_else(|| "ended".to_owned(), |id| id.to_string());
        let _ = write!(labels, ",id=\"{id}\",name=\"{}\"", escape(&block.name));
    }
    labels
}

fn add(families: &mut BTreeMap<String, Family>, kind: &str, field: &FieldView, labels: &str) {
    let name = format!("memferry_{}_{}", clean(kind), clean(&field.name));
    // The name of a metric ends with its unit.
    let (name, unit) = match &field.shape {
        FieldShape::Sizes(_) => (format!("{name}_bytes"), Some("bytes")),
        FieldShape::Nanoseconds(_) => (format!("{name}_seconds"), Some("seconds")),
        _ => {
            let unit = name.ends_with("_bytes").then_some("bytes");
            (name, unit)
        }
    };
    let (type_name, samples) = match &field.shape {
        FieldShape::Counter => ("counter", single(&name, "_total", labels, &field.values)),
        FieldShape::Gauge => ("gauge", single(&name, "", labels, &field.values)),
        FieldShape::Labels(names) => {
            let line = |(label, value): (&String, &u64)| {
                format!("{name}_total{{{labels},kind=\"{}\"}} {value}\n", escape(label))
            };
            ("counter", names.iter().zip(&field.values).map(line).collect())
        }
        FieldShape::Sizes(_) => ("histogram", buckets(&name, labels, &field.values, 1.0)),
        FieldShape::Nanoseconds(_) => ("histogram", buckets(&name, labels, &field.values, 1e9)),
    };
    let family = families.entry(name).or_insert_with(|| Family {
        kind: type_name,
        unit,
        samples: String::new(),
    });
    // A page may lie about a field that another page has too.
    if family.kind == type_name {
        family.samples.push_str(&samples);
    }
}

fn single(name: &str, suffix: &str, labels: &str, values: &[u64]) -> String {
    let value = values.first().copied().unwrap_or(0);
    format!("{name}{suffix}{{{labels}}} {value}\n")
}

/// The cumulative buckets of a histogram. A class ends below the next power of two, of which `parts` are one unit;
/// the last class has no end.
fn buckets(name: &str, labels: &str, values: &[u64], parts: f64) -> String {
    let (mut text, mut below) = (String::new(), 0u64);
    for (class, value) in values.iter().enumerate() {
        below = below.saturating_add(*value);
        let end = 1u128.checked_shl(class as u32 + 1).unwrap_or(u128::MAX) - 1;
        let end = match class + 1 == values.len() {
            true => "+Inf".to_owned(),
            false => format!("{:?}", end as f64 / parts),
        };
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{end}\"}} {below}");
    }
    text
}

/// A part of a metric's name.
fn clean(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &str, shape: FieldShape, values: &[u64]) -> FieldView {
        FieldView { name: name.into(), shape, values: values.to_vec() }
    }

    fn process(blocks: Vec<BlockView>) -> ProcessView {
        ProcessView { pid: 7, name: "a \"b\"\\c\n".into(), blocks_without_place: 0, blocks }
    }

    #[test]
    fn nothing_is_an_empty_set_of_metrics() {
        assert_eq!(render(&[]), "# EOF\n");
    }

    #[test]
    fn each_shape_has_its_samples() {
        let fields = vec![
            field("done", FieldShape::Counter, &[3]),
            field("depth", FieldShape::Gauge, &[2]),
            field("why", FieldShape::Labels(vec!["full".into(), "closed".into()]), &[1, 0]),
            field("sizes", FieldShape::Sizes(3), &[5, 0, 1]),
            field("time", FieldShape::Nanoseconds(2), &[0, 4]),
        ];
        let block = BlockView { kind: "channel".into(), id: Some(1), name: "cpu 0".into(), fields };
        let text = render(&[process(vec![block])]);
        let labels = r#"pid="7",program="a \"b\"\\c\n",id="1",name="cpu 0""#;
        let expected = format!(
            "# TYPE memferry_channel_depth gauge\nmemferry_channel_depth{{{labels}}} 2\n\
             # TYPE memferry_channel_done counter\nmemferry_channel_done_total{{{labels}}} 3\n\
             # TYPE memferry_channel_sizes_bytes histogram\n\
             # UNIT memferry_channel_sizes_bytes bytes\n\
             memferry_channel_sizes_bytes_bucket{{{labels},le=\"1.0\"}} 5\n\
             memferry_channel_sizes_bytes_bucket{{{labels},le=\"3.0\"}} 5\n\
             memferry_channel_sizes_bytes_bucket{{{labels},le=\"+Inf\"}} 6\n\
             # TYPE memferry_channel_time_seconds histogram\n\
             # UNIT memferry_channel_time_seconds seconds\n\
             memferry_channel_time_seconds_bucket{{{labels},le=\"1e-9\"}} 0\n\
             memferry_channel_time_seconds_bucket{{{labels},le=\"+Inf\"}} 4\n\
             # TYPE memferry_channel_why counter\n\
             memferry_channel_why_total{{{labels},kind=\"full\"}} 1\n\
             memferry_channel_why_total{{{labels},kind=\"closed\"}} 0\n# EOF\n"
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn threads_are_added_up() {
        let thread = |id| BlockView {
            kind: "thread".into(),
            id: Some(id),
            name: String::new(),
            fields: vec![field("waits", FieldShape::Counter, &[id])],
        };
        let text = render(&[process(vec![thread(1), thread(2)])]);
        assert_eq!(text.matches("memferry_thread_waits_total{").count(), 1);
        assert!(text.contains("} 3\n"));
    }

    #[test]
    fn blocks_with_the_same_labels_are_one_sample() {
        let peer = |sent| BlockView {
            kind: "peer".into(),
            id: Some(9),
            name: "rank 1".into(),
            fields: vec![field("sent_bytes", FieldShape::Counter, &[sent])],
        };
        let text = render(&[process(vec![peer(3), peer(4)])]);
        assert!(text.contains("# UNIT memferry_peer_sent_bytes bytes\n"), "{text}");
        assert_eq!(text.matches("memferry_peer_sent_bytes_total{").count(), 1, "{text}");
        assert!(text.contains("} 7\n"), "{text}");
    }
}
