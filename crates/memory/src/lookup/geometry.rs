//! The geometry of the cache: entries, entries per line, lines per set.

use memferry_sys::pages::page_bytes;
use thiserror::Error;

use super::lru_order::LruOrder;
use super::slot::LineSlot;

/// Maximum number of lines of a set: their LRU order must fit into one word.
pub const MAX_WAYS: usize = 16;

/// The geometry of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    entries: usize,
    line_entries: usize,
    ways: usize,
}

impl Geometry {
    /// A cache of `entries` pages in lines of `line_entries`, with `ways` lines per set. The
    /// entries of a line and the number of sets must be powers of two, because bits of the address
    /// select them.
    pub const fn new(
        entries: usize,
        line_entries: usize,
        ways: usize,
    ) -> Result<Self, GeometryError> {
        if !line_entries.is_power_of_two() || line_entries > 1 << 16 {
            return Err(GeometryError::LineEntries(line_entries));
        }
        if ways == 0 || ways > MAX_WAYS {
            return Err(GeometryError::Ways(ways));
        }
        let set_entries = line_entries * ways;
        let sets = entries / set_entries;
        if !entries.is_multiple_of(set_entries) || !sets.is_power_of_two() || sets > 1 << 24 {
            return Err(GeometryError::Entries { entries, set_entries });
        }
        Ok(Self { entries, line_entries, ways })
    }

    /// The number of pages in the cache.
    pub const fn entries(self) -> usize {
        self.entries
    }

    /// The number of consecutive pages of a line.
    pub const fn line_entries(self) -> usize {
        self.line_entries
    }

    /// The number of lines of a set.
    pub const fn ways(self) -> usize {
        self.ways
    }

    /// The number of lines in the cache.
    pub const fn lines(self) -> usize {
        self.entries / self.line_entries
    }

    /// The number of sets.
    pub const fn sets(self) -> usize {
        self.lines() / self.ways
    }

    /// The memory that a line covers, in bytes.
    pub fn line_bytes(self) -> u64 {
        (self.line_entries * page_bytes()) as u64
    }

    /// The memory of a cache of this geometry, by component.
    pub const fn footprint(self) -> CacheFootprint {
        CacheFootprint {
            entries: self.entries * size_of::<u64>(),
            tags: self.lines() * size_of::<LineSlot>(),
            order: self.sets() * size_of::<LruOrder>(),
        }
    }
}

/// The memory of a cache, in bytes by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheFootprint {
    /// The translations.
    pub entries: usize,
    /// The tags: line key, users, last use.
    pub tags: usize,
    /// The LRU order of the sets.
    pub order: usize,
}

impl CacheFootprint {
    /// The sum.
    pub const fn total(self) -> usize {
        self.entries + self.tags + self.order
    }
}

/// Why a geometry is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// The entries of a line are not a power of two.
    #[error("lines of {0} entries: must be a power of two, up to 65536")]
    LineEntries(usize),
    /// The number of ways is not 1 to 16.
    #[error("sets of {0} lines: must be 1 to {MAX_WAYS}")]
    Ways(usize),
    /// The entries are not a power of two of whole sets.
    #[error("{entries} entries in sets of {set_entries}: must be 1, 2, 4, … 16777216 whole sets")]
    Entries {
        /// The number of entries.
        entries: usize,
        /// The entries of a set.
        set_entries: usize,
    },
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_cannot_cut_addresses_are_refused() {
        assert_eq!(Geometry::new(64, 3, 2), Err(GeometryError::LineEntries(3)));
        assert_eq!(Geometry::new(64, 0, 2), Err(GeometryError::LineEntries(0)));
        assert_eq!(Geometry::new(64, 4, 0), Err(GeometryError::Ways(0)));
        assert_eq!(Geometry::new(64, 1, 17), Err(GeometryError::Ways(17)));
        let odd = |entries, set_entries| Err(GeometryError::Entries { entries, set_entries });
        assert_eq!(Geometry::new(24, 4, 2), odd(24, 8));
        assert_eq!(Geometry::new(0, 4, 2), odd(0, 8));
        assert_eq!(Geometry::new(65, 4, 2), odd(65, 8));
    }

    #[test]
    fn memory_is_counted_by_component() {
        let geometry = Geometry::new(16 << 10, 64, 4).unwrap();
        assert_eq!((geometry.lines(), geometry.sets()), (256, 64));
        let memory = geometry.footprint();
        assert_eq!(memory, CacheFootprint { entries: 128 << 10, tags: 8 << 10, order: 512 });
        assert_eq!(memory.total(), 139_776);
    }

    #[test]
    fn three_ways_are_fine_with_a_power_of_two_of_sets() {
        assert_eq!(Geometry::new(48, 4, 3).map(Geometry::sets), Ok(4));
    }
}
