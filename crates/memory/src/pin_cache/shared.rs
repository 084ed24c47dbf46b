//! What a cache, its leases and its reaper have in common.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock};
use memferry_sys::userfault::{Event, Userfault};
use memferry_sys::{clock, fork};

use crate::pinning::{Access, PageRange, PinError, Pinner, Token};

use super::Limits;
use super::index::{Cleared, Index};
use super::news::{News, empty_list};
use super::region::Region;
use super::statistics::Statistics;

/// The index, its lock, and what it takes to use it.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pinner: Arc<dyn Pinner>,
    inside: Mutex<Inside>,
    bytes_pinned: AtomicU64,
    generation: u64,
}

#[derive(Debug)]
struct Inside {
    index: Index,
    /// Exchanged for the list of news, so that taking it allocates nothing.
    spare: Vec<Event>,
}

/// How a cache hears of changes. Without it, only by being told.
#[derive(Debug, Clone)]
pub(super) struct Ears {
    pub(super) userfault: Arc<Userfault>,
    pub(super) news: Arc<News>,
}

impl Shared {
    pub(super) fn new(pinner: Arc<dyn Pinner>, limits: Limits) -> Self {
        fork::watch();
        Self {
            pinner,
            inside: Mutex::new(Inside { index: Index::new(limits), spare: empty_list() }),
            bytes_pinned: AtomicU64::new(0),
            generation: fork::generation(),
        }
    }

    /// Whether this is the process that made the cache. In a child the lock may be held for ever by
    /// a thread that does not exist there.
    pub(super) fn is_home(&self) -> bool {
        fork::generation() == self.generation
    }

    /// Works on the index as it is after all that was heard, then unwatches under the lock and
    /// unpins without it what the work cleared.
    pub(super) fn with<R>(
        &self,
        ears: Option<&Ears>,
        work: impl FnOnce(&mut Index, &mut Cleared) -> R,
    ) -> R {
        let mut cleared = Cleared::default();
        let result = {
            let mut inside = lock(&self.inside);
            if let Some(ears) = ears.filter(|ears| ears.news.is_some()) {
                self.take_in(&ears.news, &mut inside, &mut cleared);
            }
            let result = work(&mut inside.index, &mut cleared);
            if ears.is_some_and(|ears| ears.news.is_deaf()) {
                // What changes from now on is not heard of, so nothing is kept.
                self.invalidate_all(&mut inside.index, &mut cleared);
            }
            if let Some(ears) = ears {
                // Under the lock: else the memory of a pin that begins meanwhile would be missed.
                for piece in cleared.unwatch.iter().flat_map(|&range| inside.index.uncovered(range))
                {
                    ears.userfault.unwatch(piece.start(), piece.bytes());
                }
            }
            result
        };
        // A pinner that panics over one region does not leave the others pinned.
        let mut panicked = None;
        for region in cleared.unpin {
            let unpin = AssertUnwindSafe(|| self.unpin(&region));
            panicked = catch_unwind(unpin).err().or(panicked);
        }
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        result
    }

    /// Pins, and counts.
    pub(super) fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        if access == Access::Watch {
            return Ok(Token(0));
        }
        let token = self.pinner.pin(range, access)?;
        self.bytes_pinned.fetch_add(range.bytes() as u64, Ordering::Relaxed);
        Ok(token)
    }

    /// Ends the use of a region.
    pub(super) fn release(&self, region: &Region) {
        // In a child there are only regions for one use, and the lock must not be taken.
        if !self.is_home() || lock(&self.inside).index.release(region) {
            self.unpin(region);
        }
    }

    pub(super) fn statistics(&self, ears: Option<&Ears>) -> Statistics {
        let bytes_pinned = || self.bytes_pinned.load(Ordering::Relaxed);
        self.with(ears, |index, _| index.statistics(bytes_pinned()))
    }

    fn unpin(&self, region: &Region) {
        if region.access == Access::Watch {
            return;
        }
        self.pinner.unpin(region.range, region.token);
        self.bytes_pinned.fetch_sub(region.range.bytes() as u64, Ordering::Relaxed);
    }

    fn take_in(&self, news: &News, inside: &mut Inside, cleared: &mut Cleared) {
        let Inside { index, spare } = inside;
        let lost = news.take(spare);
        for event in spare.drain(..) {
            self.apply(event, index, cleared);
        }
        if lost {
            self.invalidate_all(index, cleared);
            self.put_under_quarantine(None, index);
        }
    }

    fn apply(&self, event: Event, index: &mut Index, cleared: &mut Cleared) {
        match event {
            Event::Unmapped { start, end } => {
                if let Some(range) = PageRange::between(start, end) {
                    self.invalidate(range, Some(range), index, cleared);
                }
            }
            Event::Moved { from, to, length } => {
                if let Ok(old) = PageRange::covering(from, length) {
                    self.invalidate(old, Some(old), index, cleared);
                }
                if let Ok(new) = PageRange::covering(to, length) {
                    self.invalidate(new, None, index, cleared);
                    // The pages took their registration along.
                    cleared.unwatch.push(new);
                }
            }
            Event::Discarded { start, end } => {
                if let Some(range) = PageRange::between(start, end) {
                    self.invalidate(range, None, index, cleared);
                    self.put_under_quarantine(Some(range), index);
                }
            }
        }
    }

    /// As [`Index::invalidate`], and says so to the pinner: what is in use stays pinned, and must not
    /// be taken for the memory that is there next.
    pub(super) fn invalidate(
        &self,
        range: PageRange,
        gone: Option<PageRange>,
        index: &mut Index,
        cleared: &mut Cleared,
    ) {
        self.pinner.outdate(range);
        index.invalidate(range, gone, cleared);
    }

    /// The same for all memory.
    pub(super) fn invalidate_all(&self, index: &mut Index, cleared: &mut Cleared) {
        if let Some(all) = PageRange::between(0, isize::MAX as usize) {
            self.invalidate(all, None, index, cleared);
        }
    }

    fn put_under_quarantine(&self, range: Option<PageRange>, index: &mut Index) {
        // A pin that follows the mapping is right whatever happens to the pages.
        if !self.pinner.follows_mapping() {
            index.quarantine.add(range, clock::now_ns());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::news::MOST_EVENTS;
    use super::*;
    use crate::pinning::Populate;
    use memferry_sys::pages::page_bytes;

    fn pages(first: usize, count: usize) -> PageRange {
        PageRange::covering(first * page_bytes(), count * page_bytes()).unwrap()
    }

    /// Keeps five pages at page 10 and at page 30, tells `events`, and says which of the two are
    /// found afterwards.
    fn found_after(events: impl IntoIterator<Item = Event>) -> [bool; 2] {
        let shared = Shared::new(Arc::new(Populate), Limits::default());
        let news = News::new();
        events.into_iter().for_each(|event| news.tell(event));
        let (mut inside, mut cleared) = (lock(&shared.inside), Cleared::default());
        for range in [pages(10, 5), pages(30, 5)] {
            let index = &mut inside.index;
            let ticket = index.begin(range, Access::Read, true, &mut cleared).unwrap();
            let region = index.commit(&ticket, range, Token(0), &mut cleared);
            assert!(!index.release(&region) && region.is_kept());
        }
        shared.take_in(&news, &mut inside, &mut cleared);
        assert!(!news.is_some());
        [10, 30].map(|first| inside.index.find(pages(first, 5), Access::Read).is_some())
    }

    fn unmapped(first: usize, count: usize) -> Event {
        let range = pages(first, count);
        Event::Unmapped { start: range.start(), end: range.end() }
    }

    #[test]
    fn an_event_drops_what_it_touches_and_nothing_else() {
        assert_eq!(found_after([unmapped(15, 15)]), [true, true]);
        assert_eq!(found_after([unmapped(14, 1)]), [false, true]);
        let discarded = Event::Discarded { start: pages(30, 1).start(), end: pages(30, 1).end() };
        assert_eq!(found_after([discarded]), [true, false]);
    }

    #[test]
    fn discarded_memory_comes_under_quarantine_if_its_frames_are_pinned() {
        #[derive(Debug)]
        struct Frames;
        impl Pinner for Frames {
            fn name(&self) -> &'static str {
                "frames"
            }
            fn pin(&self, _range: PageRange, _access: Access) -> Result<Token, PinError> {
                Ok(Token(0))
            }
            fn unpin(&self, _range: PageRange, _token: Token) {}
            fn follows_mapping(&self) -> bool {
                false
            }
        }
        let pinners: [(Arc<dyn Pinner>, bool); 2] =
            [(Arc::new(Frames), true), (Arc::new(Populate), false)];
        for (pinner, expected) in pinners {
            let (shared, news) = (Shared::new(pinner, Limits::default()), News::new());
            news.tell(Event::Discarded { start: pages(5, 1).start(), end: pages(5, 1).end() });
            let mut inside = lock(&shared.inside);
            shared.take_in(&news, &mut inside, &mut Cleared::default());
            assert_eq!(!inside.index.quarantine.is_empty(), expected);
        }
    }

    #[test]
    fn a_move_drops_both_the_old_and_the_new_place() {
        let (old, new) = (pages(12, 1).start(), pages(34, 1).start());
        let length = page_bytes();
        assert_eq!(found_after([Event::Moved { from: old, to: new, length }]), [false, false]);
        assert_eq!(found_after([Event::Moved { from: 1 << 30, to: new, length }]), [true, false]);
    }

    #[test]
    fn more_events_than_the_list_holds_drop_everything() {
        let elsewhere = |count| (0..count).map(|_| unmapped(100, 1));
        assert_eq!(found_after(elsewhere(MOST_EVENTS)), [true, true]);
        assert_eq!(found_after(elsewhere(MOST_EVENTS + 1)), [false, false]);
    }

    #[test]
    fn a_pinner_that_panics_over_one_region_unpins_the_others() {
        #[derive(Debug, Default)]
        struct Panicky(AtomicU64);
        impl Pinner for Panicky {
            fn name(&self) -> &'static str {
                "panicky"
            }
            fn pin(&self, _range: PageRange, _access: Access) -> Result<Token, PinError> {
                Ok(Token(0))
            }
            fn unpin(&self, _range: PageRange, _token: Token) {
                if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
                    resume_unwind(Box::new("on purpose"));
                }
            }
            fn follows_mapping(&self) -> bool {
                false
            }
        }
        let pinner = Arc::new(Panicky::default());
        let shared = Shared::new(pinner.clone(), Limits::default());
        for range in [pages(10, 1), pages(20, 1), pages(30, 1)] {
            let token = shared.pin(range, Access::Read).unwrap();
            shared.with(None, |index, cleared| {
                let ticket = index.begin(range, Access::Read, true, cleared).unwrap();
                let region = index.commit(&ticket, range, token, cleared);
                assert!(!index.release(&region));
            });
        }
        let all = AssertUnwindSafe(|| {
            shared.with(None, |index, cleared| shared.invalidate_all(index, cleared));
        });
        assert!(catch_unwind(all).is_err(), "the panic is not hidden");
        assert_eq!(pinner.0.load(Ordering::Relaxed), 3);
    }
}
