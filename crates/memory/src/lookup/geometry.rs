//! The shape of the cache: how many entries, how many to a line, how many lines to a set.

use memferry_sys::pages::page_bytes;
use thiserror::Error;

use super::order::Order;
use super::slot::Slot;

/// The most lines of one set: the order of their use has to fit one word.
pub const MOST_WAYS: usize = 16;

/// The shape of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    entries: usize,
    line_entries: usize,
    ways: usize,
}

impl Geometry {
    /// A cache of `entries` pages in lines of `line_entries`, `ways` lines to a set. The entries of
    /// a line and the number of sets must be powers of two, because addresses are cut there.
    pub const fn new(
        entries: usize,
        line_entries: usize,
        ways: usize,
    ) -> Result<Self, GeometryError> {
        if !line_entries.is_power_of_two() || line_entries > 1 << 16 {
            return Err(GeometryError::LineEntries(line_entries));
        }
        if ways == 0 || ways > MOST_WAYS {
            return Err(GeometryError::Ways(ways));
        }
        let set_entries = line_entries * ways;
        let sets = entries / set_entries;
        if !entries.is_multiple_of(set_entries) || !sets.is_power_of_two() || sets > 1 << 24 {
            return Err(GeometryError::Entries { entries, set_entries });
        }
        Ok(Self { entries, line_entries, ways })
    }

    /// How many pages the cache has room for.
    pub const fn entries(self) -> usize {
        self.entries
    }

    /// How many neighbouring pages make a line.
    pub const fn line_entries(self) -> usize {
        self.line_entries
    }

    /// How many lines make a set.
    pub const fn ways(self) -> usize {
        self.ways
    }

    /// How many lines the cache has room for.
    pub const fn lines(self) -> usize {
        self.entries / self.line_entries
    }

    /// How many sets there are.
    pub const fn sets(self) -> usize {
        self.lines() / self.ways
    }

    /// How much memory a line covers.
    pub fn line_bytes(self) -> u64 {
        (self.line_entries * page_bytes()) as u64
    }

    /// What a cache of this shape takes, by component.
    pub const fn memory_bytes(self) -> CacheMemory {
        CacheMemory {
            entries: self.entries * size_of::<u64>(),
            tags: self.lines() * size_of::<Slot>(),
            order: self.sets() * size_of::<Order>(),
        }
    }
}

/// The bytes of a cache, by component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheMemory {
    /// The translations.
    pub entries: usize,
    /// Whose lines they are, who uses them, and when they were used last.
    pub tags: usize,
    /// The order of use in each set.
    pub order: usize,
}

impl CacheMemory {
    /// All of it.
    pub const fn total(self) -> usize {
        self.entries + self.tags + self.order
    }
}

/// Why numbers are not the shape of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// A line must have a power of two of entries.
    #[error("a line of {0} entries: it must be a power of two, up to 65536")]
    LineEntries(usize),
    /// A set has 1 to 16 lines.
    #[error("sets of {0} lines: there must be 1 to {MOST_WAYS}")]
    Ways(usize),
    /// The entries must make a power of two of whole sets.
    #[error(
        "{entries} entries in sets of {set_entries}: they must make 1, 2, 4, … 16777216 whole sets"
    )]
    Entries {
        /// How many entries were asked for.
        entries: usize,
        /// How many a set has.
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
        let memory = geometry.memory_bytes();
        assert_eq!(memory, CacheMemory { entries: 128 << 10, tags: 8 << 10, order: 512 });
        assert_eq!(memory.total(), 139_776);
    }

    #[test]
    fn three_ways_are_fine_with_a_power_of_two_of_sets() {
        assert_eq!(Geometry::new(48, 4, 3).map(Geometry::sets), Ok(4));
    }
}
