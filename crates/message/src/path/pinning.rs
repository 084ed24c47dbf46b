//! Memory that is not there: finding out cheaply, and bringing it in just before it is copied.
//!
//! Bringing in changes no byte and is never required. Its errors are of no interest: the copy that
//! follows meets the same memory, and reports it.

use std::ops::Range;

use memferry_memory::pinning::{Access as Use, PageRange, Pinner, Populate};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::shared_memory::Access;

use crate::connection::{CopyError, View};
use crate::pieces::{Piece, range};
use crate::plan::{Ends, Plan};

/// How much is brought in at a time by whoever copies it next. Few calls, and what the kernel has
/// cleared is still in the second-level cache when the bytes come.
pub(super) const STEP_BYTES: u64 = 256 << 10;

/// Copies all of a message from the sender, as its plan says.
///
/// # Safety
/// As for [`View::copy`].
pub(crate) unsafe fn copy_at_once(
    view: &View,
    local: &[Piece],
    length: u64,
    plan: &Plan,
) -> Result<(), CopyError> {
    // SAFETY: passed on.
    unsafe { copy(view, local, 0..length, Access::Read, None, plan.populating.ends) }
}

/// Copies a part of a message as [`View::copy`] does, bringing in both ends as `populates` says,
/// step by step.
///
/// # Safety
/// As for [`View::copy`].
pub(super) unsafe fn copy(
    view: &View,
    local: &[Piece],
    part: Range<u64>,
    access: Access,
    streaming: Option<Streaming>,
    populates: Ends,
) -> Result<(), CopyError> {
    let step_bytes = if populates == Ends::default() { u64::MAX } else { STEP_BYTES };
    let mut at = part.start;
    while at < part.end {
        let length = (part.end - at).min(step_bytes);
        let theirs = near_pieces(view);
        let (source, target) = match access {
            Access::Read => (theirs, local),
            Access::Write => (local, theirs),
        };
        if populates.source {
            populate(source, at, length, Use::Read);
        }
        if populates.target {
            populate(target, at, length, Use::Write);
        }
        // SAFETY: passed on.
        unsafe { view.copy(local, at, length, access, streaming) }?;
        at += length;
    }
    Ok(())
}

/// The other side's memory where it is mapped here; nothing where the kernel has to bring it in.
pub(super) fn near_pieces(view: &View) -> &[Piece] {
    match view {
        View::Near { pieces, .. } => pieces.as_slice(),
        _ => &[],
    }
}

/// Brings in a part of a message.
pub(super) fn populate(pieces: &[Piece], offset: u64, length: u64, access: Use) {
    for piece in range(pieces, offset, length) {
        if let Ok(pages) = PageRange::covering(piece.address as usize, piece.length) {
            let _ = Populate.pin(pages, access);
        }
    }
}

/// Whether memory is there, by a look at its last page, which is touched last.
///
/// A look is a system call, and a few buffers that are used again and again are the usual case. So
/// memory that was there is trusted to be there for a number of messages.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    known: [Known; Self::PLACES],
    /// Which of them makes room for the next.
    oldest: usize,
    /// Memory all of which was there.
    whole: [Whole; Self::PLACES],
    oldest_whole: usize,
}

/// Memory that was all there when it was looked at.
#[derive(Debug, Clone, Copy, Default)]
struct Whole {
    address: usize,
    length: usize,
    /// So often it is not looked at again.
    trusted: u8,
}

/// So many pieces are looked at one by one, and known one by one.
const FEW_PIECES: usize = 4;

/// Of a message in more pieces, far apart, nothing is looked at: it may be absent.
const MOST_LOOKED_AT: usize = 64;

/// The memory around pieces that lie close together, as those of an array with gaps do.
fn enclosing(pieces: &[Piece]) -> Option<Piece> {
    const SLACK: usize = 1 << 20;
    let some = || pieces.iter().filter(|piece| piece.length > 0);
    let first = some().min_by_key(|piece| piece.address)?;
    let end = some().map(|piece| (piece.address as usize).saturating_add(piece.length)).max()?;
    let (length, bytes) = (end - first.address as usize, some().map(|p| p.length).sum::<usize>());
    (length <= 2 * bytes + SLACK).then_some(Piece { address: first.address, length })
}

/// Whether all pages of a range are in memory. `None` if some of it is not mapped.
fn is_all_there(address: usize, length: usize) -> Option<bool> {
    let first = address & !(page_bytes() - 1);
    let pages = (address - first).saturating_add(length).div_ceil(page_bytes());
    residency::resident_pages(first, pages * page_bytes()).ok().map(|there| there == pages)
}

/// A page that was there when it was looked at.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    page: usize,
    /// So often it is not looked at again.
    trusted: u8,
}

impl Looks {
    const PLACES: usize = 16;
    const TRUST: u8 = 63;

    /// Whether the last of `bytes` bytes of a message lies in a page that is not in memory.
    pub(crate) fn is_absent(&mut self, pieces: &[Piece], bytes: u64) -> bool {
        let last = bytes.checked_sub(1).and_then(|last| range(pieces, last, 1).next());
        let Some(last) = last else { return false };
        self.is_page_absent(last.address as usize & !(page_bytes() - 1), residency::is_resident)
    }

    /// The same of memory of the other side, if it is mapped here.
    pub(crate) fn is_view_absent(&mut self, view: &View, bytes: u64) -> bool {
        self.is_absent(near_pieces(view), bytes)
    }

    /// Whether any page of a message of this process is not in memory, so that whoever reads or writes it
    /// may have to wait for any time. What cannot be looked at is an error for whoever copies it.
    pub(crate) fn may_be_absent(&mut self, pieces: &[Piece]) -> bool {
        if pieces.len() > FEW_PIECES
            && let Some(absent) = enclosing(pieces).and_then(|whole| self.look(whole))
        {
            return absent;
        }
        // Each look at one of many is a system call.
        pieces.len() > MOST_LOOKED_AT
            || pieces.iter().any(|piece| piece.length > 0 && self.look(*piece) == Some(true))
    }

    /// Whether any page of a piece is not in memory. `None` if some of it is not mapped.
    fn look(&mut self, piece: Piece) -> Option<bool> {
        let (address, length) = (piece.address as usize, piece.length);
        let is_it = |whole: &Whole| whole.address == address && whole.length == length;
        let found = self.whole.iter().position(is_it);
        let place = found.unwrap_or(self.oldest_whole);
        if found.is_some() && self.whole[place].trusted > 0 {
            self.whole[place].trusted -= 1;
            return Some(false);
        }
        if !is_all_there(address, length)? {
            return Some(true);
        }
        self.whole[place] = Whole { address, length, trusted: Self::TRUST };
        if found.is_none() {
            self.oldest_whole = (place + 1) % Self::PLACES;
        }
        Some(false)
    }

    fn is_page_absent(&mut self, page: usize, is_resident: impl FnOnce(usize) -> bool) -> bool {
        let found = self.known.iter().position(|known| known.page == page);
        let place = found.unwrap_or(self.oldest);
        let known = &mut self.known[place];
        if found.is_some() && known.trusted > 0 {
            known.trusted -= 1;
            return false;
        }
        let is_there = is_resident(page);
        if is_there {
            *known = Known { page, trusted: Self::TRUST };
            if found.is_none() {
                self.oldest = (place + 1) % Self::PLACES;
            }
        }
        !is_there
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use memferry_sys::Pages;

    use super::*;

    #[test]
    fn memory_that_is_there_is_looked_at_seldom_and_absent_memory_always() {
        let (mut looks, count) = (Looks::default(), Cell::new(0));
        let mut ask = |there: bool| {
            looks.is_page_absent(7 * page_bytes(), |_| {
                count.set(count.get() + 1);
                there
            })
        };
        for _ in 0..5 {
            assert!(ask(false));
        }
        assert_eq!(count.get(), 5);
        for _ in 0..2 * (usize::from(Looks::TRUST) + 1) {
            assert!(!ask(true));
        }
        assert_eq!(count.get(), 7);
        assert!(ask(false), "trust has an end");
        assert!(ask(false), "and what is gone is not trusted");
    }

    #[test]
    fn as_many_buffers_as_there_are_places_are_known() {
        let (mut looks, count) = (Looks::default(), Cell::new(0));
        for round in 1..=3 {
            for page in 1..=Looks::PLACES {
                let look = |_| {
                    count.set(count.get() + 1);
                    true
                };
                assert!(!looks.is_page_absent(page << 20, look));
            }
            assert_eq!(count.get(), Looks::PLACES, "round {round}");
        }
    }

    #[test]
    fn the_page_of_the_last_byte_decides() {
        let mut pages = Pages::new(8 * page_bytes()).unwrap();
        pages.as_mut_slice()[..4 * page_bytes()].fill(1);
        let pieces = [Piece::target(pages.as_ptr(), pages.len())];
        let is_absent = |bytes: usize| Looks::default().is_absent(&pieces, bytes as u64);
        assert!(!is_absent(0) && !is_absent(4 * page_bytes()));
        assert!(is_absent(4 * page_bytes() + 1) && is_absent(8 * page_bytes()));
    }

    #[test]
    fn one_absent_page_is_found_in_one_piece_and_among_many() {
        let mut pages = Pages::new(1024 * page_bytes()).unwrap();
        pages.as_mut_slice().fill(1);
        let piece = |page: usize, length| {
            Piece::target(pages.as_ptr().wrapping_add(page * page_bytes()), length)
        };
        let one = [piece(0, 256 * page_bytes())];
        let close: Vec<_> = (0..128).map(|index| piece(2 * index, page_bytes())).collect();
        let few = [piece(0, 10), piece(100, 10), piece(101, 0), piece(200, 10)];
        let is_absent = |pieces: &[Piece]| Looks::default().may_be_absent(pieces);
        assert!(![&one[..], &close, &few].into_iter().any(is_absent));
        // SAFETY: the page is this test's, and nobody reads it any more.
        let taken = unsafe {
            libc::madvise(piece(100, 1).address.cast(), page_bytes(), libc::MADV_DONTNEED)
        };
        assert_eq!(taken, 0);
        assert!([&one[..], &close, &few].into_iter().all(is_absent));
        let far: Vec<_> = (0..128).map(|index| piece(8 * index, 1)).collect();
        assert!(is_absent(&far), "too many to look at");
    }

    #[test]
    fn a_part_is_brought_in_and_no_more_and_keeps_its_bytes() {
        let mut pages = Pages::new(64 * page_bytes()).unwrap();
        pages.as_mut_slice()[9 * page_bytes()] = 9;
        let pieces = [Piece::target(pages.as_ptr(), pages.len())];
        let (offset, length) = (8 * page_bytes() as u64 + 1, 3 * page_bytes() as u64);
        populate(&pieces, offset, length, Use::Write);
        let at = pages.as_ptr() as usize;
        assert_eq!(residency::resident_pages(at, pages.len()).unwrap(), 4);
        assert_eq!(pages.as_slice()[9 * page_bytes()], 9);
    }
}
