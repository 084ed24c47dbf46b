//! What a lookup takes, in bytes.

/// The bytes of a lookup, by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// The translations in the cache, or in the full table.
    pub entries: usize,
    /// Whose they are, who uses them, when they were used.
    pub tags: usize,
    /// The order of use in the sets of the cache.
    pub order: usize,
    /// The tables behind the cache: what is attached, and what is remembered of what was. Counted
    /// from the number of records, without the slack of the allocator.
    pub table: usize,
    /// The processes.
    pub process_table: usize,
    /// The miss events, with their most numerous.
    pub queue: usize,
    /// The counters of hits.
    pub counters: usize,
}

impl MemoryUse {
    /// What the place where copies are initiated needs: the cache, or the full table.
    pub fn near(&self) -> usize {
        self.entries + self.tags + self.order
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.near() + self.table + self.process_table + self.queue + self.counters
    }
}
