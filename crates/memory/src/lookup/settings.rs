//! What can be chosen about a lookup.

use super::geometry::Geometry;

/// The settings of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The cache, or the full table.
    pub kind: Kind,
    /// What a request does that misses.
    pub policy: Policy,
    /// With more attached lines than this, a sweep detaches some.
    pub high_water_lines: usize,
    /// How many fills lie between two periodic sweeps.
    pub sweep_every: u64,
    /// How many misses can wait to be handled.
    pub queue_length: usize,
    /// Whether a thread that would wait for its miss works the queue off instead.
    pub helping: bool,
}

impl Settings {
    /// A cache of this shape. Misses wait and help; the table keeps 64 times what the cache holds.
    pub fn dynamic(geometry: Geometry) -> Self {
        Self {
            kind: Kind::Dynamic(geometry),
            policy: Policy::Park,
            high_water_lines: geometry.lines().saturating_mul(64),
            sweep_every: 4096,
            queue_length: 256,
            helping: true,
        }
    }

    /// The full table, for comparison.
    pub fn full() -> Self {
        // Nothing misses in a way that would be handled, so the rest has no effect.
        Self {
            kind: Kind::Full,
            policy: Policy::Park,
            high_water_lines: usize::MAX,
            sweep_every: u64::MAX,
            queue_length: 1,
            helping: true,
        }
    }
}

/// How translations are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A cache in front of tables.
    Dynamic(Geometry),
    /// All of them in one place, attached [in advance](super::Lookup::prepare). Takes 8 bytes and
    /// a little for every page of everything.
    Full,
}

/// What a request does that misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// It waits until the translation is there.
    Park,
    /// It is given back, and comes again later.
    Retry,
}

/// The path of data that a lookup is for. Both share the cache; counters keep them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// Out of the memory that is looked up.
    Send,
    /// Into the memory that is looked up.
    Receive,
}
