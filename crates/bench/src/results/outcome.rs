//! The result of a bench: measured rows, a summary of a few numbers, and notes for the reader. The
//! tables, the report and `--json` are all views of these types.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use crate::host::machine::Machine;
use crate::results::summary_keys::{self, KeyResult, TargetStatus};

/// The result of one run of one bench.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// The name of the bench.
    pub bench: String,
    /// The machine on which the bench ran.
    pub machine: Machine,
    /// The share of the processors that other programs and other virtual machines used during the
    /// run. `None` if it is unknown.
    pub busy: Option<f64>,
    /// The share of the time during which a CPU quota stopped this program. `None` if it is
    /// unknown.
    pub throttled: Option<f64>,
    /// The versions of the measured software, by name.
    pub versions: BTreeMap<String, String>,
    /// The measured points.
    pub rows: Vec<Row>,
    /// The most important numbers, by key.
    pub summary: Summary,
    /// Peers that were not measured, because they are not installed or failed.
    pub missing: Vec<String>,
    /// Notes for the reader, in sentences.
    pub notes: Vec<String>,
}

/// One measured point: the median over the rounds, with its quartiles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The figure of this point, such as `hot`.
    pub figure: String,
    /// The series of this point, such as `memcpy`. Memferry's own series begin with `memferry`.
    pub series: String,
    /// The size on the x axis in bytes; 0 if the point has no size.
    pub bytes: u64,
    /// The median over the rounds.
    #[serde(deserialize_with = "number_or_null")]
    pub value: f64,
    /// `GB/s`, `ns`, `ratio`, or the name of what is counted, such as `frames`.
    pub unit: String,
    /// The lower quartile.
    #[serde(deserialize_with = "number_or_null")]
    pub low: f64,
    /// The upper quartile.
    #[serde(deserialize_with = "number_or_null")]
    pub high: f64,
    /// The number of measured rounds.
    pub rounds: u32,
}

/// Numbers by key, in the order of insertion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary(Vec<(String, f64)>);

/// A disturbance that makes the measured times unreliable, with the share of the machine or of the
/// time that it affected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Disturbance {
    /// Other programs used the processors.
    Busy(f64),
    /// A CPU quota stopped this program.
    Throttled(f64),
}

impl Outcome {
    /// An outcome without rows, for this machine and this version of the program.
    pub fn new(bench: &str) -> Self {
        Self {
            bench: bench.to_owned(),
            machine: Machine::detect(),
            busy: None,
            throttled: None,
            versions: own_version(),
            rows: Vec::new(),
            summary: Summary::default(),
            missing: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The disturbance of this run, if one exceeds 10 %.
    pub fn disturbance(&self) -> Option<Disturbance> {
        const THRESHOLD: f64 = 0.1;
        let much = |share: Option<f64>| share.filter(|&share| share > THRESHOLD);
        // The quota takes precedence: while it throttles, closing other programs does not help.
        let throttled = much(self.throttled).map(Disturbance::Throttled);
        throttled.or_else(|| much(self.busy).map(Disturbance::Busy))
    }

    /// Compares a number of the summary with its target.
    pub fn judge(&self, key: &str, value: f64) -> KeyResult {
        let (cores, disturbance) = (self.machine.cores, self.disturbance());
        summary_keys::judge_on(cores, &self.bench, key, value, disturbance)
    }

    /// The keys that miss their targets, with their numbers.
    pub fn missed_targets(&self) -> impl Iterator<Item = String> {
        self.summary.iter().filter_map(|(key, value)| {
            let judged = self.judge(key, value);
            let is_missed = judged.status == TargetStatus::Missed;
            is_missed.then(|| {
                format!("{}.{key} ({}, target {})", self.bench, judged.value, judged.target)
            })
        })
    }

    /// The missing series in two lists: Memferry's own, which failed, and peers that are not
    /// available.
    pub fn failed_and_missing(&self) -> (Vec<&str>, Vec<&str>) {
        self.missing.iter().map(String::as_str).partition(|name| name.starts_with("memferry"))
    }
}

impl Row {
    /// Summarizes the rounds of one point. Without rounds, the value is NaN, which is shown as a
    /// dash.
    pub fn of_rounds(figure: &str, series: &str, bytes: u64, unit: &str, rounds: &[f64]) -> Self {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self {
            figure: figure.to_owned(),
            series: series.to_owned(),
            bytes,
            value: quantile(&sorted, 0.5),
            unit: unit.to_owned(),
            low: quantile(&sorted, 0.25),
            high: quantile(&sorted, 0.75),
            rounds: rounds.len() as u32,
        }
    }
}

impl Summary {
    /// Sets the number of a key. An existing key keeps its position.
    pub fn set(&mut self, key: &str, value: f64) {
        match self.0.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// The number of a key.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.iter().find_map(|(known, value)| (known == key).then_some(value))
    }

    /// All keys with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(key, value)| (key.as_str(), *value))
    }

    /// Whether the summary holds no numbers.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Summary {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.iter() {
            map.serialize_entry(key, &value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Summary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SummaryVisitor;

        impl<'de> Visitor<'de> for SummaryVisitor {
            type Value = Summary;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("numbers by key")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Summary, A::Error> {
                let mut summary = Summary::default();
                while let Some((key, value)) = map.next_entry::<String, Option<f64>>()? {
                    summary.set(&key, value.unwrap_or(f64::NAN));
                }
                Ok(summary)
            }
        }

        deserializer.deserialize_map(SummaryVisitor)
    }
}

/// Deserializes a number. `null` stands for a number that was not measured.
fn number_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The version of this program, as it appears in every outcome.
pub fn own_version() -> BTreeMap<String, String> {
    BTreeMap::from([("memferry".to_owned(), env!("CARGO_PKG_VERSION").to_owned())])
}

/// A quantile of sorted numbers, linearly interpolated.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = share * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn a_row_holds_the_median_and_the_quartiles() {
        let row = Row::of_rounds("hot", "memcpy", 64, "ns", &[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!((row.low, row.value, row.high, row.rounds), (2.0, 3.0, 4.0, 5));
        let even = Row::of_rounds("hot", "memcpy", 64, "ns", &[1.0, 2.0]);
        assert_eq!(even.value, 1.5);
        assert!(Row::of_rounds("hot", "memcpy", 64, "ns", &[]).value.is_nan());
    }

    #[test]
    fn an_outcome_has_the_keys_of_the_contract() {
        let json = serde_json::to_value(sample::latency()).unwrap();
        for key in ["bench", "machine", "busy", "versions", "rows", "summary", "missing", "notes"] {
            assert!(json.get(key).is_some(), "{key}");
        }
        let row = &json["rows"][0];
        for key in ["figure", "series", "bytes", "value", "unit", "low", "high", "rounds"] {
            assert!(row.get(key).is_some(), "{key}");
        }
        assert!(json["machine"]["streaming"].is_array());
    }

    #[test]
    fn a_summary_keeps_the_order_its_keys_were_set_in() {
        let mut summary = Summary::default();
        summary.set("zebra", 1.0);
        summary.set("ant", 2.0);
        summary.set("zebra", 3.0);
        assert_eq!(serde_json::to_string(&summary).unwrap(), r#"{"zebra":3.0,"ant":2.0}"#);
        assert_eq!(summary.get("ant"), Some(2.0));
        assert_eq!(summary.get("cat"), None);
    }

    #[test]
    fn an_outcome_is_read_back_as_it_was_written() {
        let mut outcome = sample::empty("overlap");
        outcome.rows.push(Row::of_rounds("hot", "memcpy", 64, "ns", &[1.5]));
        outcome.rows.push(Row::of_rounds("hot", "memcpy", 64, "ns", &[]));
        outcome.summary.set("zebra", 2.5);
        outcome.summary.set("ant", f64::NAN);
        let written = serde_json::to_string(&outcome).unwrap();
        let read: Outcome = serde_json::from_str(&written).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), written);
        assert!(read.rows.last().unwrap().value.is_nan());
    }

    #[test]
    fn a_number_that_was_not_measured_is_null_in_json() {
        let row = Row::of_rounds("hot", "memcpy", 64, "ns", &[]);
        assert!(serde_json::to_value(row).unwrap()["value"].is_null());
    }
}
