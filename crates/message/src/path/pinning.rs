//! Memory that is not resident is prefaulted just before the copy.
//!
//! Prefaulting changes no byte and is optional. Its errors are ignored: the copy that follows finds
//! the same fault and reports it.

use std::ops::Range;

use memferry_memory::pinning::{Access as Use, PageRange, Pinner, PopulatePinner};
use memferry_sys::copy::stream::Streaming;
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

#[cfg(test)]
mod tests {
    use memferry_sys::pages::page_bytes;
    use memferry_sys::{Pages, residency};

    use super::*;

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
