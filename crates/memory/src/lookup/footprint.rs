//! Memory use of a lookup.

/// The memory of a lookup, in bytes by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookupFootprint {
    /// The translations in the cache or in the flat table.
    pub entries: usize,
    /// Their tags: line key, users, last use.
    pub tags: usize,
    /// The LRU order of the sets.
    pub order: usize,
    /// The tables behind the cache: attached lines, and the history of detached ones. Computed from
    /// the number of records, without overhead of the allocator.
    pub table: usize,
    /// The process table.
    pub process_table: usize,
    /// The miss queue at its maximum length.
    pub queue: usize,
    /// The hit counters.
    pub counters: usize,
}

impl LookupFootprint {
    /// The memory on the path of a hit: the cache, or the flat table.
    pub fn cache_total(&self) -> usize {
        self.entries + self.tags + self.order
    }

    /// The sum.
    pub fn total(&self) -> usize {
        self.cache_total() + self.table + self.process_table + self.queue + self.counters
    }
}
