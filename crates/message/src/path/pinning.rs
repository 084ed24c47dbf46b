//! Memory that is not resident: a cheap check, and prefaulting just before the copy.
//!
//! Prefaulting changes no byte and is optional. Its errors are ignored: the copy that follows finds
//! the same fault and reports it.

use std::ops::Range;

use memferry_memory::pinning::{Access as Use, PageRange, Pinner, PopulatePinner};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::shared_memory::Protection;

use crate::connection::{CopyError, PeerBuffer};
use crate::plan::{BufferEnds, MessagePlan};
use crate::segments::{Segment, range};

/// Prefault step in bytes. It is large enough for few calls, and small enough that the pages that
/// the kernel has cleared are still in the second-level cache when they are copied to.
pub(super) const PREFAULT_BYTES: u64 = 256 << 10;

/// Copies a whole message from the sender, by its plan.
///
/// # Safety
/// As for [`PeerBuffer::copy`].
pub(crate) unsafe fn copy_now(
    buffer: &PeerBuffer,
    local: &[Segment],
    length: u64,
    plan: &MessagePlan,
) -> Result<(), CopyError> {
    // SAFETY: the caller guarantees it.
    unsafe { copy(buffer, local, 0..length, Protection::ReadOnly, None, plan.prefault.ends) }
}

/// Copies a part of a message as [`PeerBuffer::copy`] does, and prefaults the ends in `prefault`,
/// step by step.
///
/// # Safety
/// As for [`PeerBuffer::copy`].
pub(super) unsafe fn copy(
    buffer: &PeerBuffer,
    local: &[Segment],
    part: Range<u64>,
    access: Protection,
    streaming: Option<Streaming>,
    prefault: BufferEnds,
) -> Result<(), CopyError> {
    let step_bytes = if prefault == BufferEnds::default() { u64::MAX } else { PREFAULT_BYTES };
    let mut at = part.start;
    while at < part.end {
        let length = (part.end - at).min(step_bytes);
        let peer = mapped_segments(buffer);
        let (source, target) = match access {
            Protection::ReadOnly => (peer, local),
            Protection::ReadWrite => (local, peer),
        };
        if prefault.source {
            populate(source, at, length, Use::Read);
        }
        if prefault.target {
            populate(target, at, length, Use::Write);
        }
        // SAFETY: the caller guarantees it.
        unsafe { buffer.copy(local, at, length, access, streaming) }?;
        at += length;
    }
    Ok(())
}

/// The segments of the peer's memory if it is mapped in this process; none for cross-memory, where
/// the kernel faults the pages in.
pub(super) fn mapped_segments(buffer: &PeerBuffer) -> &[Segment] {
    match buffer {
        PeerBuffer::Mapped { segments, .. } => segments.as_slice(),
        _ => &[],
    }
}

/// Prefaults a part of a message.
pub(super) fn populate(segments: &[Segment], offset: u64, length: u64, access: Use) {
    for segment in range(segments, offset, length) {
        if let Ok(pages) = PageRange::covering(segment.address as usize, segment.length) {
            let _ = PopulatePinner.pin(pages, access);
        }
    }
}

/// Residency of buffers, decided by the page of the last byte, which is touched last.
///
/// A check is a system call, and most programs reuse a few buffers. A buffer that was resident
/// counts as resident for the next [`ResidencyCache::TRUSTED_USES`] messages.
#[derive(Debug, Default)]
pub(crate) struct ResidencyCache {
    pages: [ResidentPage; Self::SLOTS],
    /// The entry that is replaced next.
    oldest_page: usize,
    /// Ranges all of whose pages were resident.
    ranges: [ResidentRange; Self::SLOTS],
    oldest_range: usize,
}

/// A range all of whose pages were resident when it was checked.
#[derive(Debug, Clone, Copy, Default)]
struct ResidentRange {
    address: usize,
    length: usize,
    /// The number of uses before the next check.
    uses_left: u8,
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

/// A page that was resident when it was checked.
#[derive(Debug, Clone, Copy, Default)]
struct ResidentPage {
    page: usize,
    /// The number of uses before the next check.
    uses_left: u8,
}

impl ResidencyCache {
    const SLOTS: usize = 16;
    const TRUSTED_USES: u8 = 63;

    /// Returns whether the last of `bytes` bytes of a message lies in a page that is not resident.
    pub(crate) fn is_nonresident(&mut self, segments: &[Segment], bytes: u64) -> bool {
        let last = bytes.checked_sub(1).and_then(|last| range(segments, last, 1).next());
        let Some(last) = last else { return false };
        self.is_page_nonresident(
            last.address as usize & !(page_bytes() - 1),
            residency::is_resident,
        )
    }

    /// The same for memory of the peer that is mapped in this process.
    pub(crate) fn is_buffer_nonresident(&mut self, buffer: &PeerBuffer, bytes: u64) -> bool {
        self.is_nonresident(mapped_segments(buffer), bytes)
    }

    /// Returns whether any page of a message of this process is not resident, so that an access may
    /// block for any time. A page that cannot be checked counts as resident: the copy reports it.
    pub(crate) fn may_be_nonresident(&mut self, segments: &[Segment]) -> bool {
        if segments.len() > FEW_SEGMENTS
            && let Some(nonresident) = enclosing(segments).and_then(|range| self.check_range(range))
        {
            return nonresident;
        }
        // Each check of a segment is a system call.
        segments.len() > MAX_CHECKED_SEGMENTS
            || segments
                .iter()
                .any(|segment| segment.length > 0 && self.check_range(*segment) == Some(true))
    }

    /// Returns whether any page of a segment is not resident; `None` if a page is not mapped.
    fn check_range(&mut self, segment: Segment) -> Option<bool> {
        let (address, length) = (segment.address as usize, segment.length);
        let is_same = |range: &ResidentRange| range.address == address && range.length == length;
        let found = self.ranges.iter().position(is_same);
        let index = found.unwrap_or(self.oldest_range);
        if found.is_some() && self.ranges[index].uses_left > 0 {
            self.ranges[index].uses_left -= 1;
            return Some(false);
        }
        if !is_range_resident(address, length)? {
            return Some(true);
        }
        self.ranges[index] = ResidentRange { address, length, uses_left: Self::TRUSTED_USES };
        if found.is_none() {
            self.oldest_range = (index + 1) % Self::SLOTS;
        }
        Some(false)
    }

    fn is_page_nonresident(
        &mut self,
        page: usize,
        is_resident: impl FnOnce(usize) -> bool,
    ) -> bool {
        let found = self.pages.iter().position(|known| known.page == page);
        let index = found.unwrap_or(self.oldest_page);
        let known = &mut self.pages[index];
        if found.is_some() && known.uses_left > 0 {
            known.uses_left -= 1;
            return false;
        }
        let resident = is_resident(page);
        if resident {
            *known = ResidentPage { page, uses_left: Self::TRUSTED_USES };
            if found.is_none() {
                self.oldest_page = (index + 1) % Self::SLOTS;
            }
        }
        !resident
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use memferry_sys::Pages;

    use super::*;

    #[test]
    fn memory_that_is_there_is_looked_at_seldom_and_absent_memory_always() {
        let (mut cache, count) = (ResidencyCache::default(), Cell::new(0));
        let mut check = |resident: bool| {
            cache.is_page_nonresident(7 * page_bytes(), |_| {
                count.set(count.get() + 1);
                resident
            })
        };
        for _ in 0..5 {
            assert!(check(false));
        }
        assert_eq!(count.get(), 5);
        for _ in 0..2 * (usize::from(ResidencyCache::TRUSTED_USES) + 1) {
            assert!(!check(true));
        }
        assert_eq!(count.get(), 7);
        assert!(check(false), "the trusted uses are spent");
        assert!(check(false), "a page that is not resident is not cached");
    }

    #[test]
    fn as_many_buffers_as_there_are_places_are_known() {
        let (mut cache, count) = (ResidencyCache::default(), Cell::new(0));
        for round in 1..=3 {
            for page in 1..=ResidencyCache::SLOTS {
                let check = |_| {
                    count.set(count.get() + 1);
                    true
                };
                assert!(!cache.is_page_nonresident(page << 20, check));
            }
            assert_eq!(count.get(), ResidencyCache::SLOTS, "round {round}");
        }
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

    #[test]
    fn a_part_is_brought_in_and_no_more_and_keeps_its_bytes() {
        let mut pages = Pages::new(64 * page_bytes()).unwrap();
        pages.as_mut_slice()[9 * page_bytes()] = 9;
        let segments = [Segment::target(pages.as_ptr(), pages.len())];
        let (offset, length) = (8 * page_bytes() as u64 + 1, 3 * page_bytes() as u64);
        populate(&segments, offset, length, Use::Write);
        let at = pages.as_ptr() as usize;
        assert_eq!(residency::resident_pages(at, pages.len()).unwrap(), 4);
        assert_eq!(pages.as_slice()[9 * page_bytes()], 9);
    }
}
