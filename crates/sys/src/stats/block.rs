//! A block of counters, in the page or in memory of its own.

use std::ops::Deref;
use std::ptr::NonNull;

use super::layout::Counters;
use super::page::{self, Page};
use crate::fork::OwnerProcess;

/// The counters of one thread, channel, endpoint, peer or cache. When it is dropped, they are added to those of
/// blocks that are gone, so that sums over a process never fall.
#[derive(Debug)]
pub struct Block<C: Counters> {
    counters: NonNull<C>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Page { page: &'static Page, number: usize, owner: OwnerProcess },
    Own,
}

// SAFETY: counters are atomics; the memory belongs to the value until it is dropped.
unsafe impl<C: Counters> Send for Block<C> {}
// SAFETY: as above.
unsafe impl<C: Counters> Sync for Block<C> {}

impl<C: Counters> Block<C> {
    /// Opens a block. Without a place in the page it is in memory that no other process sees.
    pub fn open(id: u64, name: &str) -> Self {
        Self::try_open(id, name).unwrap_or_else(|| {
            let counters = NonNull::from(Box::leak(Box::<C>::default()));
            Self { counters, place: Place::Own }
        })
    }

    /// Opens a block in the page; `None` if there is no page, or if it is full.
    pub fn try_open(id: u64, name: &str) -> Option<Self> {
        let page = page::current()?;
        let owner = OwnerProcess::current();
        let (number, counters) = page.allocate(id, name)?;
        Some(Self { counters, place: Place::Page { page, number, owner } })
    }
}

impl<C: Counters> Deref for Block<C> {
    type Target = C;

    #[inline(always)]
    fn deref(&self) -> &C {
        // SAFETY: the memory is valid until the value is dropped; in a forked child it is private memory.
        unsafe { self.counters.as_ref() }
    }
}

impl<C: Counters> Drop for Block<C> {
    fn drop(&mut self) {
        match self.place {
            Place::Page { page, number, owner } if owner.is_current() => page.free::<C>(number),
            // The page of the parent.
            Place::Page { .. } => {}
            // SAFETY: the box that `open` leaked, which nothing else refers to.
            Place::Own => drop(unsafe { Box::from_raw(self.counters.as_ptr()) }),
        }
    }
}
