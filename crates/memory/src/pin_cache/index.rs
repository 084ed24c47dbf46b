//! The index of pinned memory: lookup, eviction and invalidation. It makes no system calls that
//! change anything: ranges to unpin or unregister are put into a [`DeferredRelease`] for the
//! caller.
//!
//! Cached entries never overlap. A request that overlaps cached entries is pinned together with
//! them; the new entry replaces them once it is pinned, and they are unpinned when they are not in
//! use any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use memferry_sys::residency;

use crate::pinning::{Access, PageRange, PinToken};

use super::PinCacheLimits;
use super::entry::PinEntry;
use super::quarantine::Quarantine;
use super::statistics::PinCacheStatistics;

/// What an operation on the index leaves to its caller.
#[derive(Debug, Default)]
pub(super) struct DeferredRelease {
    /// Entries to unpin after the lock is released.
    pub(super) unpin: Vec<Arc<PinEntry>>,
    /// Ranges to unregister while the lock is held, except the parts that [`PinIndex::uncovered`]
    /// excludes.
    pub(super) unregister: Vec<PageRange>,
}

/// A pin in progress, made without the lock. A change of its mapping in the meantime invalidates
/// it.
#[derive(Debug)]
pub(super) struct PinReservation {
    number: u64,
    pub(super) range: PageRange,
    pub(super) access: Access,
    pub(super) merges: bool,
}

#[derive(Debug)]
struct PendingPin {
    number: u64,
    range: PageRange,
    invalidated: bool,
}

/// The entries that requests can find, by address and by the time of their last use.
#[derive(Debug)]
pub(super) struct PinIndex {
    limits: PinCacheLimits,
    cached: BTreeMap<usize, Arc<PinEntry>>,
    /// Cached entries without users: the tick of the last release, and the start address.
    unused: BTreeMap<u64, usize>,
    pending: Vec<PendingPin>,
    cached_bytes: usize,
    /// Bytes of cached entries that are in use.
    used_bytes: usize,
    used_entries: usize,
    /// Counts releases and reservations, so that each has a unique number.
    tick: u64,
    pub(super) quarantine: Quarantine,
    pub(super) statistics: PinCacheStatistics,
}

impl PinIndex {
    pub(super) fn new(limits: PinCacheLimits) -> Self {
        Self {
            limits,
            cached: BTreeMap::new(),
            unused: BTreeMap::new(),
            pending: Vec::new(),
            cached_bytes: 0,
            used_bytes: 0,
            used_entries: 0,
            tick: 0,
            quarantine: Quarantine::default(),
            statistics: PinCacheStatistics::default(),
        }
    }

    /// Finds a cached entry that contains the requested range, and adds a user to it.
    pub(super) fn find(&mut self, requested: PageRange, access: Access) -> Option<Arc<PinEntry>> {
        let (_, entry) = self.cached.range(..=requested.start()).next_back()?;
        if !entry.range.contains(requested) || entry.access < access {
            return None;
        }
        let entry = Arc::clone(entry);
        if entry.acquire() == 0 {
            self.unused.remove(&entry.unused_since());
            self.count_used(&entry);
        }
        Some(entry)
    }

    /// Finds a monitored, unpinned entry that contains the requested range.
    pub(super) fn find_monitored(&self, requested: PageRange) -> Option<PageRange> {
        let (_, entry) = self.cached.range(..=requested.start()).next_back()?;
        let is_match = entry.access == Access::MonitorOnly && entry.range.contains(requested);
        is_match.then_some(entry.range)
    }

    /// Whether a cached entry overlaps the requested range.
    pub(super) fn overlaps(&self, requested: PageRange) -> bool {
        !self.overlapping(requested).is_empty()
    }

    /// Whether cached entries cover the requested range without a gap.
    pub(super) fn covers(&self, requested: PageRange, access: Access) -> bool {
        let mut at = requested.start();
        for entry in self.overlapping(requested).iter().filter(|entry| entry.access >= access) {
            if entry.range.start() > at {
                return false;
            }
            at = entry.range.end();
        }
        at >= requested.end()
    }

    /// Prepares a pin that is to be cached: decides on its range, and evicts entries to make space.
    /// `None` if there is no space, because entries are in use or the request is too large.
    pub(super) fn reserve(
        &mut self,
        requested: PageRange,
        access: Access,
        may_merge: bool,
        deferred: &mut DeferredRelease,
    ) -> Option<PinReservation> {
        let (mut range, mut widest, mut merges) = (requested, access, false);
        if may_merge {
            // Entries that are only monitored are evicted: they are no reason to pin their memory.
            let pinned = |entry: &Arc<PinEntry>| entry.access > Access::MonitorOnly;
            for entry in self.overlapping(requested).into_iter().filter(pinned) {
                range = range.merge(entry.range);
                widest = widest.max(entry.access);
                merges = true;
            }
            if !self.has_space(range) {
                (range, widest, merges) = (requested, access, false);
            }
        }
        if !self.has_space(range) {
            return None;
        }
        let number = self.next_tick();
        self.pending.push(PendingPin { number, range, invalidated: false });
        self.make_space(range, deferred);
        Some(PinReservation { number, range, access: widest, merges })
    }

    /// Caches a reservation that is now pinned, and returns its entry with one user. If another
    /// thread has cached the range first, that thread's entry is returned; if the reservation was
    /// invalidated or the space was used up, the result is an entry for this one use.
    pub(super) fn commit(
        &mut self,
        reservation: &PinReservation,
        requested: PageRange,
        token: PinToken,
        deferred: &mut DeferredRelease,
    ) -> Arc<PinEntry> {
        let invalidated = self.remove_pending(reservation);
        let (range, access) = (reservation.range, reservation.access);
        if !invalidated && let Some(existing) = self.find(requested, access) {
            deferred.unregister.push(range);
            deferred.unpin.push(Arc::new(PinEntry::new(range, access, token, false)));
            return existing;
        }
        if invalidated || !self.has_space(range) {
            deferred.unregister.push(range);
            self.statistics.uncached += 1;
            let entry = PinEntry::new(range, access, token, false);
            if invalidated {
                entry.mark_stale();
            }
            return Arc::new(entry);
        }
        for entry in self.overlapping(range) {
            self.retire(&entry, deferred);
            deferred.unregister.push(entry.range);
        }
        self.make_space(range, deferred);
        let entry = Arc::new(PinEntry::new(range, access, token, true));
        self.cached.insert(range.start(), Arc::clone(&entry));
        self.cached_bytes += range.bytes();
        self.count_used(&entry);
        self.statistics.merges += u64::from(reservation.merges);
        entry
    }

    /// Cancels a reservation whose memory could not be monitored or pinned.
    pub(super) fn cancel(&mut self, reservation: &PinReservation, deferred: &mut DeferredRelease) {
        self.remove_pending(reservation);
        deferred.unregister.push(reservation.range);
    }

    /// Removes a user. Returns whether the caller must unpin the entry.
    pub(super) fn release(&mut self, entry: &PinEntry) -> bool {
        if entry.release() > 0 {
            return false;
        }
        if entry.is_cached() {
            let tick = self.next_tick();
            entry.set_unused_since(tick);
            self.unused.insert(tick, entry.range.start());
            self.used_bytes -= entry.range.bytes();
            self.used_entries -= 1;
        }
        !entry.is_cached()
    }

    /// Removes all entries that overlap a range, and invalidates pins in progress there.
    /// Unregisters their memory, except the range `unmapped`, which the kernel has unregistered.
    pub(super) fn invalidate(
        &mut self,
        range: PageRange,
        unmapped: Option<PageRange>,
        deferred: &mut DeferredRelease,
    ) {
        for pending in self.pending.iter_mut().filter(|pending| pending.range.overlaps(range)) {
            pending.invalidated = true;
        }
        for entry in self.overlapping(range) {
            entry.mark_stale();
            self.statistics.invalidations += 1;
            self.retire(&entry, deferred);
            match unmapped {
                Some(unmapped) => {
                    deferred
                        .unregister
                        .extend(entry.range.subtract(unmapped).into_iter().flatten());
                }
                None => deferred.unregister.push(entry.range),
            }
        }
    }

    /// Removes unused entries, the least recently used first, until `bytes` are freed or none is
    /// left. Returns whether any was removed.
    pub(super) fn evict(&mut self, bytes: usize, deferred: &mut DeferredRelease) -> bool {
        let mut free = 0;
        while free < bytes
            && let Some(entry) = self.least_recently_used(None)
        {
            free += entry.range.bytes();
            self.statistics.evictions += 1;
            self.retire(&entry, deferred);
            deferred.unregister.push(entry.range);
        }
        free > 0
    }

    /// Removes all entries that are not completely mapped any more.
    pub(super) fn invalidate_unmapped(&mut self, deferred: &mut DeferredRelease) {
        let is_unmapped = |entry: &PageRange| !residency::is_mapped(entry.start(), entry.bytes());
        let ranges: Vec<_> = self.cached.values().map(|entry| entry.range).collect();
        for range in ranges.into_iter().filter(is_unmapped) {
            self.invalidate(range, None, deferred);
        }
    }

    /// The parts of a range that neither a cached entry nor a pin in progress needs monitored.
    pub(super) fn uncovered(&self, range: PageRange) -> Vec<PageRange> {
        let cached = self.overlapping(range);
        let cached = cached.iter().map(|entry| entry.range);
        let mut remaining = vec![range];
        for covered in cached.chain(self.pending.iter().map(|pending| pending.range)) {
            remaining =
                remaining.iter().flat_map(|part| part.subtract(covered)).flatten().collect();
        }
        remaining
    }

    /// The counters, with the current content.
    pub(super) fn statistics(&self, bytes_pinned: u64) -> PinCacheStatistics {
        let (bytes_cached, entries) = (self.cached_bytes as u64, self.cached.len() as u64);
        PinCacheStatistics { bytes_pinned, bytes_cached, entries, ..self.statistics }
    }

    /// Cached entries that overlap a range, sorted by address.
    fn overlapping(&self, range: PageRange) -> Vec<Arc<PinEntry>> {
        let before = self.cached.range(..range.start()).next_back();
        let inside = self.cached.range(range.start()..range.end());
        let all = before.into_iter().chain(inside).map(|(_, entry)| entry);
        all.filter(|entry| entry.range.overlaps(range)).cloned().collect()
    }

    /// Whether an entry of this range could be cached after eviction of all unused entries and
    /// those that it replaces.
    fn has_space(&self, range: PageRange) -> bool {
        let (mut bytes, mut entries) = (self.used_bytes, self.used_entries);
        for entry in self.overlapping(range).iter().filter(|entry| entry.is_in_use()) {
            bytes -= entry.range.bytes();
            entries -= 1;
        }
        bytes.saturating_add(range.bytes()) <= self.limits.max_bytes
            && entries < self.limits.max_entries
    }

    /// Evicts unused entries until an entry of this range fits beside those that it does not
    /// replace.
    fn make_space(&mut self, range: PageRange, deferred: &mut DeferredRelease) {
        let replaced = self.overlapping(range);
        let replaced_bytes: usize = replaced.iter().map(|entry| entry.range.bytes()).sum();
        while self.cached_bytes - replaced_bytes + range.bytes() > self.limits.max_bytes
            || self.cached.len() - replaced.len() >= self.limits.max_entries
        {
            let Some(entry) = self.least_recently_used(Some(range)) else { break };
            self.statistics.evictions += 1;
            self.retire(&entry, deferred);
            deferred.unregister.push(entry.range);
        }
    }

    fn least_recently_used(&self, except: Option<PageRange>) -> Option<Arc<PinEntry>> {
        let mut entries = self.unused.values().filter_map(|start| self.cached.get(start));
        entries.find(|entry| except.is_none_or(|range| !entry.range.overlaps(range))).cloned()
    }

    /// Removes a cached entry from the index. The caller unregisters its memory.
    fn retire(&mut self, entry: &Arc<PinEntry>, deferred: &mut DeferredRelease) {
        self.cached.remove(&entry.range.start());
        self.cached_bytes -= entry.range.bytes();
        entry.mark_evicted();
        if entry.is_in_use() {
            self.used_bytes -= entry.range.bytes();
            self.used_entries -= 1;
        } else {
            self.unused.remove(&entry.unused_since());
            deferred.unpin.push(Arc::clone(entry));
        }
    }

    fn count_used(&mut self, entry: &PinEntry) {
        self.used_bytes += entry.range.bytes();
        self.used_entries += 1;
    }

    fn remove_pending(&mut self, reservation: &PinReservation) -> bool {
        let at = self.pending.iter().position(|pending| pending.number == reservation.number);
        at.is_none_or(|at| self.pending.swap_remove(at).invalidated)
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::pages::page_bytes;

    fn pages(first: usize, count: usize) -> PageRange {
        PageRange::covering(first * page_bytes(), count * page_bytes()).unwrap()
    }

    fn begin(
        index: &mut PinIndex,
        range: PageRange,
        deferred: &mut DeferredRelease,
    ) -> PinReservation {
        index.reserve(range, Access::Read, true, deferred).unwrap()
    }

    #[test]
    fn a_pin_whose_memory_changes_while_it_is_made_is_not_kept() {
        let (mut index, mut deferred) =
            (PinIndex::new(PinCacheLimits::default()), DeferredRelease::default());
        let (range, other) = (pages(10, 5), pages(20, 5));
        let reservations = [range, other].map(|range| begin(&mut index, range, &mut deferred));
        index.invalidate(pages(14, 1), None, &mut deferred);
        let invalidated = index.commit(&reservations[0], range, PinToken::new(0), &mut deferred);
        let good = index.commit(&reservations[1], other, PinToken::new(1), &mut deferred);
        assert!(!invalidated.is_cached() && invalidated.is_stale() && good.is_cached());
        assert!(index.find(range, Access::Read).is_none());
        assert!(index.release(&invalidated) && !index.release(&good));
        assert_eq!(deferred.unregister, [range]);
    }

    #[test]
    fn of_two_threads_that_pin_the_same_memory_the_later_gives_way() {
        let (mut index, mut deferred) =
            (PinIndex::new(PinCacheLimits::default()), DeferredRelease::default());
        let range = pages(10, 5);
        let reservations = [range, range].map(|range| begin(&mut index, range, &mut deferred));
        let first = index.commit(&reservations[0], range, PinToken::new(0), &mut deferred);
        let second = index.commit(&reservations[1], range, PinToken::new(1), &mut deferred);
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(
            deferred.unpin.iter().map(|entry| entry.token.number()).collect::<Vec<_>>(),
            [1]
        );
    }

    #[test]
    fn what_is_kept_or_being_pinned_stays_watched() {
        let (mut index, mut deferred) =
            (PinIndex::new(PinCacheLimits::default()), DeferredRelease::default());
        let cached = begin(&mut index, pages(10, 5), &mut deferred);
        index.commit(&cached, pages(10, 5), PinToken::new(0), &mut deferred);
        let pending = begin(&mut index, pages(20, 5), &mut deferred);
        assert_eq!(index.uncovered(pages(8, 20)), [pages(8, 2), pages(15, 5), pages(25, 3)]);
        index.cancel(&pending, &mut deferred);
        assert_eq!(index.uncovered(pages(8, 20)), [pages(8, 2), pages(15, 13)]);
    }

    #[test]
    fn the_part_that_is_gone_needs_no_unwatching() {
        let (mut index, mut deferred) =
            (PinIndex::new(PinCacheLimits::default()), DeferredRelease::default());
        let reservation = begin(&mut index, pages(10, 5), &mut deferred);
        index.commit(&reservation, pages(10, 5), PinToken::new(0), &mut deferred);
        index.invalidate(pages(8, 4), Some(pages(8, 4)), &mut deferred);
        assert_eq!(deferred.unregister, [pages(12, 3)]);
    }
}
