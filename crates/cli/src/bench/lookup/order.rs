//! The words between the bench and its workers: one line of JSON asks, one line of JSON answers.
//! Every member gets every order, the leader answers for all.

use memferry_memory::lookup::{Counters, Histogram, MemoryUse, Misses, Settings};
use serde::{Deserialize, Serialize};

use super::shape::Shape;
use super::workload::Problem;

/// What workers are told to do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Take memory for a program.
    Begin(Problem),
    /// Expose it over one more endpoint and attach that of the others. Endpoints are numbered from 0.
    Open(Table),
    /// Run the program over an endpoint.
    Run(usize),
    /// The leader puts to the next member, in places of a pattern.
    Put { endpoint: usize, pattern: Pattern },
    /// Say what the lookup of an endpoint has counted and takes.
    Report(usize),
    /// Close an endpoint.
    Close(usize),
    /// Give the memory back, and close all endpoints.
    End,
}

/// How an endpoint looks its windows up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Table {
    /// The static full table.
    Full,
    /// A cache. With a number of lines, no more than these stay attached behind it.
    Cache { shape: Shape, most_lines: Option<usize> },
}

/// Puts of one size: so many of a hundred go where the cache has nothing, the others where it has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Pattern {
    pub(super) bytes: usize,
    pub(super) miss_percent: usize,
    pub(super) count: usize,
}

/// What the leader answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Done.
    Done,
    /// A program ran, or puts were done.
    Ran(Ran),
    /// What a lookup says of itself.
    Report(Box<Report>),
    /// It failed.
    Failed(String),
}

/// A run of a program.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Ran {
    /// How long it took; for puts, one of them.
    pub(super) ns: f64,
    /// The processor time that the leader's process has used meanwhile.
    pub(super) processor_ns: f64,
    /// The same for every right run of a program.
    pub(super) digest: u64,
}

/// What a lookup has counted, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) hits: u64,
    pub(super) send: Kinds,
    pub(super) receive: Kinds,
    pub(super) attached: u64,
    pub(super) detached: u64,
    pub(super) delay_ns: Spread,
    pub(super) processing_ns: Spread,
    pub(super) memory: Components,
    /// What the kernel's page tables of the leader take.
    pub(super) page_table_bytes: u64,
    /// How many bytes of windows the leader has attached.
    pub(super) attached_window_bytes: u64,
}

/// Misses by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Kinds {
    pub(crate) cold: u64,
    pub(crate) capacity: u64,
    pub(crate) conflict: u64,
}

/// Half of the values are no larger than the median, nine tenths no larger than the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) count: u64,
    pub(super) median: u64,
    pub(super) percentile_90: u64,
    pub(super) max: u64,
}

/// Bytes by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Components {
    pub(super) entries: usize,
    pub(super) tags: usize,
    pub(super) order: usize,
    pub(super) table: usize,
    pub(super) process_table: usize,
    pub(super) queue: usize,
    pub(super) counters: usize,
}

impl Table {
    /// The cache that the keys are measured with.
    pub(super) const TELLING: Self = Self::of(Shape::TELLING);

    pub(super) const fn of(shape: Shape) -> Self {
        Self::Cache { shape, most_lines: None }
    }

    pub(super) fn settings(self) -> Settings {
        match self {
            Self::Full => Settings::full(),
            Self::Cache { shape, most_lines } => {
                let usual = Settings::dynamic(shape.geometry());
                let most = most_lines.unwrap_or(usual.high_water_lines);
                // Sweeps as often as that many lines come, so that no more than twice as many stay.
                let sweep_every = usual.sweep_every.min(most as u64);
                Settings { high_water_lines: most, sweep_every, ..usual }
            }
        }
    }
}

impl Kinds {
    pub(crate) fn total(self) -> u64 {
        self.cold + self.capacity + self.conflict
    }

    /// Each with its name.
    pub(crate) fn named(self) -> [(&'static str, u64); 3] {
        [("cold", self.cold), ("capacity", self.capacity), ("conflict", self.conflict)]
    }
}

impl From<Misses> for Kinds {
    fn from(misses: Misses) -> Self {
        Self { cold: misses.cold, capacity: misses.capacity, conflict: misses.conflict }
    }
}

impl From<Histogram> for Spread {
    fn from(histogram: Histogram) -> Self {
        Self {
            count: histogram.count(),
            median: histogram.median(),
            percentile_90: histogram.percentile_90(),
            max: histogram.max(),
        }
    }
}

impl Components {
    /// What stands where copies are initiated: the cache, or the full table.
    pub(super) fn near(self) -> usize {
        self.entries + self.tags + self.order
    }

    /// What depends neither on the cache nor on what is attached.
    pub(super) fn rest(self) -> usize {
        self.process_table + self.queue + self.counters
    }
}

impl From<MemoryUse> for Components {
    fn from(memory: MemoryUse) -> Self {
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

impl Report {
    pub(super) fn new(counters: &Counters, memory: MemoryUse) -> Self {
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
    use super::super::workload::Kind;
    use super::*;

    #[test]
    fn orders_and_answers_survive_the_way_through_a_line() {
        let orders = [
            Order::Begin(Problem { kind: Kind::Lu, scale: 64 }),
            Order::Open(Table::Full),
            Order::Open(Table::TELLING),
            Order::Put { endpoint: 1, pattern: Pattern { bytes: 8, miss_percent: 25, count: 9 } },
            Order::End,
        ];
        for order in orders {
            let line = serde_json::to_string(&order).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
        }
        // Digests use all 64 bits.
        let ran = Ran { ns: 1.5, processor_ns: 0.5, digest: u64::MAX - 1 };
        let line = serde_json::to_string(&Answer::Ran(ran)).unwrap();
        assert_eq!(serde_json::from_str::<Answer>(&line).unwrap(), Answer::Ran(ran));
    }

    #[test]
    fn few_lines_behind_a_cache_are_swept_often() {
        let few = Table::Cache { shape: Shape::TELLING, most_lines: Some(512) };
        assert_eq!(few.settings().high_water_lines, 512);
        assert!(few.settings().sweep_every <= 512);
    }
}
