//! The portals of the model: pages of ordinary memory. Drivers store descriptors to them, and the engines
//! watch them and take the descriptors out.
//!
//! Each queue has a page of lines, which its driver uses in turn, from the first one on after the queue was
//! enabled. A device needs no such order, but memory does: a descriptor that is stored over another one
//! is noticed by the gap that the other one leaves.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use memferry_sys::Pages;
use memferry_sys::portal::{PORTAL_LINES, PORTAL_STRIDE, PortalWords};

use crate::dsa::registers::PORTAL_BYTES;

/// The size of the portal page that is watched, the first of the four of a queue.
pub(super) const PAGE_BYTES: usize = PORTAL_LINES * PORTAL_STRIDE;

/// The portals of all queues. Only a thread that has the lock of the device takes descriptors.
#[derive(Debug)]
pub(super) struct ModelPortals {
    pages: Pages,
    /// The line of each queue that its driver uses next.
    next: Vec<CachePadded<AtomicUsize>>,
}

impl ModelPortals {
    pub(super) fn new(queues: usize) -> io::Result<Self> {
        let pages = Pages::new(queues * PORTAL_BYTES)?;
        pages.exclude_from_fork()?;
        Ok(Self { pages, next: (0..queues).map(|_| CachePadded::default()).collect() })
    }

    /// All pages.
    pub(super) fn memory(&self) -> (NonNull<u8>, usize) {
        let start = NonNull::new(self.pages.as_ptr()).expect("a mapping is not at 0");
        (start, self.pages.len())
    }

    /// The page of a queue.
    pub(super) fn page(&self, queue: usize) -> (NonNull<u8>, usize) {
        assert!(queue < self.next.len(), "the device has no such queue");
        let (start, _) = self.memory();
        // SAFETY: inside the pages, which have space for every queue.
        (unsafe { start.add(queue * PORTAL_BYTES) }, PAGE_BYTES)
    }

    /// A word of the pages, by its offset in bytes.
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= self.pages.len() && at.is_multiple_of(8), "a word of the pages");
        // SAFETY: an aligned word of pages that live as long as this, which everybody accesses by atomic
        // operations, or by an instruction that stores a whole line.
        unsafe { AtomicU64::from_ptr(self.pages.as_ptr().add(at).cast()) }
    }

    fn line(queue: usize, line: usize) -> usize {
        queue * PORTAL_BYTES + line * PORTAL_STRIDE
    }

    fn is_full(&self, queue: usize, line: usize) -> bool {
        // Acquire: what was stored before this line is visible.
        self.word(Self::line(queue, line)).load(Ordering::Acquire) != 0
    }

    fn next(&self, queue: usize) -> usize {
        self.next[queue].load(Ordering::Relaxed)
    }

    /// Whether there is a descriptor for any queue, where its driver uses the lines in turn.
    pub(super) fn has_next(&self) -> bool {
        (0..self.next.len()).any(|queue| self.is_full(queue, self.next(queue)))
    }

    /// Begins with the first line of a queue, which is enabled now.
    pub(super) fn restart(&self, queue: usize) {
        self.next[queue].store(0, Ordering::Relaxed);
    }

    /// Takes the next descriptor of a queue.
    pub(super) fn take_next(&self, queue: usize) -> Option<PortalWords> {
        let line = self.next(queue);
        if !self.is_full(queue, line) {
            return None;
        }
        let at = Self::line(queue, line);
        let word = |index: usize| self.word(at + 8 * index).load(Ordering::Relaxed);
        let words = std::array::from_fn(|index| u64::from_le(word(index)));
        self.word(at).store(0, Ordering::Release);
        self.next[queue].store((line + 1) % PORTAL_LINES, Ordering::Relaxed);
        Some(words)
    }

    /// Goes on with the first full line of a queue, if the next one is empty; returns the empty one.
    pub(super) fn skip_gap(&self, queue: usize) -> Option<usize> {
        let empty = self.next(queue);
        let after = (1..PORTAL_LINES).map(|offset| (empty + offset) % PORTAL_LINES);
        let full = after.into_iter().find(|line| self.is_full(queue, *line))?;
        // If the lines are used in turn, what precedes a full line was stored before.
        if self.is_full(queue, empty) {
            return None;
        }
        self.next[queue].store(full, Ordering::Relaxed);
        Some(empty)
    }

    /// Clears a line outside of the pages that are watched; returns its offset.
    pub(super) fn take_stray(&self) -> Option<usize> {
        let lines = (0..self.pages.len()).step_by(PORTAL_STRIDE);
        let mut strays = lines.filter(|at| at % PORTAL_BYTES >= PAGE_BYTES);
        let at = strays.find(|at| self.word(*at).load(Ordering::Acquire) != 0)?;
        self.word(at).store(0, Ordering::Release);
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(portals: &ModelPortals, queue: usize, line: usize, value: u64) {
        portals.word(ModelPortals::line(queue, line)).store(value, Ordering::Release);
    }

    #[test]
    fn descriptors_are_taken_in_turn_around_the_page() {
        let portals = ModelPortals::new(2).unwrap();
        for number in 0..3 * PORTAL_LINES {
            assert!(!portals.has_next() && portals.take_next(1).is_none());
            store(&portals, 1, number % PORTAL_LINES, number as u64 + 1);
            assert!(portals.has_next() && portals.take_next(0).is_none());
            assert_eq!(portals.take_next(1).unwrap()[0], number as u64 + 1);
            assert_eq!(portals.skip_gap(1), None);
        }
    }

    #[test]
    fn a_line_that_is_left_out_is_skipped_and_named() {
        let portals = ModelPortals::new(1).unwrap();
        store(&portals, 0, 2, 7);
        store(&portals, 0, 3, 8);
        assert!(!portals.has_next());
        assert_eq!(portals.skip_gap(0), Some(0));
        assert_eq!([(); 2].map(|()| portals.take_next(0).unwrap()[0]), [7, 8]);
        portals.restart(0);
        store(&portals, 0, 0, 9);
        assert_eq!(portals.take_next(0).unwrap()[0], 9);
        assert_eq!(portals.take_stray(), None);
        portals.word(PORTAL_BYTES - 8 * 8).store(1, Ordering::Release);
        assert_eq!([portals.take_stray(), portals.take_stray()], [Some(PORTAL_BYTES - 64), None]);
    }
}
