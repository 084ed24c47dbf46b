//! A found translation, which keeps its line attached.

use std::ptr::NonNull;
#[cfg(feature = "comparison")]
use std::sync::atomic::{AtomicU64, Ordering};

use super::entries::SharedLine;
#[cfg(feature = "comparison")]
use super::entries::consecutive;
use super::error::LookupError;
use super::hazard::HazardCell;
use super::line::LineKey;
use super::shared::{LookupShared, PagePosition};

/// The translation of one page, with those of the following pages of its line. Until it is dropped,
/// the line stays attached; it may leave the cache before.
// Of few words, all of one size: a hit keeps them in registers.
pub struct Translation<'a> {
    /// The entry of the requested page.
    entry: u64,
    source: EntrySource,
    /// What keeps the line attached: a cell that names it, or a use that is counted under the lock.
    cell: Option<&'a HazardCell>,
    shared: &'a LookupShared,
    position: PagePosition,
}

/// Where the entries are.
#[derive(Clone, Copy)]
pub(crate) enum EntrySource {
    /// A line that is kept attached.
    Line(NonNull<SharedLine>),
    /// The first entry of the line in the flat table, whose entries are allocated as long as the
    /// lookup.
    #[cfg(feature = "comparison")]
    Flat(NonNull<AtomicU64>),
}

impl EntrySource {
    /// The entry of a page.
    ///
    /// # Safety
    /// The line must be attached, and have the page.
    #[inline(always)]
    pub(crate) unsafe fn entry(self, page: usize) -> u64 {
        match self {
            // SAFETY: the caller guarantees it.
            Self::Line(line) => unsafe { line.as_ref() }.entries.entry(page),
            // SAFETY: the caller guarantees it. Relaxed: the entries do not change while the line
            // is attached.
            #[cfg(feature = "comparison")]
            Self::Flat(entries) => unsafe { entries.add(page).as_ref() }.load(Ordering::Relaxed),
        }
    }
}

// SAFETY: the entries of an attached line do not change, and any thread may clear the cell that
// keeps it attached.
unsafe impl Send for Translation<'_> {}
// SAFETY: as above; a shared reference only reads entries.
unsafe impl Sync for Translation<'_> {}

impl<'a> Translation<'a> {
    /// Creates a translation of a line that a cell names, or of which the caller has a counted use.
    ///
    /// # Safety
    /// `entry` must be that of the page, and the line attached until the cell is cleared or the use
    /// ends.
    #[inline(always)]
    pub(crate) unsafe fn new(
        shared: &'a LookupShared,
        (entry, source): (u64, EntrySource),
        cell: Option<&'a HazardCell>,
        position: PagePosition,
    ) -> Self {
        Self { entry, source, cell, shared, position }
    }

    /// Returns the translation if the page has an entry.
    pub(crate) fn checked(self) -> Result<Self, LookupError> {
        if self.entry == 0 { Err(LookupError::NoMemory(self.address())) } else { Ok(self) }
    }

    /// The entry of the requested page; never 0.
    #[inline(always)]
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// The entry of the page `pages` after the requested one: 0 if it has no memory, `None` after
    /// the end of the line.
    #[inline]
    pub fn page(&self, pages: usize) -> Option<u64> {
        let page = self.page_number().checked_add(pages)?;
        (page < self.shared.line_entries).then(|| self.at(page))
    }

    /// The number of pages, from the requested one, whose entries differ by `step`, up to the end of
    /// the line and at most `max`. Does not walk lines that were attached as a
    /// [run](super::LineRun).
    #[inline]
    pub fn run_length(&self, step: u64, max: usize) -> usize {
        let page = self.page_number();
        let max = max.min(self.pages_left());
        match self.source {
            // SAFETY: the line is attached until the drop.
            EntrySource::Line(line) => unsafe { line.as_ref() }.entries.run_length(page, step, max),
            #[cfg(feature = "comparison")]
            EntrySource::Flat(_) => consecutive(|page| self.at(page), page, step, max),
        }
    }

    /// The number of pages from the requested one to the end of the line.
    #[inline]
    pub fn pages_left(&self) -> usize {
        self.shared.line_entries - self.page_number()
    }

    /// The entries from the requested page to the end of the line; 0 if a page has no memory.
    pub fn remaining(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        (self.page_number()..self.shared.line_entries).map(|page| self.at(page))
    }

    /// The address of the requested page.
    pub fn address(&self) -> u64 {
        self.position.address >> self.shared.page_shift << self.shared.page_shift
    }

    /// The line of the page.
    pub fn line(&self) -> LineKey {
        self.shared.line_of(self.position)
    }

    #[inline]
    fn page_number(&self) -> usize {
        self.shared.page_in_line(self.position)
    }

    #[inline]
    fn at(&self, page: usize) -> u64 {
        debug_assert!(page < self.shared.line_entries);
        // SAFETY: the line is attached until the drop, and callers check the page.
        unsafe { self.source.entry(page) }
    }
}

impl Drop for Translation<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match self.cell {
            Some(cell) => self.shared.release_cell(cell),
            None => self.shared.release_counted(self.position.owner, self.position.address),
        }
    }
}

impl std::fmt::Debug for Translation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translation")
            .field("address", &self.address())
            .field("entry", &self.entry())
            .finish_non_exhaustive()
    }
}
