//! The misses of a replayed trace as text and as JSON, with one line per cache shape.

use std::path::Path;

use memferry_bench::replay::{MissTotals, ReplayResult};
use memferry_bench::results::number;
use serde_json::{Value, json};

use crate::show::columns::align;

/// A table with one line per cache shape.
pub(super) fn text(file: &Path, replays: &[ReplayResult]) -> String {
    let heads = ["shape", "miss ratio", "send: cold", "capacity", "conflict"];
    let heads = heads.into_iter().chain(["receive: cold", "capacity", "conflict"]);
    let mut lines = vec![heads.map(str::to_owned).collect::<Vec<_>>()];
    for replay in replays {
        let misses = replay.counters.misses;
        let mut line = vec![replay.shape.to_string(), percent(replay.counters.miss_ratio())];
        for MissTotals { cold, capacity, conflict } in [misses.send.into(), misses.receive.into()] {
            line.extend([cold, capacity, conflict].map(|count| count.to_string()));
        }
        lines.push(line);
    }
    let mut text = format!("{}: {} lookups\n\n", file.display(), lookups(replays));
    for line in align(&lines, true) {
        text.push_str(&format!("  {line}\n"));
    }
    text.push_str(
        "\n  C: entries of the cache, L: entries of a line, A: lines of a set. Cold misses are first \
         uses;\n  capacity misses a cache with a single set would have too; conflict misses it would \
         not.\n",
    );
    text
}

/// The table as one JSON object.
pub(super) fn json(file: &Path, replays: &[ReplayResult]) -> Value {
    let rows: Vec<Value> = replays
        .iter()
        .map(|replay| {
            let misses = replay.counters.misses;
            json!({
                "entries": replay.shape.entries,
                "line_entries": replay.shape.line_entries,
                "ways": replay.shape.ways,
                "miss_ratio": replay.counters.miss_ratio(),
                "send": MissTotals::from(misses.send),
                "receive": MissTotals::from(misses.receive),
            })
        })
        .collect();
    json!({ "file": file, "lookups": lookups(replays), "rows": rows })
}

/// The number of lookups in the trace, which is the same for every cache shape.
fn lookups(replays: &[ReplayResult]) -> u64 {
    replays.first().map_or(0, |replay| {
        let counters = &replay.counters;
        let misses = counters.misses.send.total() + counters.misses.receive.total();
        counters.hits.send + counters.hits.receive + misses
    })
}

fn percent(share: f64) -> String {
    format!("{} %", number::short(100.0 * share))
}

#[cfg(test)]
mod tests {
    use memferry_bench::replay::CacheShape;

    use super::*;
    use memferry_memory::lookup::LookupCounters;

    fn sample() -> Vec<ReplayResult> {
        let mut counters = LookupCounters::default();
        counters.hits.send = 90;
        counters.misses.send.cold = 7;
        counters.misses.receive.conflict = 3;
        vec![ReplayResult { shape: CacheShape::REFERENCE, counters }]
    }

    #[test]
    fn a_line_names_the_shape_and_counts_every_kind() {
        let text = text(Path::new("a.trace"), &sample());
        assert!(text.starts_with("a.trace: 100 lookups\n"), "{text}");
        let line = text.lines().find(|line| line.contains("C16K L64 A4")).unwrap();
        let words: Vec<_> = line.split_whitespace().skip(3).collect();
        assert_eq!(words, ["10.0", "%", "7", "0", "0", "0", "0", "3"]);
    }

    #[test]
    fn the_object_has_a_row_for_each_shape() {
        let json = json(Path::new("a.trace"), &sample());
        assert_eq!(json["lookups"], 100);
        assert_eq!(json["rows"][0]["line_entries"], 64);
        assert_eq!(json["rows"][0]["send"]["cold"], 7);
    }
}
