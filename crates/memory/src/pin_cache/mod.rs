//! Keeping memory pinned after use, to find it pinned the next time.
//!
//! [`PinCache::acquire`] pins memory, or finds it pinned, and gives a [`Lease`]. Requests that
//! overlap are merged into one region. What nobody uses is unpinned when the bounds are reached, the
//! longest unused first; what is in use is never unpinned, and a request for which there is no room
//! is pinned for its one use.
//!
//! # When the mapping changes
//!
//! A pin of page frames shows the old bytes for ever once other memory is mapped at its addresses.
//! With [`Watching::Explicit`] the application says what it unmaps, by [`PinCache::forget`], before
//! other memory can be mapped there. With [`Watching::Events`] the kernel says it:
//!
//! 1. Memory is watched before it is pinned, so every later change has an event. A pin during which
//!    an event for its memory arrives is used once and not kept.
//! 2. A thread that unmaps, moves or replaces watched memory returns when its event was read. But
//!    the memory is gone before that, and another thread may get the same addresses from the kernel
//!    while the first still waits. So a request first asks the kernel whether any change is between
//!    the mapping and its event ([`Userfault::is_changing`], which the kernel counts from inside the
//!    lock of the mappings). If not, every earlier change has been read.
//! 3. What was read is in the list that the request takes in before it looks for its memory. The
//!    reader takes the list's lock and marks the list before it reads, so whoever knows that an
//!    event was read sees the mark and waits for the lock.
//!
//! Together: if other memory was mapped at an address before a request for it began, then the old
//! mapping had gone before that, its change is counted or read when the request asks, and so the old
//! region is out of the index when the request looks. If changes do not stop for a while, the request
//! is pinned for one use, which is right, unless the pinner shares page frames among pins: that could
//! give it those of memory that is gone, and so it is refused.
//!
//! The list is bounded. If it overflows, everything is forgotten. Nobody who reads events can wait
//! for somebody who holds the cache's lock, so it may be held while memory is freed.
//!
//! A region whose mapping changed leaves the index at once. Leases of it say that they are stale, and
//! it is unpinned when the last of them is dropped.
//!
//! # Discarded memory
//!
//! The event of `madvise(MADV_DONTNEED)` is read *before* the pages go. A request that comes
//! in between pins the old pages. It is a request for memory that the application is discarding at
//! this moment, and whether it sees old bytes or zeroes is the application's own race. An application
//! without such a race is safe, however the threads are scheduled: requests before the call are
//! invalidated by its event, and requests after it pin the new pages. For those with the race, pins
//! of that memory are not kept for 100 milliseconds after the event, so that *later* requests are
//! right again. This is a limit in time and not a proof: if the discarding thread does not run
//! for that long between its event and its work, and another copies the same memory just then, the
//! old pages may be kept until the memory is forgotten or its mapping changes.
//!
//! # What events do not show
//!
//! - Mapped files, System V shared memory and memory watched by another userfaultfd cannot be
//!   watched. They are pinned for one use.
//! - Holes punched into shared memory through its descriptor, its truncation, and
//!   `MADV_GUARD_INSTALL` have no event, nor have `shmat` with `SHM_REMAP` and `remap_file_pages`
//!   over watched memory. Call [`PinCache::forget`].
//!
//! # What watching costs
//!
//! A request that finds its memory makes one system call that does nothing. Unmapping watched memory
//! waits until the reader ran: some ten microseconds, and milliseconds where all processors are busy.
//! A watched part of a mapping is a mapping of its own for the kernel, up to two more for each region,
//! and a huge page across its edge is split. Regions that are dropped are watched no more, and their mappings grow together
//! again; unmapping ends watching by itself.
//!
//! Memory that was not touched yet is pinned for one use and kept from its second use on: what is
//! mapped for one copy and unmapped after it is never watched.
//!
//! # If the reader ends
//!
//! A reader that panics closes its descriptor, so that no thread that unmaps memory waits for it. From
//! then on nothing is heard: everything is forgotten, and memory is pinned for one use.
//!
//! # Forked children
//!
//! A child has neither the threads nor the regions of its parent. Requests there are pinned for one
//! use by the same pinner; leases inherited from the parent do nothing.
//!
//! [`Userfault::is_changing`]: memferry_sys::userfault::Userfault::is_changing

mod index;
mod lease;
mod news;
mod promises;
mod quarantine;
mod region;
mod shared;
mod statistics;
mod watcher;

use std::io;
use std::sync::Arc;

use memferry_sys::userfault::{Denied, Unwatchable};
use memferry_sys::{clock, residency};

use crate::pinning::{Access, PageRange, PinError, Pinner, Token};

use index::{Cleared, Index, Ticket};
use region::Region;
use shared::{Ears, Shared};
use watcher::Watcher;

pub use lease::Lease;
pub use promises::Promises;
pub use statistics::Statistics;

/// How much a cache keeps pinned for later. What is in use beyond that is not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The bytes of all kept regions.
    pub most_bytes: usize,
    /// The number of kept regions.
    pub most_entries: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { most_bytes: 256 << 20, most_entries: 1024 }
    }
}

/// How a cache learns that a mapping changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watching {
    /// The kernel tells.
    Events,
    /// The application tells, by [`PinCache::forget`].
    Explicit,
    /// The kernel tells where that is permitted, else the application.
    EventsOrExplicit,
}

/// Why a cache could not be made.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Events were asked for and are not permitted.
    #[error("changes of mappings cannot be watched: {0}")]
    NoEvents(Denied),
    /// A thread or a descriptor could not be had.
    #[error("the threads of the pin-down cache could not be started: {0}")]
    NoThread(io::Error),
}

/// A cache of pinned memory.
#[derive(Debug)]
pub struct PinCache {
    shared: Arc<Shared>,
    watcher: Option<Watcher>,
    denied: Option<Denied>,
}

impl PinCache {
    /// An empty cache that pins by `pinner`.
    pub fn new(
        pinner: Arc<dyn Pinner>,
        limits: Limits,
        watching: Watching,
    ) -> Result<Self, StartError> {
        let shared = Arc::new(Shared::new(pinner, limits));
        let (watcher, denied) = match watching {
            Watching::Explicit => (None, None),
            Watching::Events => (Some(Watcher::start(&shared)?), None),
            Watching::EventsOrExplicit => match Watcher::start(&shared) {
                Ok(watcher) => (Some(watcher), None),
                Err(StartError::NoEvents(denied)) => {
                    tracing::info!(%denied, "the pin-down cache has to be told what is unmapped");
                    (None, Some(denied))
                }
                Err(error) => return Err(error),
            },
        };
        Ok(Self { shared, watcher, denied })
    }

    /// How it learns of changes: by events, or explicitly.
    pub fn watching(&self) -> Watching {
        if self.watcher.is_some() { Watching::Events } else { Watching::Explicit }
    }

    /// Why it hears no events, if they were asked for.
    pub fn why_no_events(&self) -> Option<Denied> {
        self.denied
    }

    /// What it pins by.
    pub fn pinner(&self) -> &Arc<dyn Pinner> {
        &self.shared.pinner
    }

    /// Pins `length` bytes at `address`, or finds them pinned.
    pub fn acquire(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.acquire_as(address, length, access, false)
    }

    /// As [`PinCache::acquire`], for memory that cannot be watched, or need not be: the pin is kept on
    /// the promise that the memory is [forgotten](PinCache::forget) before it is unmapped.
    ///
    /// # Safety
    /// That promise must be kept: else the pin is found again for other memory at the same addresses.
    pub unsafe fn acquire_promised(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.acquire_as(address, length, access, true)
    }

    /// Pins memory for one use, whatever is kept.
    pub fn acquire_once(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.pin_once(PageRange::covering(address, length)?, access)
    }

    fn acquire_as(
        &self,
        address: usize,
        length: usize,
        access: Access,
        is_promised: bool,
    ) -> Result<Lease, PinError> {
        let asked = PageRange::covering(address, length)?;
        if !self.shared.is_home() {
            return self.pin_once(asked, access);
        }
        let settled = self.watcher.as_ref().is_none_or(Watcher::settle);
        if !settled && self.shared.pinner.shares_frames() {
            // What is pinned there may be memory that is gone.
            let what = "pinning memory while mappings keep changing";
            return Err(PinError::Unsupported {
                what,
                cure: "it is copied in other ways meanwhile",
            });
        }
        let mut may_merge = true;
        loop {
            let step = self.shared.with(self.ears(), |index, cleared| {
                let found = if settled { index.find(asked, access) } else { None };
                if may_merge {
                    index.statistics.hits += u64::from(found.is_some());
                    index.statistics.misses += u64::from(found.is_none());
                }
                let wish = Wish { asked, access, settled, may_merge, is_promised };
                let begin = || self.begin(index, wish, cleared);
                found.map_or_else(begin, Step::Found)
            });
            match step {
                Step::Found(region) => return Ok(self.lease(region)),
                Step::PinOnce => return self.pin_once(asked, access),
                Step::Pin(ticket) => match self.pin_ticket(&ticket, asked) {
                    // What it was merged with may be what cannot be pinned, or not any more.
                    Err(_) if ticket.merges => may_merge = false,
                    outcome => return outcome,
                },
            }
        }
    }

    /// What is kept pinned of `length` bytes at `address`, if all of them are in one region. Pins
    /// nothing.
    pub fn find(&self, address: usize, length: usize, access: Access) -> Option<Lease> {
        let asked = PageRange::covering(address, length).ok()?;
        if !self.shared.is_home() || !self.watcher.as_ref().is_none_or(Watcher::settle) {
            return None;
        }
        let region = self.shared.with(self.ears(), |index, _| {
            let found = index.find(asked, access);
            index.statistics.hits += u64::from(found.is_some());
            found
        })?;
        Some(self.lease(region))
    }

    /// Whether memory was remembered before, by this call, and is the same still; if not, it is
    /// remembered now. Nothing is pinned. What is not kept in one piece, or cannot be watched, is not
    /// remembered.
    pub fn remember(&self, address: usize, length: usize) -> bool {
        let Ok(asked) = PageRange::covering(address, length) else { return false };
        if !self.shared.is_home() || !self.watcher.as_ref().is_some_and(Watcher::settle) {
            return false;
        }
        let (is_known, is_free) = self.shared.with(self.ears(), |index, cleared| {
            let known = index.watched(asked);
            // What is known is pinned next, in pieces, and not together with what was remembered.
            known.into_iter().for_each(|range| index.invalidate(range, None, cleared));
            (known.is_some(), known.is_none() && !index.overlaps(asked))
        });
        if is_free {
            drop(self.acquire(address, length, Access::Watch));
        }
        is_known
    }

    /// Whether `length` bytes at `address` are kept pinned, in however many regions. Only a hint:
    /// they may not be any more when the answer is used.
    pub fn keeps(&self, address: usize, length: usize, access: Access) -> bool {
        let Ok(asked) = PageRange::covering(address, length) else { return false };
        let keeps = |index: &mut Index, _: &mut Cleared| index.covers(asked, access);
        self.shared.is_home() && self.shared.with(self.ears(), keeps)
    }

    /// Unpins what overlaps `length` bytes at `address` as soon as nobody uses it, and lets no
    /// request find it any more.
    pub fn forget(&self, address: usize, length: usize) {
        if let Ok(range) = PageRange::covering(address, length)
            && self.shared.is_home()
        {
            let shared = &self.shared;
            shared.with(self.ears(), |index, cleared| {
                shared.invalidate(range, None, index, cleared);
            });
        }
    }

    /// Forgets everything.
    pub fn forget_all(&self) {
        if self.shared.is_home() {
            let shared = &self.shared;
            shared.with(self.ears(), |index, cleared| shared.invalidate_all(index, cleared));
        }
    }

    /// What it has done, and holds now. In a forked child there is nothing to tell.
    pub fn statistics(&self) -> Statistics {
        if !self.shared.is_home() {
            return Statistics::default();
        }
        self.shared.statistics(self.ears())
    }

    fn ears(&self) -> Option<&Ears> {
        self.watcher.as_ref().map(Watcher::ears)
    }

    fn lease(&self, region: Arc<Region>) -> Lease {
        Lease::new(&self.shared, region)
    }

    /// Decides how a request that found nothing is pinned, and begins to watch its memory.
    fn begin(&self, index: &mut Index, wish: Wish, cleared: &mut Cleared) -> Step {
        let Wish { asked, access, settled, may_merge, is_promised } = wish;
        let in_quarantine =
            !index.quarantine.is_empty() && index.quarantine.holds(asked, clock::now_ns());
        // Memory that nobody has touched is new. If it is unmapped after this use, as buffers for one
        // message are, watching it costs more than finding it again could save.
        let watches = self.ears().is_some() && !is_promised;
        let is_new = watches && !residency::is_resident(asked.end() - 1);
        let may_keep = settled && !in_quarantine && !is_new;
        let attempts = if may_keep { &[may_merge, false][..] } else { &[] };
        for &may_merge in attempts {
            let Some(ticket) = index.begin(asked, access, may_merge, cleared) else { break };
            if is_promised || self.watch(ticket.range, index, cleared) {
                return Step::Pin(ticket);
            }
            index.abandon(&ticket, cleared);
            if !ticket.merges {
                break;
            }
        }
        index.statistics.uncached += 1;
        Step::PinOnce
    }

    fn watch(&self, range: PageRange, index: &mut Index, cleared: &mut Cleared) -> bool {
        let Some(ears) = self.ears() else { return true };
        match ears.userfault.watch(range.start(), range.bytes()) {
            Ok(()) => true,
            Err(Unwatchable::NoRoom) => {
                // Regions that are watched no more give back mappings, once this work is done.
                index.evict(range.bytes(), cleared);
                false
            }
            Err(_) => false,
        }
    }

    fn pin_ticket(&self, ticket: &Ticket, asked: PageRange) -> Result<Lease, PinError> {
        let pinned = self.pin(ticket.range, ticket.access);
        self.shared.with(self.ears(), |index, cleared| match pinned {
            Ok(token) => Ok(self.lease(index.commit(ticket, asked, token, cleared))),
            Err(error) => {
                index.abandon(ticket, cleared);
                Err(error)
            }
        })
    }

    fn pin_once(&self, asked: PageRange, access: Access) -> Result<Lease, PinError> {
        let token = self.pin(asked, access)?;
        Ok(self.lease(Arc::new(Region::new(asked, access, token, false))))
    }

    /// Pins; if something is short, makes room for as much, then as much as can be, and tries again.
    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        let mut outcome = self.shared.pin(range, access);
        for bytes in [range.bytes(), usize::MAX] {
            match &outcome {
                Err(error) if error.is_shortage() && self.shared.is_home() => {}
                _ => break,
            }
            if !self.shared.with(self.ears(), |index, cleared| index.evict(bytes, cleared)) {
                break;
            }
            outcome = self.shared.pin(range, access);
        }
        outcome
    }
}

impl Drop for PinCache {
    fn drop(&mut self) {
        self.forget_all();
        if let Some(watcher) = self.watcher.take() {
            if self.shared.is_home() { watcher.end() } else { watcher.abandon() }
        }
    }
}

/// What a request that found nothing asks for.
#[derive(Debug, Clone, Copy)]
struct Wish {
    asked: PageRange,
    access: Access,
    /// No mapping is changing.
    settled: bool,
    may_merge: bool,
    /// Its owner says when it goes.
    is_promised: bool,
}

/// What a request does next.
#[derive(Debug)]
enum Step {
    Found(Arc<Region>),
    Pin(Ticket),
    PinOnce,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pinning::Populate;
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;

    #[test]
    fn pins_of_memory_under_quarantine_are_not_kept() {
        let cache =
            PinCache::new(Arc::new(Populate), Limits::default(), Watching::Explicit).unwrap();
        let pages = Pages::new(8 * page_bytes()).unwrap();
        let address = pages.as_ptr() as usize;
        let second = PageRange::covering(address + page_bytes(), 1).unwrap();
        // An hour from now, so that it does not end during the test.
        let later_ns = clock::now_ns() + 3_600_000_000_000;
        cache.shared.with(None, |index, _| index.quarantine.add(Some(second), later_ns));
        assert!(!cache.acquire(address, pages.len(), Access::Write).unwrap().is_kept());
        assert!(cache.acquire(address, page_bytes(), Access::Write).unwrap().is_kept());
        assert_eq!(cache.statistics().uncached, 1);
    }

    #[test]
    fn a_reader_that_panics_lets_the_application_unmap_and_nothing_is_kept() {
        use std::sync::atomic::Ordering;
        use std::time::Duration;
        let cache = PinCache::new(Arc::new(Populate), Limits::default(), Watching::Events);
        let cache = match cache {
            Ok(cache) => cache,
            Err(StartError::NoEvents(denied)) => {
                return memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, denied);
            }
            Err(error) => panic!("{error}"),
        };
        let touched = || {
            let mut pages = Pages::new(4 * page_bytes()).unwrap();
            pages.as_mut_slice().fill(1);
            pages
        };
        let acquire = |pages: &Pages| {
            cache.acquire(pages.as_ptr() as usize, pages.len(), Access::Write).unwrap()
        };
        let (first, second) = (touched(), touched());
        assert!(acquire(&first).is_kept() && acquire(&second).is_kept());
        cache.ears().unwrap().news.panics.store(true, Ordering::SeqCst);
        let (tell, told) = std::sync::mpsc::channel();
        let unmapping = std::thread::spawn(move || {
            drop(first);
            let _ = tell.send(());
        });
        told.recv_timeout(Duration::from_secs(60)).expect("the memory is unmapped");
        unmapping.join().unwrap();

        assert!(!cache.keeps(second.as_ptr() as usize, second.len(), Access::Write));
        for pages in [&second, &touched()] {
            assert!(!acquire(pages).is_kept());
        }
        assert_eq!(cache.statistics().entries, 0);
        drop((second, cache));
    }
}
