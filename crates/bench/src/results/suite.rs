//! Several outcomes as one JSON object. Rows contain the name of their bench and summary keys have
//! it as prefix, so a reader of one bench's object can also read a suite's.

use serde_json::{Map, Value, json};

use crate::results::outcome::{Machine, Outcome, own_version};

/// Joins outcomes into the object that `--json` prints for a suite.
pub fn join(name: &str, outcomes: &[Outcome]) -> anyhow::Result<Value> {
    let mut versions = own_version();
    let mut rows = Vec::new();
    let mut summary = Map::new();
    let mut missing: Vec<&str> = Vec::new();
    let mut notes = Vec::new();
    for outcome in outcomes {
        versions.extend(outcome.versions.clone());
        for row in &outcome.rows {
            let mut tagged = Map::from_iter([("bench".to_owned(), json!(outcome.bench))]);
            if let Value::Object(fields) = serde_json::to_value(row)? {
                tagged.extend(fields);
            }
            rows.push(Value::Object(tagged));
        }
        for (key, value) in outcome.summary.iter() {
            summary.insert(format!("{}.{key}", outcome.bench), json!(value));
        }
        for peer in &outcome.missing {
            if !missing.contains(&peer.as_str()) {
                missing.push(peer);
            }
        }
        notes.extend(outcome.notes.iter().map(|note| format!("{}: {note}", outcome.bench)));
    }
    // The suite reports the maximum disturbance of its benches.
    let busy = outcomes.iter().filter_map(|outcome| outcome.busy).reduce(f64::max);
    let throttled = outcomes.iter().filter_map(|outcome| outcome.throttled).reduce(f64::max);
    Ok(json!({
        "bench": name,
        "machine": Machine::detect(),
        "busy": busy,
        "throttled": throttled,
        "versions": versions,
        "outcomes": outcomes,
        "rows": rows,
        "summary": summary,
        "missing": missing,
        "notes": notes,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn a_suite_has_the_keys_of_the_contract() {
        let suite = sample::suite();
        let json = join("suite", &suite).unwrap();
        for key in
            ["bench", "machine", "busy", "throttled", "versions", "outcomes", "rows", "summary"]
        {
            assert!(json.get(key).is_some(), "{key}");
        }
        assert_eq!(json["bench"], "suite");
        assert_eq!(json["outcomes"].as_array().unwrap().len(), suite.len());
    }

    #[test]
    fn rows_and_keys_of_a_suite_say_which_bench_they_are_from() {
        let suite = sample::suite();
        let json = join("all", &suite).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), suite.iter().map(|outcome| outcome.rows.len()).sum::<usize>());
        assert_eq!(rows[0]["bench"], "copy-latency");
        assert_eq!(rows[0]["series"], "memcpy");
        assert_eq!(json["summary"]["copy-latency.hot_4m_vs_memcpy"], 2.31);
        assert_eq!(json["missing"], json!(["ipc-channel"]));
    }
}
