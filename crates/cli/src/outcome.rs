//! What a bench hands back: measured rows, the few numbers that sum them up, and what the reader
//! must know to judge them. The tables, the report and `--json` are all views of these types.

use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

pub(crate) use crate::machine::Machine;
use crate::summary_keys::{self, Judged};

/// Everything one run of one bench found out.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    /// The name of the bench.
    pub(crate) bench: String,
    /// Where it ran.
    pub(crate) machine: Machine,
    /// The share of the processors that other programs and other machines used meanwhile. `None` if that
    /// is not known.
    pub(crate) busy: Option<f64>,
    /// The share of the time in which a CPU quota stopped this program meanwhile. `None` if that is not
    /// known.
    pub(crate) throttled: Option<f64>,
    /// Versions of whatever was measured, by name.
    pub(crate) versions: BTreeMap<String, String>,
    /// The measured points.
    pub(crate) rows: Vec<Row>,
    /// The telling numbers, by key.
    pub(crate) summary: Summary,
    /// Peers that should have been measured and were not: they are not installed, or failed.
    pub(crate) missing: Vec<String>,
    /// Sentences for the reader.
    pub(crate) notes: Vec<String>,
}

/// One measured point: the median over the rounds, with its quartiles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The plot this point belongs to, such as `hot`.
    pub(crate) figure: String,
    /// Its line in the plot, such as `memcpy`. Ours begin with `memferry`.
    pub(crate) series: String,
    /// Its place on the x axis, 0 where size plays no part.
    pub(crate) bytes: u64,
    /// The median.
    pub(crate) value: f64,
    /// `GB/s`, `ns`, `ratio`, or what is counted, such as `frames`.
    pub(crate) unit: String,
    /// The lower quartile.
    pub(crate) low: f64,
    /// The upper quartile.
    pub(crate) high: f64,
    /// How many rounds were measured.
    pub(crate) rounds: u32,
}

/// Numbers by key, in the order they were set.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Summary(Vec<(String, f64)>);

/// What makes times say little, for which share of the time or of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Disturbance {
    /// Others used the processors.
    Busy(f64),
    /// A CPU quota stopped this program.
    Throttled(f64),
}

impl Outcome {
    /// An outcome without rows, made on this machine by this version.
    pub(crate) fn new(bench: &str) -> Self {
        Self {
            bench: bench.to_owned(),
            machine: Machine::look(),
            busy: None,
            throttled: None,
            versions: own_version(),
            rows: Vec::new(),
            summary: Summary::default(),
            missing: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Why times say little, if they do.
    pub(crate) fn disturbance(&self) -> Option<Disturbance> {
        const MUCH: f64 = 0.1;
        let much = |share: Option<f64>| share.filter(|&share| share > MUCH);
        // Whoever closes other programs helps nothing as long as the quota is there.
        let throttled = much(self.throttled).map(Disturbance::Throttled);
        throttled.or_else(|| much(self.busy).map(Disturbance::Busy))
    }

    /// A number of the summary, judged.
    pub(crate) fn judge(&self, key: &str, value: f64) -> Judged {
        summary_keys::judge(&self.bench, key, value, self.disturbance())
    }

    /// What is missing, in two: what happened to contestants of our own, which are failures, and
    /// peers that are not here.
    pub(crate) fn failed_and_absent(&self) -> (Vec<&str>, Vec<&str>) {
        self.missing.iter().map(String::as_str).partition(|name| name.starts_with("memferry"))
    }
}

impl Row {
    /// Sums up the rounds of one point. Without rounds, the value is not a number and is shown
    /// as a dash.
    pub(crate) fn of_rounds(
        figure: &str,
        series: &str,
        bytes: u64,
        unit: &str,
        rounds: &[f64],
    ) -> Self {
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
    /// Sets a number; a key set before keeps its place.
    pub(crate) fn set(&mut self, key: &str, value: f64) {
        match self.0.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// The number of a key.
    #[cfg(test)]
    pub(crate) fn get(&self, key: &str) -> Option<f64> {
        self.iter().find_map(|(known, value)| (known == key).then_some(value))
    }

    /// All keys with their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(key, value)| (key.as_str(), *value))
    }

    /// Whether no number was set.
    pub(crate) fn is_empty(&self) -> bool {
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

/// The version of this program, as every outcome names it.
pub(crate) fn own_version() -> BTreeMap<String, String> {
    BTreeMap::from([("memferry".to_owned(), env!("CARGO_PKG_VERSION").to_owned())])
}

/// A quantile of sorted numbers, interpolated between neighbours.
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
    use crate::sample;

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
    fn a_number_that_was_not_measured_is_null_in_json() {
        let row = Row::of_rounds("hot", "memcpy", 64, "ns", &[]);
        assert!(serde_json::to_value(row).unwrap()["value"].is_null());
    }
}
