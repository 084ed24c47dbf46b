//! How a long range is cut for pinning piece by piece. Pure: ranges in, ranges out.

use super::PageRange;

/// The sizes of the pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkSchedule {
    /// All at once.
    Whole,
    /// Pieces of one size.
    Fixed {
        /// The pages of each.
        pages: usize,
    },
    /// Each piece twice as long as the one before: the first copy begins early, and the many pages
    /// at the end are pinned in few calls.
    Progressive {
        /// The pages of the first.
        first_pages: usize,
        /// The most pages of any.
        most_pages: usize,
    },
}

impl Default for ChunkSchedule {
    fn default() -> Self {
        Self::Progressive { first_pages: 1, most_pages: 1024 }
    }
}

impl ChunkSchedule {
    /// The pieces of a range, in order, without gaps. A size of no pages counts as one page.
    pub fn chunks(self, range: PageRange) -> Chunks {
        let (next_pages, most_pages) = match self {
            Self::Whole => (range.pages(), range.pages()),
            Self::Fixed { pages } => (pages, pages),
            Self::Progressive { first_pages, most_pages } => (first_pages, most_pages),
        };
        Chunks { rest: Some(range), next_pages: next_pages.min(most_pages).max(1), most_pages }
    }
}

/// The pieces of a range.
#[derive(Debug, Clone)]
pub struct Chunks {
    rest: Option<PageRange>,
    next_pages: usize,
    most_pages: usize,
}

impl Iterator for Chunks {
    type Item = PageRange;

    fn next(&mut self) -> Option<PageRange> {
        let (chunk, rest) = self.rest?.split(self.next_pages);
        self.rest = rest;
        self.next_pages = self.next_pages.saturating_mul(2).min(self.most_pages).max(1);
        Some(chunk)
    }
}

impl std::iter::FusedIterator for Chunks {}

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
        let schedule = ChunkSchedule::Progressive { first_pages: 1, most_pages: 8 };
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
            pages in 1usize..5000, first in 0usize..100, most in 0usize..2000,
        ) {
            let range = PageRange::covering(page_bytes(), pages * page_bytes()).unwrap();
            let schedule = ChunkSchedule::Progressive { first_pages: first, most_pages: most };
            let mut at = range.start();
            for chunk in schedule.chunks(range) {
                prop_assert_eq!(chunk.start(), at);
                prop_assert!(chunk.pages() <= most.max(1));
                at = chunk.end();
            }
            prop_assert_eq!(at, range.end());
        }
    }
}
