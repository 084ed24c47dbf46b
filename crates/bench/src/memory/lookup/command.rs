//! Protocol between the bench and its workers: one line of JSON is a command, one line of JSON is
//! its reply. Every member gets every command, and the leader replies for all.

use memferry_memory::lookup::{Histogram, LookupConfig, LookupCounters, LookupFootprint};
use serde::{Deserialize, Serialize};

use super::workload::Problem;
use crate::replay::CacheShape;
use crate::replay::MissTotals;

/// A command to the workers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum LookupCommand {
    /// Allocate memory for a program.
    Begin(Problem),
    /// Expose the memory over one more endpoint and attach that of the other members. Endpoints are
    /// numbered from 0.
    Open(LookupMode),
    /// Run the program over an endpoint.
    Run(usize),
    /// The leader puts to the next member, at the offsets of a pattern.
    Put { endpoint: usize, pattern: PutPattern },
    /// Report the counters and the memory of the lookup of an endpoint.
    Report(usize),
    /// Close an endpoint.
    Close(usize),
    /// Free the memory, and close all endpoints.
    End,
}

/// Table with which an endpoint translates accesses to its windows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum LookupMode {
    /// The static full table.
    Full,
    /// A cache. With `most_lines`, about this many lines stay attached behind it.
    Cache { shape: CacheShape, most_lines: Option<usize> },
}

/// Puts of one size: `miss_percent` of 100 puts go to lines that are not in the cache, the others
/// to lines that are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct PutPattern {
    pub(super) bytes: usize,
    pub(super) miss_percent: usize,
    pub(super) count: usize,
}

/// Reply of the leader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum LookupReply {
    /// The command is done.
    Done,
    /// Times of a program or of puts.
    Ran(RunResult),
    /// Counters and memory of a lookup.
    Report(Box<LookupReport>),
    /// The command failed.
    Failed(String),
}

/// Result of a run of a program or of puts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct RunResult {
    /// Time of the run; for puts, time of one put.
    pub(super) ns: f64,
    /// Processor time that the leader's process used during the run.
    pub(super) processor_ns: f64,
    /// Checksum of the result, the same for every correct run of a program.
    pub(super) digest: u64,
}

/// Counters of a lookup, and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct LookupReport {
    pub(super) hits: u64,
    pub(super) send: MissTotals,
    pub(super) receive: MissTotals,
    pub(super) attached: u64,
    pub(super) detached: u64,
    pub(super) delay_ns: Quantiles,
    pub(super) processing_ns: Quantiles,
    pub(super) memory: MemoryComponents,
    /// Bytes of the leader's page tables in the kernel.
    pub(super) page_table_bytes: u64,
    /// Bytes of windows that the leader has attached.
    pub(super) attached_window_bytes: u64,
}

/// Median and 0.9 quantile of a distribution, and its number of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Quantiles {
    pub(super) count: u64,
    pub(super) median: u64,
    pub(super) percentile_90: u64,
    pub(super) max: u64,
}

/// Bytes by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct MemoryComponents {
    pub(super) entries: usize,
    pub(super) tags: usize,
    pub(super) order: usize,
    pub(super) table: usize,
    pub(super) process_table: usize,
    pub(super) queue: usize,
    pub(super) counters: usize,
}

impl LookupMode {
    /// The cache of the summary keys.
    pub(super) const REFERENCE: Self = Self::of(CacheShape::REFERENCE);

    pub(super) const fn of(shape: CacheShape) -> Self {
        Self::Cache { shape, most_lines: None }
    }

    pub(super) fn config(self) -> LookupConfig {
        match self {
            Self::Full => LookupConfig::flat(),
            Self::Cache { shape, most_lines } => {
                let usual = LookupConfig::cached(shape.geometry());
                let most = most_lines.unwrap_or(usual.high_water_lines);
                // Sweeps after every `most` new lines, so that at most twice as many stay attached.
                let sweep_every = usual.sweep_every.min(most as u64);
                LookupConfig { high_water_lines: most, sweep_every, ..usual }
            }
        }
    }
}

impl From<Histogram> for Quantiles {
    fn from(histogram: Histogram) -> Self {
        Self {
            count: histogram.count(),
            median: histogram.median(),
            percentile_90: histogram.percentile_90(),
            max: histogram.max(),
        }
    }
}

impl MemoryComponents {
    /// Bytes of the table that copies use: the cache, or the full table.
    pub(super) fn initiator_bytes(self) -> usize {
        self.entries + self.tags + self.order
    }

    /// Bytes that depend neither on the cache nor on the attached lines.
    pub(super) fn fixed_bytes(self) -> usize {
        self.process_table + self.queue + self.counters
    }
}

impl From<LookupFootprint> for MemoryComponents {
    fn from(memory: LookupFootprint) -> Self {
        Self {
            entries: memory.entries,
            tags: memory.tags,
            order: memory.order,
            table: memory.table,
            process_table: memory.process_table,
            queue: memory.queue,
            counters: memory.counters,
        }
    }
}

impl LookupReport {
    pub(super) fn new(counters: &LookupCounters, memory: LookupFootprint) -> Self {
        Self {
            hits: counters.hits.send + counters.hits.receive,
            send: counters.misses.send.into(),
            receive: counters.misses.receive.into(),
            attached: counters.attached,
            detached: counters.detached,
            delay_ns: counters.delay_ns.into(),
            processing_ns: counters.processing_ns.into(),
            memory: memory.into(),
            ..Self::default()
        }
    }

    pub(super) fn misses(&self) -> u64 {
        self.send.total() + self.receive.total()
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::ProgramKind;
    use super::*;

    #[test]
    fn orders_and_answers_survive_the_way_through_a_line() {
        let orders = [
            LookupCommand::Begin(Problem { kind: ProgramKind::Lu, scale: 64 }),
            LookupCommand::Open(LookupMode::Full),
            LookupCommand::Open(LookupMode::REFERENCE),
            LookupCommand::Put {
                endpoint: 1,
                pattern: PutPattern { bytes: 8, miss_percent: 25, count: 9 },
            },
            LookupCommand::End,
        ];
        for order in orders {
            let line = serde_json::to_string(&order).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<LookupCommand>(&line).unwrap(), order);
        }
        // Digests use all 64 bits.
        let ran = RunResult { ns: 1.5, processor_ns: 0.5, digest: u64::MAX - 1 };
        let line = serde_json::to_string(&LookupReply::Ran(ran)).unwrap();
        assert_eq!(serde_json::from_str::<LookupReply>(&line).unwrap(), LookupReply::Ran(ran));
    }

    #[test]
    fn few_lines_behind_a_cache_are_swept_often() {
        let few = LookupMode::Cache { shape: CacheShape::REFERENCE, most_lines: Some(512) };
        assert_eq!(few.config().high_water_lines, 512);
        assert!(few.config().sweep_every <= 512);
    }
}
