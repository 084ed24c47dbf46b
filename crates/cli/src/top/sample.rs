//! Counters of all processes at one time, and what changed between two times.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use memferry_sys::stats::reader::{BlockView, ProcessView, processes};
use serde::Serialize;

/// The counters of processes at one time.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) unix_seconds: f64,
    pub(super) processes: Vec<ProcessView>,
}

impl Sample {
    /// Reads the counters of all processes, or of one.
    pub(super) fn read(pid: Option<u32>) -> std::io::Result<Self> {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let processes = processes(pid)?;
        Ok(Self { at: Instant::now(), unix_seconds: unix.as_secs_f64(), processes })
    }

    /// A process by its number.
    pub(super) fn process(&self, pid: u32) -> Option<&ProcessView> {
        self.processes.iter().find(|process| process.pid == pid)
    }

    /// The seconds since an earlier sample.
    pub(super) fn seconds_since(&self, before: &Self) -> f64 {
        self.at.duration_since(before.at).as_secs_f64()
    }
}

/// The fields with the copies of a thread, by path.
pub(super) const COPY_FIELDS: [(&str, &str); 5] = [
    ("inline", "copies_inline"),
    ("single", "copies_single"),
    ("shared", "copies_shared"),
    ("hybrid", "copies_hybrid"),
    ("parts", "copies_parts"),
];

/// Sums over all blocks of a process.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Totals {
    pub(super) copies: u64,
    pub(super) copy_bytes: u64,
    pub(super) messages: u64,
    pub(super) message_bytes: u64,
    pub(super) waits: u64,
    pub(super) fallbacks: u64,
    pub(super) faults: u64,
    /// Descriptors in queues now.
    pub(super) depth: u64,
    #[serde(skip)]
    latency: Histogram,
}

impl Totals {
    pub(super) fn of(process: &ProcessView) -> Self {
        let mut totals = Self::default();
        process.blocks.iter().for_each(|block| totals.add(block));
        totals
    }

    fn add(&mut self, block: &BlockView) {
        let add = |sum: &mut u64, field: &str| *sum = sum.wrapping_add(block.sum(field));
        match block.kind.as_str() {
            "thread" => {
                COPY_FIELDS.iter().for_each(|(_, field)| add(&mut self.copies, field));
                add(&mut self.copy_bytes, "copy_bytes");
                add(&mut self.waits, "waits");
                add(&mut self.fallbacks, "fallbacks");
                add(&mut self.faults, "faults");
                self.latency.add(block.values("copy_latency"));
            }
            "channel" => add(&mut self.depth, "depth"),
            "endpoint" => add(&mut self.waits, "sleeps"),
            "peer" => {
                add(&mut self.messages, "sent");
                add(&mut self.messages, "received");
                add(&mut self.message_bytes, "sent_bytes");
                add(&mut self.message_bytes, "received_bytes");
                add(&mut self.fallbacks, "fallbacks");
                self.latency.add(block.values("send_latency"));
            }
            _ => {}
        }
    }
}

/// A histogram by powers of two.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Histogram(Vec<u64>);

impl Histogram {
    pub(super) fn of(values: &[u64]) -> Self {
        Self(values.to_vec())
    }

    pub(super) fn add(&mut self, values: &[u64]) {
        self.0.resize(self.0.len().max(values.len()), 0);
        self.0.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(*value));
    }

    /// What was added since an earlier histogram; all of it if nothing was.
    pub(super) fn since(&self, before: &Self) -> Self {
        let earlier = before.0.iter().chain(std::iter::repeat(&0));
        let added: Vec<u64> =
            self.0.iter().zip(earlier).map(|(now, before)| now.saturating_sub(*before)).collect();
        if added.iter().all(|count| *count == 0) { self.clone() } else { Self(added) }
    }

    /// The upper bound of the class in which a quantile is.
    pub(super) fn quantile(&self, share: f64) -> Option<u64> {
        let total = self.0.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
        let rank = (total as f64 * share).ceil().max(1.0);
        let mut below = 0.0;
        let class = self.0.iter().position(|count| {
            below += *count as f64;
            total > 0 && below >= rank
        })?;
        Some(1u64.checked_shl(class as u32 + 1).unwrap_or(u64::MAX))
    }
}

/// What happened per second.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    pub(super) copies: f64,
    pub(super) copy_bytes: f64,
    pub(super) messages: f64,
    pub(super) message_bytes: f64,
    pub(super) waits: f64,
    pub(super) fallbacks: f64,
}

/// A process in the table.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) totals: Totals,
    pub(super) rates: Rates,
    /// Quantiles of what was timed between the samples, or ever if nothing was, in nanoseconds.
    pub(super) p50_ns: Option<u64>,
    pub(super) p99_ns: Option<u64>,
}

impl Row {
    /// The rows of a sample. A process that was not in the sample before has no rates.
    pub(super) fn all(before: Option<&Sample>, now: &Sample) -> Vec<Self> {
        let row = |process: &ProcessView| {
            let totals = Totals::of(process);
            let earlier = before.and_then(|sample| {
                let seconds = now.seconds_since(sample);
                let process = sample.process(process.pid)?;
                (seconds > 0.0).then(|| (Totals::of(process), seconds))
            });
            let (earlier, seconds) = earlier.unwrap_or_else(|| (totals.clone(), 1.0));
            let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            let latency = totals.latency.since(&earlier.latency);
            Self {
                pid: process.pid,
                name: process.name.clone(),
                rates: Rates {
                    copies: rate(totals.copies, earlier.copies),
                    copy_bytes: rate(totals.copy_bytes, earlier.copy_bytes),
                    messages: rate(totals.messages, earlier.messages),
                    message_bytes: rate(totals.message_bytes, earlier.message_bytes),
                    waits: rate(totals.waits, earlier.waits),
                    fallbacks: rate(totals.fallbacks, earlier.fallbacks),
                },
                p50_ns: latency.quantile(0.5),
                p99_ns: latency.quantile(0.99),
                totals,
            }
        };
        now.processes.iter().map(row).collect()
    }
}

/// The block of the same thing in an earlier sample.
pub(super) fn same_block<'a>(
    before: Option<&'a ProcessView>,
    block: &BlockView,
) -> Option<&'a BlockView> {
    let is_same = |other: &&BlockView| {
        other.kind == block.kind && other.id == block.id && other.name == block.name
    };
    before?.blocks.iter().find(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_upper_bound_of_its_class() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        let mut counts = [0; 32];
        (counts[3], counts[10]) = (98, 2);
        histogram.add(&counts);
        assert_eq!(histogram.quantile(0.5), Some(16));
        assert_eq!(histogram.quantile(0.99), Some(2048));
    }

    #[test]
    fn a_histogram_shows_what_is_new_or_all_of_it() {
        let (old, new) = (Histogram::of(&[5, 0, 1]), Histogram::of(&[5, 7, 1]));
        assert_eq!(new.since(&old), Histogram::of(&[0, 7, 0]));
        assert_eq!(new.since(&new), new);
    }

    #[test]
    fn a_lying_histogram_is_added_up_without_harm() {
        let full = Histogram::of(&[u64::MAX; 64]);
        assert_eq!(full.quantile(0.99), Some(2));
        let mut twice = full.clone();
        twice.add(&[u64::MAX; 64]);
        assert!(Histogram::of(&[0; 70]).quantile(0.5).is_none());
    }
}
