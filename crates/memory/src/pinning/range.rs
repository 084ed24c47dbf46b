//! Ranges of whole pages.

use memferry_sys::pages::page_bytes;

use super::PinError;

/// A non-empty range of whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRange {
    start: usize,
    end: usize,
}

impl PageRange {
    /// The pages that contain `length` bytes at `address`.
    pub fn covering(address: usize, length: usize) -> Result<Self, PinError> {
        let page = page_bytes();
        let end = address.checked_add(length).and_then(|end| end.checked_next_multiple_of(page));
        match end {
            Some(end) if length > 0 => Ok(Self { start: address & !(page - 1), end }),
            _ => Err(PinError::InvalidRange { address, length }),
        }
    }

    /// The pages from `start` to `end`, exclusive; `None` if there are none.
    pub fn between(start: usize, end: usize) -> Option<Self> {
        Self::covering(start, end.checked_sub(start)?).ok()
    }

    /// The first address.
    #[inline]
    pub fn start(&self) -> usize {
        self.start
    }

    /// The end, exclusive.
    pub fn end(&self) -> usize {
        self.end
    }

    /// The length in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// The number of pages.
    pub fn pages(&self) -> usize {
        self.bytes() / page_bytes()
    }

    /// Whether the range contains all of `other`.
    pub fn contains(&self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two ranges share a page.
    pub fn overlaps(&self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The smallest range that contains both.
    pub fn merge(&self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }

    /// The pages of both ranges.
    pub fn intersection(&self, other: Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }

    /// The parts of this range before and after `other`.
    pub fn subtract(&self, other: Self) -> [Option<Self>; 2] {
        let part = |start, end| (start < end).then_some(Self { start, end });
        [part(self.start, self.end.min(other.start)), part(self.start.max(other.end), self.end)]
    }

    /// Splits off the first `pages` pages, at least one. The second result is the remainder.
    pub fn split(&self, pages: usize) -> (Self, Option<Self>) {
        let bytes = pages.max(1).saturating_mul(page_bytes());
        if bytes >= self.bytes() {
            return (*self, None);
        }
        let middle = self.start + bytes;
        (Self { start: self.start, end: middle }, Some(Self { start: middle, end: self.end }))
    }
}

impl std::fmt::Display for PageRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: usize, end: usize) -> PageRange {
        PageRange::between(start * page_bytes(), end * page_bytes()).unwrap()
    }

    #[test]
    fn a_range_covers_the_pages_that_bytes_touch() {
        let page = page_bytes();
        assert_eq!(PageRange::covering(3 * page + 5, 1).unwrap(), pages(3, 4));
        assert_eq!(PageRange::covering(4 * page - 1, 2).unwrap(), pages(3, 5));
        assert_eq!(PageRange::covering(3 * page, 2 * page).unwrap(), pages(3, 5));
        assert!(PageRange::covering(3 * page, 0).is_err());
        assert!(PageRange::covering(usize::MAX - 1, 1).is_err());
        assert!(PageRange::covering(page, usize::MAX).is_err());
    }

    #[test]
    fn ranges_that_only_touch_do_not_overlap() {
        assert!(!pages(1, 3).overlaps(pages(3, 5)));
        assert!(pages(1, 3).overlaps(pages(2, 5)));
        assert_eq!(pages(1, 3).intersection(pages(3, 5)), None);
        assert_eq!(pages(1, 4).intersection(pages(3, 5)), Some(pages(3, 4)));
        assert_eq!(pages(1, 2).merge(pages(4, 5)), pages(1, 5));
    }

    #[test]
    fn taking_a_range_away_leaves_what_is_on_both_sides() {
        assert_eq!(pages(1, 9).subtract(pages(3, 5)), [Some(pages(1, 3)), Some(pages(5, 9))]);
        assert_eq!(pages(3, 5).subtract(pages(1, 9)), [None, None]);
        assert_eq!(pages(3, 5).subtract(pages(1, 4)), [None, Some(pages(4, 5))]);
        assert_eq!(pages(3, 5).subtract(pages(7, 9)), [Some(pages(3, 5)), None]);
        assert_eq!(pages(3, 5).subtract(pages(1, 2)), [None, Some(pages(3, 5))]);
    }
}
