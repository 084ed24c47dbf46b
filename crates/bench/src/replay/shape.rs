//! Cache shapes that are compared: three sizes, four line lengths, three numbers of ways. The bench
//! measures them, and `memferry replay` replays traces with them.

use std::fmt;

use memferry_memory::lookup::Geometry;
use serde::{Deserialize, Serialize};

/// Shape of a cache: number of entries, entries per line, lines per set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheShape {
    /// Number of entries.
    pub entries: usize,
    /// Entries per line.
    pub line_entries: usize,
    /// Lines per set.
    pub ways: usize,
}

const ENTRIES: [usize; 3] = [8 << 10, 16 << 10, 32 << 10];
const LINE_ENTRIES: [usize; 4] = [8, 16, 64, 128];
const WAYS: [usize; 3] = [2, 4, 8];

impl CacheShape {
    /// Shape of the summary keys.
    pub const REFERENCE: Self = Self { entries: 16 << 10, line_entries: 64, ways: 4 };

    /// Shape with which traces are recorded: the shortest lines, so that the trace contains every
    /// line.
    pub const RECORDED: Self = Self { line_entries: 8, ..Self::REFERENCE };

    /// All shapes, by size, ways and line length.
    pub fn all() -> impl Iterator<Item = Self> {
        ENTRIES.into_iter().flat_map(|entries| {
            WAYS.into_iter().flat_map(move |ways| Self::lines_of(entries, ways))
        })
    }

    /// Shapes of one size and number of ways, which differ in their line length.
    pub fn lines_of(entries: usize, ways: usize) -> impl Iterator<Item = Self> {
        LINE_ENTRIES.into_iter().map(move |line_entries| Self { entries, line_entries, ways })
    }

    /// Geometry for the lookup.
    pub fn geometry(self) -> Geometry {
        Geometry::new(self.entries, self.line_entries, self.ways).expect("powers of two")
    }

    /// Bytes of memory that a line covers.
    pub fn line_bytes(self) -> u64 {
        self.geometry().line_bytes()
    }

    /// Size and ways, for the name of a series over the line length.
    pub fn size_and_ways(self) -> String {
        format!("C{}K A{}", self.entries >> 10, self.ways)
    }
}

impl fmt::Display for CacheShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "C{}K L{} A{}", self.entries >> 10, self.line_entries, self.ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_thirty_six_valid_shapes_and_the_telling_ones_are_among_them() {
        let all: Vec<_> = CacheShape::all().collect();
        assert_eq!(all.len(), 36);
        assert!(all.contains(&CacheShape::REFERENCE) && all.contains(&CacheShape::RECORDED));
        assert!(all.iter().all(|shape| shape.geometry().sets().is_power_of_two()));
    }

    #[test]
    fn a_shape_is_written_in_thousands_of_entries() {
        assert_eq!(CacheShape::REFERENCE.to_string(), "C16K L64 A4");
        assert_eq!(CacheShape::REFERENCE.size_and_ways(), "C16K A4");
    }
}
