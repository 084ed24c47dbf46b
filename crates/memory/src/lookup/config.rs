//! Configuration of a lookup.

use super::geometry::Geometry;

/// The configuration of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupConfig {
    /// A cache or a flat table.
    pub kind: TableKind,
    /// The behaviour of a request that misses.
    pub policy: MissPolicy,
    /// Maximum number of attached lines before a sweep detaches some.
    pub high_water_lines: usize,
    /// The number of fills between two periodic sweeps.
    pub sweep_every: u64,
    /// Maximum number of queued misses.
    pub queue_length: usize,
    /// Whether a thread that would wait for its miss handles queued misses instead.
    pub inline_misses: bool,
}

impl LookupConfig {
    /// A cache of this geometry. Misses wait and are handled inline; the table keeps 64 times as
    /// many lines as the cache.
    pub fn cached(geometry: Geometry) -> Self {
        Self {
            kind: TableKind::Cached(geometry),
            policy: MissPolicy::Wait,
            high_water_lines: geometry.lines().saturating_mul(64),
            sweep_every: 4096,
            queue_length: 256,
            inline_misses: true,
        }
    }

    /// The flat table, for comparison.
    #[cfg(feature = "comparison")]
    pub fn flat() -> Self {
        // A flat table handles no misses, so the other settings have no effect.
        Self {
            kind: TableKind::Flat,
            policy: MissPolicy::Wait,
            high_water_lines: usize::MAX,
            sweep_every: u64::MAX,
            queue_length: 1,
            inline_misses: true,
        }
    }
}

/// Where translations are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableKind {
    /// A cache in front of tables.
    Cached(Geometry),
    /// One table of all translations, attached [in advance](super::Lookup::preload). It uses
    /// slightly more than 8 bytes for every page.
    #[cfg(feature = "comparison")]
    Flat,
}

/// The behaviour of a request that misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissPolicy {
    /// Waits until the line is attached.
    Wait,
    /// Fails with [`LookupError::NotCached`](super::LookupError::NotCached) if the line is not attached
    /// yet, or if callers handle no misses; the caller retries later.
    Retry,
}

/// The data path of a lookup. Both share the cache; the counters distinguish them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// Out of the memory that is looked up.
    Send,
    /// Into the memory that is looked up.
    Receive,
}
