//! State that a cache, its leases and its threads share.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use memferry_sys::clock;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::stats::{Block, kinds::PinCounters};
use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock};
use memferry_sys::userfault::{MappingEvent, Userfault};

use crate::pinning::{Access, PageRange, PinError, PinToken, Pinner};

use super::PinCacheLimits;
use super::entry::PinEntry;
use super::events::{MappingEventQueue, empty_event_list};
use super::index::{DeferredRelease, PinIndex};
use super::statistics::PinCacheStatistics;

/// The index with its lock, the pinner and the count of pinned bytes.
#[derive(Debug)]
pub(super) struct PinCacheShared {
    pub(super) pinner: Arc<dyn Pinner>,
    state: Mutex<PinCacheState>,
    bytes_pinned: AtomicU64,
    /// What `memferry top` shows. Written with the lock held.
    shown: Block<PinCounters>,
    owner: OwnerProcess,
}

#[derive(Debug)]
struct PinCacheState {
    index: PinIndex,
    /// Swapped with the list of events, so that taking the events does not allocate.
    spare: Vec<MappingEvent>,
}

/// The source of events of a monitored cache. Without it, invalidation is explicit.
#[derive(Debug, Clone)]
pub(super) struct MappingMonitor {
    pub(super) userfault: Arc<Userfault>,
    pub(super) events: Arc<MappingEventQueue>,
}

impl PinCacheShared {
    pub(super) fn new(pinner: Arc<dyn Pinner>, limits: PinCacheLimits) -> Self {
        let shown = Block::open(0, pinner.name());
        Self {
            pinner,
            shown,
            state: Mutex::new(PinCacheState {
                index: PinIndex::new(limits),
                spare: empty_event_list(),
            }),
            bytes_pinned: AtomicU64::new(0),
            owner: OwnerProcess::current(),
        }
    }

    /// Whether this process created the cache. In a child, a thread that does not exist there may
    /// hold the lock forever.
    pub(super) fn is_owner_process(&self) -> bool {
        self.owner.is_current()
    }

    /// Runs `work` on the index after applying all events that were read. Then unregisters ranges
    /// under the lock, and unpins entries after the lock is released.
    pub(super) fn with<R>(
        &self,
        monitor: Option<&MappingMonitor>,
        work: impl FnOnce(&mut PinIndex, &mut DeferredRelease) -> R,
    ) -> R {
        let mut deferred = DeferredRelease::default();
        let result = {
            let mut state = lock(&self.state);
            if let Some(monitor) = monitor.filter(|monitor| monitor.events.has_events()) {
                self.apply_events(&monitor.events, &mut state, &mut deferred);
            }
            let result = work(&mut state.index, &mut deferred);
            if monitor.is_some_and(|monitor| monitor.events.has_reader_failed()) {
                // No further events arrive, so nothing may stay cached.
                self.invalidate_all(&mut state.index, &mut deferred);
            }
            if let Some(monitor) = monitor {
                // Under the lock: otherwise the range of a pin that starts concurrently could be
                // unregistered.
                for part in
                    deferred.unregister.iter().flat_map(|&range| state.index.uncovered(range))
                {
                    monitor.userfault.unregister(part.start(), part.bytes());
                }
            }
            self.show(&state.index);
            result
        };
        // If the pinner panics for one entry, the others are unpinned all the same.
        let mut panicked = None;
        for entry in deferred.unpin {
            let unpin = AssertUnwindSafe(|| self.unpin(&entry));
            panicked = catch_unwind(unpin).err().or(panicked);
        }
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        result
    }

    /// Stores the statistics for `memferry top`. Called with the lock held.
    fn show(&self, index: &PinIndex) {
        let statistics = index.statistics(self.bytes_pinned.load(Ordering::Relaxed));
        self.shown.hits.set(statistics.hits);
        self.shown.misses.set(statistics.misses);
        self.shown.merges.set(statistics.merges);
        self.shown.evictions.set(statistics.evictions);
        self.shown.invalidations.set(statistics.invalidations);
        self.shown.uncached.set(statistics.uncached);
        self.shown.bytes_pinned.set(statistics.bytes_pinned);
        self.shown.entries.set(statistics.entries);
    }

    /// Pins a range and counts its bytes.
    pub(super) fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        if access == Access::MonitorOnly {
            return Ok(PinToken::new(0));
        }
        let token = self.pinner.pin(range, access)?;
        self.bytes_pinned.fetch_add(range.bytes() as u64, Ordering::Relaxed);
        Ok(token)
    }

    /// Releases a use of an entry.
    pub(super) fn release(&self, entry: &PinEntry) {
        // A child has only uncached entries and must not take the lock.
        if !self.is_owner_process() || lock(&self.state).index.release(entry) {
            self.unpin(entry);
        }
    }

    pub(super) fn statistics(&self, monitor: Option<&MappingMonitor>) -> PinCacheStatistics {
        let bytes_pinned = || self.bytes_pinned.load(Ordering::Relaxed);
        self.with(monitor, |index, _| index.statistics(bytes_pinned()))
    }

    fn unpin(&self, entry: &PinEntry) {
        if entry.access == Access::MonitorOnly {
            return;
        }
        self.pinner.unpin(entry.range, &entry.token);
        self.bytes_pinned.fetch_sub(entry.range.bytes() as u64, Ordering::Relaxed);
    }

    fn apply_events(
        &self,
        queue: &MappingEventQueue,
        state: &mut PinCacheState,
        deferred: &mut DeferredRelease,
    ) {
        let PinCacheState { index, spare } = state;
        let lost = queue.take(spare);
        for event in spare.drain(..) {
            self.apply_event(event, index, deferred);
        }
        if lost {
            self.invalidate_all(index, deferred);
            self.quarantine(None, index);
        }
    }

    fn apply_event(
        &self,
        event: MappingEvent,
        index: &mut PinIndex,
        deferred: &mut DeferredRelease,
    ) {
        match event {
            MappingEvent::Unmap { start, end } => {
                if let Some(range) = PageRange::between(start, end) {
                    self.invalidate(range, Some(range), index, deferred);
                }
            }
            MappingEvent::Remap { from, to, length } => {
                if let Ok(old) = PageRange::covering(from, length) {
                    self.invalidate(old, Some(old), index, deferred);
                }
                if let Ok(new) = PageRange::covering(to, length) {
                    self.invalidate(new, None, index, deferred);
                    // The userfaultfd registration moves with the pages.
                    deferred.unregister.push(new);
                }
            }
            MappingEvent::Remove { start, end } => {
                if let Some(range) = PageRange::between(start, end) {
                    self.invalidate(range, None, index, deferred);
                    self.quarantine(Some(range), index);
                }
            }
        }
    }

    /// As [`PinIndex::invalidate`], and notifies the pinner: a range in use stays pinned, and must
    /// not serve memory that is mapped there later.
    pub(super) fn invalidate(
        &self,
        range: PageRange,
        unmapped: Option<PageRange>,
        index: &mut PinIndex,
        deferred: &mut DeferredRelease,
    ) {
        self.pinner.invalidate(range);
        index.invalidate(range, unmapped, deferred);
    }

    /// Invalidates all memory.
    pub(super) fn invalidate_all(&self, index: &mut PinIndex, deferred: &mut DeferredRelease) {
        if let Some(all) = PageRange::between(0, isize::MAX as usize) {
            self.invalidate(all, None, index, deferred);
        }
    }

    fn quarantine(&self, range: Option<PageRange>, index: &mut PinIndex) {
        // A pin that tracks the mapping is correct whatever happens to the pages.
        if !self.pinner.tracks_mapping() {
            index.quarantine.add(range, clock::now_ns());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::events::MAX_EVENTS;
    use super::*;
    use crate::pinning::PopulatePinner;
    use memferry_sys::pages::page_bytes;

    fn pages(first: usize, count: usize) -> PageRange {
        PageRange::covering(first * page_bytes(), count * page_bytes()).unwrap()
    }

    /// Caches five pages at page 10 and at page 30, applies `events`, and returns which of the two
    /// are still found.
    fn found_after(events: impl IntoIterator<Item = MappingEvent>) -> [bool; 2] {
        let shared = PinCacheShared::new(Arc::new(PopulatePinner), PinCacheLimits::default());
        let queue = MappingEventQueue::new();
        events.into_iter().for_each(|event| queue.push(event));
        let (mut state, mut deferred) = (lock(&shared.state), DeferredRelease::default());
        for range in [pages(10, 5), pages(30, 5)] {
            let index = &mut state.index;
            let reservation = index.reserve(range, Access::Read, true, &mut deferred).unwrap();
            let entry = index.commit(&reservation, range, PinToken::new(0), &mut deferred);
            assert!(!index.release(&entry) && entry.is_cached());
        }
        shared.apply_events(&queue, &mut state, &mut deferred);
        assert!(!queue.has_events());
        [10, 30].map(|first| state.index.find(pages(first, 5), Access::Read).is_some())
    }

    fn unmapped(first: usize, count: usize) -> MappingEvent {
        let range = pages(first, count);
        MappingEvent::Unmap { start: range.start(), end: range.end() }
    }

    #[test]
    fn an_event_drops_what_it_touches_and_nothing_else() {
        assert_eq!(found_after([unmapped(15, 15)]), [true, true]);
        assert_eq!(found_after([unmapped(14, 1)]), [false, true]);
        let discarded =
            MappingEvent::Remove { start: pages(30, 1).start(), end: pages(30, 1).end() };
        assert_eq!(found_after([discarded]), [true, false]);
    }

    #[test]
    fn discarded_memory_comes_under_quarantine_if_its_frames_are_pinned() {
        #[derive(Debug)]
        struct FramePinner;
        impl Pinner for FramePinner {
            fn name(&self) -> &'static str {
                "frames"
            }
            fn pin(&self, _range: PageRange, _access: Access) -> Result<PinToken, PinError> {
                Ok(PinToken::new(0))
            }
            fn unpin(&self, _range: PageRange, _token: &PinToken) {}
            fn tracks_mapping(&self) -> bool {
                false
            }
        }
        let pinners: [(Arc<dyn Pinner>, bool); 2] =
            [(Arc::new(FramePinner), true), (Arc::new(PopulatePinner), false)];
        for (pinner, expected) in pinners {
            let (shared, queue) =
                (PinCacheShared::new(pinner, PinCacheLimits::default()), MappingEventQueue::new());
            queue.push(MappingEvent::Remove { start: pages(5, 1).start(), end: pages(5, 1).end() });
            let mut state = lock(&shared.state);
            shared.apply_events(&queue, &mut state, &mut DeferredRelease::default());
            assert_eq!(!state.index.quarantine.is_empty(), expected);
        }
    }

    #[test]
    fn a_move_drops_both_the_old_and_the_new_place() {
        let (old, new) = (pages(12, 1).start(), pages(34, 1).start());
        let length = page_bytes();
        assert_eq!(
            found_after([MappingEvent::Remap { from: old, to: new, length }]),
            [false, false]
        );
        assert_eq!(
            found_after([MappingEvent::Remap { from: 1 << 30, to: new, length }]),
            [true, false]
        );
    }

    #[test]
    fn more_events_than_the_list_holds_drop_everything() {
        let elsewhere = |count| (0..count).map(|_| unmapped(100, 1));
        assert_eq!(found_after(elsewhere(MAX_EVENTS)), [true, true]);
        assert_eq!(found_after(elsewhere(MAX_EVENTS + 1)), [false, false]);
    }

    #[test]
    fn a_pinner_that_panics_over_one_region_unpins_the_others() {
        #[derive(Debug, Default)]
        struct PanickingPinner(AtomicU64);
        impl Pinner for PanickingPinner {
            fn name(&self) -> &'static str {
                "panicking"
            }
            fn pin(&self, _range: PageRange, _access: Access) -> Result<PinToken, PinError> {
                Ok(PinToken::new(0))
            }
            fn unpin(&self, _range: PageRange, _token: &PinToken) {
                if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
                    resume_unwind(Box::new("injected panic"));
                }
            }
            fn tracks_mapping(&self) -> bool {
                false
            }
        }
        let pinner = Arc::new(PanickingPinner::default());
        let shared = PinCacheShared::new(pinner.clone(), PinCacheLimits::default());
        for range in [pages(10, 1), pages(20, 1), pages(30, 1)] {
            let token = shared.pin(range, Access::Read).unwrap();
            shared.with(None, |index, deferred| {
                let reservation = index.reserve(range, Access::Read, true, deferred).unwrap();
                let entry = index.commit(&reservation, range, token, deferred);
                assert!(!index.release(&entry));
            });
        }
        let all = AssertUnwindSafe(|| {
            shared.with(None, |index, deferred| shared.invalidate_all(index, deferred));
        });
        assert!(catch_unwind(all).is_err(), "the panic is not hidden");
        assert_eq!(pinner.0.load(Ordering::Relaxed), 3);
    }
}
