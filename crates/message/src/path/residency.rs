//! Whether buffers are resident: a cheap check.

use memferry_sys::pages::page_bytes;
use memferry_sys::residency;

use super::pinning::mapped_segments;
use crate::connection::PeerBuffer;
use crate::segments::{Segment, range};

/// Residency of buffers.
///
/// A check is a system call, and most programs reuse a few buffers. A buffer that was resident
/// counts as resident for as many messages as its [`Trust`] says. Memory that has gone meanwhile
/// costs its page faults, and no more.
#[derive(Debug, Default)]
pub(crate) struct ResidencyCache {
    /// Pages of the last bytes of messages: these are touched last.
    pages: TrustedRanges,
    /// Whole buffers.
    buffers: TrustedRanges,
}

/// How many uses of memory may follow on a check that found it resident: few at first, and twice as
/// many after each check that finds it resident again.
#[derive(Debug, Clone, Copy, Default)]
struct Trust {
    uses_left: u16,
    /// The number of uses that the last check granted.
    granted: u16,
}

impl Trust {
    const FIRST_USES: u16 = 63;
    const MAX_USES: u16 = 1023;

    /// Takes a use, if one is left.
    #[inline]
    fn take(&mut self) -> bool {
        let is_left = self.uses_left > 0;
        self.uses_left -= u16::from(is_left);
        is_left
    }

    /// The trust after one more check.
    fn renewed(self) -> Self {
        let granted = (2 * self.granted + 1).clamp(Self::FIRST_USES, Self::MAX_USES);
        Self { uses_left: granted, granted }
    }
}

/// Memory that was resident when it was checked.
#[derive(Debug, Clone, Copy, Default)]
struct TrustedRange {
    address: usize,
    length: usize,
    trust: Trust,
}

/// A few ranges that were resident.
#[derive(Debug, Default)]
struct TrustedRanges {
    ranges: [TrustedRange; Self::SLOTS],
    /// The range that was used last: most messages use the same memory again.
    last: usize,
    /// The range that is replaced next.
    oldest: usize,
}

impl TrustedRanges {
    const SLOTS: usize = 16;

    /// Returns whether a range is resident: as is remembered, or else as `check` says; `None` if that
    /// cannot be checked.
    #[inline]
    fn is_resident(
        &mut self,
        address: usize,
        length: usize,
        check: impl FnOnce() -> Option<bool>,
    ) -> Option<bool> {
        let last = &mut self.ranges[self.last];
        if (last.address, last.length) == (address, length) && last.trust.take() {
            return Some(true);
        }
        self.find(address, length, check)
    }

    /// As [`TrustedRanges::is_resident`], among all ranges.
    fn find(
        &mut self,
        address: usize,
        length: usize,
        check: impl FnOnce() -> Option<bool>,
    ) -> Option<bool> {
        let is_same = |range: &TrustedRange| (range.address, range.length) == (address, length);
        let found = self.ranges.iter().position(is_same);
        let index = found.unwrap_or(self.oldest);
        if found.is_some() && self.ranges[index].trust.take() {
            self.last = index;
            return Some(true);
        }
        if !check()? {
            // Only memory that stays is trusted for long.
            if found.is_some() {
                self.ranges[index].trust = Trust::default();
            }
            return Some(false);
        }
        let known = if found.is_some() { self.ranges[index].trust } else { Trust::default() };
        self.ranges[index] = TrustedRange { address, length, trust: known.renewed() };
        self.last = index;
        if found.is_none() {
            self.oldest = (index + 1) % Self::SLOTS;
        }
        Some(true)
    }
}

/// Up to this number, the segments of a message are checked and cached one by one.
const FEW_SEGMENTS: usize = 4;

/// With more segments than this, far apart, nothing is checked: the message counts as not resident.
const MAX_CHECKED_SEGMENTS: usize = 64;

/// The range around segments that lie close together, as those of an array with gaps do.
fn enclosing(segments: &[Segment]) -> Option<Segment> {
    const MAX_GAP: usize = 1 << 20;
    let nonempty = || segments.iter().filter(|segment| segment.length > 0);
    let first = nonempty().min_by_key(|segment| segment.address)?;
    let end = nonempty()
        .map(|segment| (segment.address as usize).saturating_add(segment.length))
        .max()?;
    let (length, bytes) =
        (end - first.address as usize, nonempty().map(|p| p.length).sum::<usize>());
    (length <= 2 * bytes + MAX_GAP).then_some(Segment { address: first.address, length })
}

/// Returns whether all pages of a range are resident; `None` if a page is not mapped.
fn is_range_resident(address: usize, length: usize) -> Option<bool> {
    let first = address & !(page_bytes() - 1);
    let pages = (address - first).saturating_add(length).div_ceil(page_bytes());
    residency::resident_pages(first, pages * page_bytes()).ok().map(|resident| resident == pages)
}

impl ResidencyCache {
    /// Returns whether the last of `bytes` bytes of a message lies in a page that is not resident.
    pub(crate) fn is_nonresident(&mut self, segments: &[Segment], bytes: u64) -> bool {
        let last = bytes.checked_sub(1).and_then(|last| range(segments, last, 1).next());
        let Some(last) = last else { return false };
        let page = last.address as usize & !(page_bytes() - 1);
        let check = || Some(residency::is_resident(page));
        self.pages.is_resident(page, page_bytes(), check) == Some(false)
    }

    /// The same for memory of the peer that is mapped in this process.
    pub(crate) fn is_buffer_nonresident(&mut self, buffer: &PeerBuffer, bytes: u64) -> bool {
        self.is_nonresident(mapped_segments(buffer), bytes)
    }

    /// Returns whether any page of a message of this process is not resident, so that an access may
    /// block for any time. A page that cannot be checked counts as resident: the copy reports it.
    pub(crate) fn may_be_nonresident(&mut self, segments: &[Segment]) -> bool {
        if segments.len() > FEW_SEGMENTS
            && let Some(resident) = enclosing(segments).and_then(|range| self.check(range))
        {
            return !resident;
        }
        // Each check of a segment is a system call.
        segments.len() > MAX_CHECKED_SEGMENTS
            || segments
                .iter()
                .any(|segment| segment.length > 0 && self.check(*segment) == Some(false))
    }

    /// Returns whether all pages of a segment are resident; `None` if a page is not mapped.
    fn check(&mut self, segment: Segment) -> Option<bool> {
        let (address, length) = (segment.address as usize, segment.length);
        self.buffers.is_resident(address, length, || is_range_resident(address, length))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use memferry_sys::Pages;

    use super::*;

    #[test]
    fn memory_that_is_there_is_checked_less_and_less_and_absent_memory_always() {
        let (mut ranges, count) = (TrustedRanges::default(), Cell::new(0));
        let mut is_resident = |resident: bool| {
            let check = || {
                count.set(count.get() + 1);
                Some(resident)
            };
            ranges.is_resident(7, 1, check).unwrap()
        };
        for _ in 0..5 {
            assert!(!is_resident(false));
        }
        assert_eq!(count.take(), 5);
        for uses in [63, 127, 255, 511, 1023, 1023] {
            assert!((0..=uses).all(|_| is_resident(true)));
            assert_eq!(count.take(), 1, "{uses} uses were trusted");
        }
        assert!(!is_resident(false), "the trusted uses are spent");
        assert!(!is_resident(false), "a page that is not resident is not trusted");
        assert_eq!(count.take(), 2);
        assert!((0..=63).all(|_| is_resident(true)));
        assert_eq!(count.take(), 1);
        assert!(!is_resident(false), "what was gone is trusted as briefly as at first");
    }

    #[test]
    fn as_many_buffers_as_there_are_places_are_known() {
        let (mut ranges, count) = (TrustedRanges::default(), Cell::new(0));
        for round in 1..=3 {
            for page in 1..=TrustedRanges::SLOTS {
                let check = || {
                    count.set(count.get() + 1);
                    Some(true)
                };
                assert_eq!(ranges.is_resident(page << 20, 1, check), Some(true));
            }
            assert_eq!(count.get(), TrustedRanges::SLOTS, "round {round}");
        }
    }

    #[test]
    fn memory_that_cannot_be_checked_is_not_remembered() {
        let mut ranges = TrustedRanges::default();
        assert_eq!(ranges.is_resident(7, 1, || None), None);
        assert_eq!(ranges.is_resident(7, 1, || Some(false)), Some(false));
    }

    #[test]
    fn the_page_of_the_last_byte_decides() {
        let mut pages = Pages::new(8 * page_bytes()).unwrap();
        pages.as_mut_slice()[..4 * page_bytes()].fill(1);
        let segments = [Segment::target(pages.as_ptr(), pages.len())];
        let is_nonresident =
            |bytes: usize| ResidencyCache::default().is_nonresident(&segments, bytes as u64);
        assert!(!is_nonresident(0) && !is_nonresident(4 * page_bytes()));
        assert!(is_nonresident(4 * page_bytes() + 1) && is_nonresident(8 * page_bytes()));
    }

    #[test]
    fn one_absent_page_is_found_in_one_piece_and_among_many() {
        let mut pages = Pages::new(1024 * page_bytes()).unwrap();
        pages.as_mut_slice().fill(1);
        let segment = |page: usize, length| {
            Segment::target(pages.as_ptr().wrapping_add(page * page_bytes()), length)
        };
        let one = [segment(0, 256 * page_bytes())];
        let close: Vec<_> = (0..128).map(|index| segment(2 * index, page_bytes())).collect();
        let few = [segment(0, 10), segment(100, 10), segment(101, 0), segment(200, 10)];
        let is_nonresident =
            |segments: &[Segment]| ResidencyCache::default().may_be_nonresident(segments);
        assert!(![&one[..], &close, &few].into_iter().any(is_nonresident));
        // SAFETY: the page belongs to this test, which no longer reads it.
        let result = unsafe {
            libc::madvise(segment(100, 1).address.cast(), page_bytes(), libc::MADV_DONTNEED)
        };
        assert_eq!(result, 0);
        assert!([&one[..], &close, &few].into_iter().all(is_nonresident));
        let far: Vec<_> = (0..128).map(|index| segment(8 * index, 1)).collect();
        assert!(is_nonresident(&far), "too many segments to check");
    }
}
