//! How a long range is divided into chunks for pinning. Pure: ranges in, ranges out.

use super::PageRange;

/// The sizes of the chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkSchedule {
    /// One chunk.
    Whole,
    /// Chunks of one size.
    Fixed {
        /// The pages of each chunk.
        pages: usize,
    },
    /// Each chunk is twice as long as the one before: the first copy starts early, and the last
    /// pages are pinned in few calls.
    Progressive {
        /// The pages of the first chunk.
        first_pages: usize,
        /// The maximum pages of a chunk.
        max_pages: usize,
    },
}

impl Default for ChunkSchedule {
    fn default() -> Self {
        Self::Progressive { first_pages: 1, max_pages: 1024 }
    }
}

impl ChunkSchedule {
    /// The chunks of a range, in order, without gaps. A size of 0 pages counts as one page.
    pub fn chunks(self, range: PageRange) -> ChunkRanges {
        let (next_pages, max_pages) = match self {
            Self::Whole => (range.pages(), range.pages()),
            Self::Fixed { pages } => (pages, pages),
            Self::Progressive { first_pages, max_pages } => (first_pages, max_pages),
        };
        ChunkRanges {
            remaining: Some(range),
            next_pages: next_pages.min(max_pages).max(1),
            max_pages,
        }
    }
}

/// The chunks of a range.
#[derive(Debug, Clone)]
pub struct ChunkRanges {
    remaining: Option<PageRange>,
    next_pages: usize,
    max_pages: usize,
}

impl Iterator for ChunkRanges {
    type Item = PageRange;

    fn next(&mut self) -> Option<PageRange> {
        let (chunk, rest) = self.remaining?.split(self.next_pages);
        self.remaining = rest;
        self.next_pages = self.next_pages.saturating_mul(2).min(self.max_pages).max(1);
        Some(chunk)
    }
}

impl std::iter::FusedIterator for ChunkRanges {}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::pages::page_bytes;
    use proptest::prelude::*;

    fn sizes(schedule: ChunkSchedule, pages: usize) -> Vec<usize> {
        let range = PageRange::covering(page_bytes(), pages * page_bytes()).unwrap();
        schedule.chunks(range).map(|chunk| chunk.pages()).collect()
    }

    #[test]
    fn progressive_pieces_double_up_to_the_most() {
        let schedule = ChunkSchedule::Progressive { first_pages: 1, max_pages: 8 };
        assert_eq!(sizes(schedule, 30), [1, 2, 4, 8, 8, 7]);
        assert_eq!(sizes(schedule, 1), [1]);
    }

    #[test]
    fn whole_is_one_piece_and_fixed_pieces_are_equal_but_the_last() {
        assert_eq!(sizes(ChunkSchedule::Whole, 30), [30]);
        assert_eq!(sizes(ChunkSchedule::Fixed { pages: 12 }, 30), [12, 12, 6]);
        assert_eq!(sizes(ChunkSchedule::Fixed { pages: 0 }, 2), [1, 1]);
    }

    proptest! {
        #[test]
        fn pieces_follow_each_other_and_make_up_the_range(
            pages in 1usize..5000, first in 0usize..100, max in 0usize..2000,
        ) {
            let range = PageRange::covering(page_bytes(), pages * page_bytes()).unwrap();
            let schedule = ChunkSchedule::Progressive { first_pages: first, max_pages: max };
            let mut at = range.start();
            for chunk in schedule.chunks(range) {
                prop_assert_eq!(chunk.start(), at);
                prop_assert!(chunk.pages() <= max.max(1));
                at = chunk.end();
            }
            prop_assert_eq!(at, range.end());
        }
    }
}
