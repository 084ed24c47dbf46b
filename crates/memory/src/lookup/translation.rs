//! A translation that was found, and keeps its line in place while it lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::LookupError;
use super::line::LineName;
use super::shared::{Place, Shared};
use super::slot::Slot;

/// A translation of one page, with those of the following pages of its line. While it lives the
/// line stays attached, and stays in the cache if it was found there.
pub struct Translation<'a> {
    held: Held<'a>,
    shared: &'a Shared,
    place: Place,
}

enum Held<'a> {
    Slot {
        slot: &'a Slot,
        entries: &'a [AtomicU64],
    },
    /// The line lost its place in the cache, or got none, before its use could begin. Its use is
    /// counted in the table.
    Table(Arc<[u64]>),
}

impl<'a> Translation<'a> {
    #[inline(always)]
    pub(crate) fn of_slot(
        shared: &'a Shared,
        (slot, entries): (&'a Slot, &'a [AtomicU64]),
        place: Place,
    ) -> Self {
        Self { held: Held::Slot { slot, entries }, shared, place }
    }

    /// A translation of a slot that the caller holds, made in its place.
    #[inline(always)]
    pub(crate) fn of_hit(
        shared: &'a Shared,
        held: (&'a Slot, &'a [AtomicU64]),
        place: Place,
    ) -> Result<Self, LookupError> {
        if held.1[place.page].load(Ordering::Relaxed) == 0 {
            return Self::of_slot(shared, held, place).checked();
        }
        Ok(Self::of_slot(shared, held, place))
    }

    pub(crate) fn of_table(shared: &'a Shared, entries: Arc<[u64]>, place: Place) -> Self {
        Self { held: Held::Table(entries), shared, place }
    }

    /// Itself, if the page asked for has an entry.
    #[cold]
    pub(crate) fn checked(self) -> Result<Self, LookupError> {
        if self.entry() == 0 { Err(LookupError::NoMemory(self.address())) } else { Ok(self) }
    }

    /// The entry of the page that was asked for; never 0.
    #[inline]
    pub fn entry(&self) -> u64 {
        self.at(self.place.page)
    }

    /// The entry of the page that lies `pages` after the one that was asked for: 0 where it has
    /// none, nothing where the line is over.
    #[inline]
    pub fn page(&self, pages: usize) -> Option<u64> {
        let page = self.place.page.checked_add(pages)?;
        (page < self.shared.line_entries).then(|| self.at(page))
    }

    /// The entries from the page that was asked for to the end of the line; 0 where a page has none.
    pub fn rest(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        (self.place.page..self.shared.line_entries).map(|page| self.at(page))
    }

    /// The address of the first byte of the page that was asked for.
    pub fn address(&self) -> u64 {
        self.place.name.address + ((self.place.page as u64) << self.shared.page_shift)
    }

    /// The line, which begins at the address of its first page.
    pub fn line(&self) -> LineName {
        self.place.name
    }

    #[inline]
    fn at(&self, page: usize) -> u64 {
        match &self.held {
            // Relaxed: the slot was acquired, and its entries do not change while it is held.
            Held::Slot { entries, .. } => entries[page].load(Ordering::Relaxed),
            Held::Table(entries) => entries[page],
        }
    }
}

impl Drop for Translation<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match &self.held {
            Held::Slot { slot, .. } => {
                if slot.release() {
                    self.shared.wake();
                }
            }
            Held::Table(_) => self.shared.release_line(self.place.name),
        }
    }
}

impl std::fmt::Debug for Translation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translation")
            .field("address", &self.address())
            .field("entry", &self.entry())
            .field("cached", &matches!(self.held, Held::Slot { .. }))
            .finish_non_exhaustive()
    }
}
