//! `memferry top --json`.

use memferry_sys::stats::reader::{BlockView, FieldShape, FieldView};
use serde_json::{Map, Value, json};

use super::sample::{Row, Sample};

/// All processes with their sums, rates and blocks.
pub(super) fn object(before: Option<&Sample>, now: &Sample) -> Value {
    let processes = Row::all(before, now).into_iter().zip(&now.processes).map(|(row, process)| {
        json!({
            "pid": row.pid,
            "name": row.name,
            "totals": row.totals,
            "rates": row.rates,
            "p50_ns": row.p50_ns,
            "p99_ns": row.p99_ns,
            "blocks_without_place": process.blocks_without_place,
            "blocks": process.blocks.iter().map(block).collect::<Vec<_>>(),
        })
    });
    json!({
        "time": now.unix_seconds,
        "interval_s": before.map(|before| now.seconds_since(before)),
        "processes": processes.collect::<Vec<_>>(),
    })
}

fn block(block: &BlockView) -> Value {
    let mut object = Map::new();
    object.insert("kind".into(), block.kind.as_str().into());
    object.insert("id".into(), block.id.into());
    object.insert("name".into(), block.name.as_str().into());
    let fields = block.fields.iter().map(|view| (view.name.clone(), field(view)));
    object.insert("counters".into(), Value::Object(fields.collect()));
    Value::Object(object)
}

/// A number, an object of numbers by label, or a histogram: counts by the lower bound of their class.
fn field(field: &FieldView) -> Value {
    let values = &field.values;
    match &field.shape {
        FieldShape::Counter | FieldShape::Gauge => values.first().copied().into(),
        FieldShape::Labels(labels) => {
            let pairs =
                labels.iter().zip(values).map(|(label, value)| (label.clone(), (*value).into()));
            Value::Object(pairs.collect())
        }
        FieldShape::Sizes(_) | FieldShape::Nanoseconds(_) => {
            let used = values.iter().enumerate().filter(|(_, value)| **value > 0);
            let bound = |class: usize| if class == 0 { 0 } else { 1u128 << class.min(127) };
            let pairs = used.map(|(class, value)| (bound(class).to_string(), (*value).into()));
            Value::Object(pairs.collect())
        }
    }
}
