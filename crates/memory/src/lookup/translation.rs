//! A found translation, which keeps its line attached.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::LookupError;
use super::line::LineKey;
use super::shared::{LookupShared, PagePosition};
use super::slot::LineSlot;

/// The translation of one page, with those of the following pages of its line. Until it is dropped,
/// the line stays attached, and stays in the cache if it was found there.
pub struct Translation<'a> {
    hold: TranslationHold<'a>,
    shared: &'a LookupShared,
    position: PagePosition,
}

enum TranslationHold<'a> {
    Slot {
        slot: &'a LineSlot,
        entries: &'a [AtomicU64],
    },
    /// The line was evicted, or had no free slot, before its use began. The table counts the use.
    Table(Arc<[u64]>),
}

impl<'a> Translation<'a> {
    #[inline(always)]
    pub(crate) fn of_slot(
        shared: &'a LookupShared,
        (slot, entries): (&'a LineSlot, &'a [AtomicU64]),
        position: PagePosition,
    ) -> Self {
        Self { hold: TranslationHold::Slot { slot, entries }, shared, position }
    }

    /// Creates a translation of a slot that the caller has acquired. Fails if the page has no
    /// entry.
    #[inline(always)]
    pub(crate) fn of_hit(
        shared: &'a LookupShared,
        acquired: (&'a LineSlot, &'a [AtomicU64]),
        position: PagePosition,
    ) -> Result<Self, LookupError> {
        if acquired.1[position.page].load(Ordering::Relaxed) == 0 {
            return Self::of_slot(shared, acquired, position).checked();
        }
        Ok(Self::of_slot(shared, acquired, position))
    }

    pub(crate) fn of_table(
        shared: &'a LookupShared,
        entries: Arc<[u64]>,
        position: PagePosition,
    ) -> Self {
        Self { hold: TranslationHold::Table(entries), shared, position }
    }

    /// Returns the translation if the page has an entry.
    #[cold]
    pub(crate) fn checked(self) -> Result<Self, LookupError> {
        if self.entry() == 0 { Err(LookupError::NoMemory(self.address())) } else { Ok(self) }
    }

    /// The entry of the requested page; never 0.
    #[inline]
    pub fn entry(&self) -> u64 {
        self.at(self.position.page)
    }

    /// The entry of the page `pages` after the requested one: 0 if it has no memory, `None` after
    /// the end of the line.
    #[inline]
    pub fn page(&self, pages: usize) -> Option<u64> {
        let page = self.position.page.checked_add(pages)?;
        (page < self.shared.line_entries).then(|| self.at(page))
    }

    /// The entries from the requested page to the end of the line; 0 if a page has no memory.
    pub fn remaining(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        (self.position.page..self.shared.line_entries).map(|page| self.at(page))
    }

    /// The address of the requested page.
    pub fn address(&self) -> u64 {
        self.position.line.address + ((self.position.page as u64) << self.shared.page_shift)
    }

    /// The line of the page.
    pub fn line(&self) -> LineKey {
        self.position.line
    }

    #[inline]
    fn at(&self, page: usize) -> u64 {
        match &self.hold {
            // Relaxed: the slot was acquired, and its entries do not change until it is released.
            TranslationHold::Slot { entries, .. } => entries[page].load(Ordering::Relaxed),
            TranslationHold::Table(entries) => entries[page],
        }
    }
}

impl Drop for Translation<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match &self.hold {
            TranslationHold::Slot { slot, .. } => {
                if slot.release() {
                    self.shared.wake_waiters();
                }
            }
            TranslationHold::Table(_) => self.shared.release_line(self.position.line),
        }
    }
}

impl std::fmt::Debug for Translation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translation")
            .field("address", &self.address())
            .field("entry", &self.entry())
            .field("cached", &matches!(self.hold, TranslationHold::Slot { .. }))
            .finish_non_exhaustive()
    }
}
