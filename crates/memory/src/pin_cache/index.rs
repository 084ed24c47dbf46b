//! Which memory is pinned, who uses it, and what goes when room is needed. No system calls: what is
//! to be unpinned or no longer watched is put into a [`Cleared`] for the caller.
//!
//! Kept regions never overlap. A request that overlaps kept regions is pinned together with them;
//! the new region takes their place once it is pinned, and they are unpinned when their last user
//! has left.

use std::collections::BTreeMap;
use std::sync::Arc;

use memferry_sys::residency;

use crate::pinning::{Access, PageRange, Token};

use super::Limits;
use super::quarantine::Quarantine;
use super::region::Region;
use super::statistics::Statistics;

/// What an operation on the index leaves to its caller.
#[derive(Debug, Default)]
pub(super) struct Cleared {
    /// To be unpinned, with no lock held.
    pub(super) unpin: Vec<Arc<Region>>,
    /// To be watched no more, apart from what [`Index::uncovered`] leaves out, with the lock held.
    pub(super) unwatch: Vec<PageRange>,
}

/// A pin that is being made without the lock. What happens to the memory meanwhile spoils it.
#[derive(Debug)]
pub(super) struct Ticket {
    number: u64,
    pub(super) range: PageRange,
    pub(super) access: Access,
    pub(super) merges: bool,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    range: PageRange,
    spoiled: bool,
}

/// The regions that requests can find, by address and by the time of their last use.
#[derive(Debug)]
pub(super) struct Index {
    limits: Limits,
    kept: BTreeMap<usize, Arc<Region>>,
    /// Kept and used by nobody: when the last user left, and where it starts.
    unused: BTreeMap<u64, usize>,
    pending: Vec<Pending>,
    kept_bytes: usize,
    /// Of kept regions that are in use.
    used_bytes: usize,
    used_entries: usize,
    /// Counts releases and tickets, so that each has a number of its own.
    tick: u64,
    pub(super) quarantine: Quarantine,
    pub(super) statistics: Statistics,
}

impl Index {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            kept: BTreeMap::new(),
            unused: BTreeMap::new(),
            pending: Vec::new(),
            kept_bytes: 0,
            used_bytes: 0,
            used_entries: 0,
            tick: 0,
            quarantine: Quarantine::default(),
            statistics: Statistics::default(),
        }
    }

    /// A kept region that holds all that is asked for, with one user more.
    pub(super) fn find(&mut self, asked: PageRange, access: Access) -> Option<Arc<Region>> {
        let (_, region) = self.kept.range(..=asked.start()).next_back()?;
        if !region.range.contains(asked) || region.access < access {
            return None;
        }
        let region = Arc::clone(region);
        if region.enter() == 0 {
            self.unused.remove(&region.unused_since());
            self.count_used(&region);
        }
        Some(region)
    }

    /// The region that is watched, and not pinned, and holds all that is asked for.
    pub(super) fn watched(&self, asked: PageRange) -> Option<PageRange> {
        let (_, region) = self.kept.range(..=asked.start()).next_back()?;
        let is_it = region.access == Access::Watch && region.range.contains(asked);
        is_it.then_some(region.range)
    }

    /// Whether any region overlaps what is asked for.
    pub(super) fn overlaps(&self, asked: PageRange) -> bool {
        !self.overlapping(asked).is_empty()
    }

    /// Whether kept regions hold all that is asked for, without a gap.
    pub(super) fn covers(&self, asked: PageRange, access: Access) -> bool {
        let mut at = asked.start();
        for region in self.overlapping(asked).iter().filter(|region| region.access >= access) {
            if region.range.start() > at {
                return false;
            }
            at = region.range.end();
        }
        at >= asked.end()
    }

    /// Prepares a pin that shall be kept: decides on its range, and makes room for it. `None`: there
    /// is no room, because what is there is in use or the request is too large.
    pub(super) fn begin(
        &mut self,
        asked: PageRange,
        access: Access,
        may_merge: bool,
        cleared: &mut Cleared,
    ) -> Option<Ticket> {
        let (mut range, mut widest, mut merges) = (asked, access, false);
        if may_merge {
            // What is only watched makes room: it is no reason to pin all of it.
            let pinned = |region: &Arc<Region>| region.access > Access::Watch;
            for region in self.overlapping(asked).into_iter().filter(pinned) {
                range = range.merge(region.range);
                widest = widest.max(region.access);
                merges = true;
            }
            if !self.has_room(range) {
                (range, widest, merges) = (asked, access, false);
            }
        }
        if !self.has_room(range) {
            return None;
        }
        let number = self.next_tick();
        self.pending.push(Pending { number, range, spoiled: false });
        self.make_room(range, cleared);
        Some(Ticket { number, range, access: widest, merges })
    }

    /// Keeps what a ticket stands for, now that it is pinned, and returns it with one user. If
    /// another thread was quicker, that is its region; if the ticket was spoiled or the room was
    /// taken, it is a region for this one use.
    pub(super) fn commit(
        &mut self,
        ticket: &Ticket,
        asked: PageRange,
        token: Token,
        cleared: &mut Cleared,
    ) -> Arc<Region> {
        let spoiled = self.remove_pending(ticket);
        let (range, access) = (ticket.range, ticket.access);
        if !spoiled && let Some(theirs) = self.find(asked, access) {
            cleared.unwatch.push(range);
            cleared.unpin.push(Arc::new(Region::new(range, access, token, false)));
            return theirs;
        }
        if spoiled || !self.has_room(range) {
            cleared.unwatch.push(range);
            self.statistics.uncached += 1;
            let region = Region::new(range, access, token, false);
            if spoiled {
                region.set_stale();
            }
            return Arc::new(region);
        }
        for region in self.overlapping(range) {
            self.retire(&region, cleared);
            cleared.unwatch.push(region.range);
        }
        self.make_room(range, cleared);
        let region = Arc::new(Region::new(range, access, token, true));
        self.kept.insert(range.start(), Arc::clone(&region));
        self.kept_bytes += range.bytes();
        self.count_used(&region);
        self.statistics.merges += u64::from(ticket.merges);
        region
    }

    /// Gives up a ticket whose memory could not be watched or pinned.
    pub(super) fn abandon(&mut self, ticket: &Ticket, cleared: &mut Cleared) {
        self.remove_pending(ticket);
        cleared.unwatch.push(ticket.range);
    }

    /// Counts a user out. True: the region is to be unpinned.
    pub(super) fn release(&mut self, region: &Region) -> bool {
        if region.leave() > 0 {
            return false;
        }
        if region.is_kept() {
            let tick = self.next_tick();
            region.set_unused_since(tick);
            self.unused.insert(tick, region.range.start());
            self.used_bytes -= region.range.bytes();
            self.used_entries -= 1;
        }
        !region.is_kept()
    }

    /// Drops every region that overlaps a range, and spoils pins that are being made there. Stops
    /// watching what was watched for them, but not `gone`, which is not there any more.
    pub(super) fn invalidate(
        &mut self,
        range: PageRange,
        gone: Option<PageRange>,
        cleared: &mut Cleared,
    ) {
        for pending in self.pending.iter_mut().filter(|pending| pending.range.overlaps(range)) {
            pending.spoiled = true;
        }
        for region in self.overlapping(range) {
            region.set_stale();
            self.statistics.invalidations += 1;
            self.retire(&region, cleared);
            match gone {
                Some(gone) => {
                    cleared.unwatch.extend(region.range.without(gone).into_iter().flatten());
                }
                None => cleared.unwatch.push(region.range),
            }
        }
    }

    /// Drops unused regions, those unused for longest first, until `bytes` are free or none is left.
    /// True: there were some.
    pub(super) fn evict(&mut self, bytes: usize, cleared: &mut Cleared) -> bool {
        let mut free = 0;
        while free < bytes
            && let Some(region) = self.longest_unused(None)
        {
            free += region.range.bytes();
            self.statistics.evictions += 1;
            self.retire(&region, cleared);
            cleared.unwatch.push(region.range);
        }
        free > 0
    }

    /// Drops every region of which a part is not mapped any more.
    pub(super) fn invalidate_unmapped(&mut self, cleared: &mut Cleared) {
        let is_gone = |region: &PageRange| !residency::is_mapped(region.start(), region.bytes());
        let ranges: Vec<_> = self.kept.values().map(|region| region.range).collect();
        for range in ranges.into_iter().filter(is_gone) {
            self.invalidate(range, None, cleared);
        }
    }

    /// The parts of a range that neither a kept region nor a pin being made needs watched.
    pub(super) fn uncovered(&self, range: PageRange) -> Vec<PageRange> {
        let kept = self.overlapping(range);
        let kept = kept.iter().map(|region| region.range);
        let mut left = vec![range];
        for covered in kept.chain(self.pending.iter().map(|pending| pending.range)) {
            left = left.iter().flat_map(|piece| piece.without(covered)).flatten().collect();
        }
        left
    }

    /// The numbers, with what is held now.
    pub(super) fn statistics(&self, bytes_pinned: u64) -> Statistics {
        let (bytes_kept, entries) = (self.kept_bytes as u64, self.kept.len() as u64);
        Statistics { bytes_pinned, bytes_kept, entries, ..self.statistics }
    }

    /// Kept regions that overlap a range, in the order of addresses.
    fn overlapping(&self, range: PageRange) -> Vec<Arc<Region>> {
        let before = self.kept.range(..range.start()).next_back();
        let inside = self.kept.range(range.start()..range.end());
        let all = before.into_iter().chain(inside).map(|(_, region)| region);
        all.filter(|region| region.range.overlaps(range)).cloned().collect()
    }

    /// Whether a region of this range could be kept if all unused ones went, and those it replaces.
    fn has_room(&self, range: PageRange) -> bool {
        let (mut bytes, mut entries) = (self.used_bytes, self.used_entries);
        for region in self.overlapping(range).iter().filter(|region| region.is_used()) {
            bytes -= region.range.bytes();
            entries -= 1;
        }
        bytes.saturating_add(range.bytes()) <= self.limits.most_bytes
            && entries < self.limits.most_entries
    }

    /// Drops unused regions until a region of this range fits beside those that it does not replace.
    fn make_room(&mut self, range: PageRange, cleared: &mut Cleared) {
        let replaced = self.overlapping(range);
        let replaced_bytes: usize = replaced.iter().map(|region| region.range.bytes()).sum();
        while self.kept_bytes - replaced_bytes + range.bytes() > self.limits.most_bytes
            || self.kept.len() - replaced.len() >= self.limits.most_entries
        {
            let Some(region) = self.longest_unused(Some(range)) else { break };
            self.statistics.evictions += 1;
            self.retire(&region, cleared);
            cleared.unwatch.push(region.range);
        }
    }

    fn longest_unused(&self, but_not: Option<PageRange>) -> Option<Arc<Region>> {
        let mut regions = self.unused.values().filter_map(|start| self.kept.get(start));
        regions.find(|region| but_not.is_none_or(|range| !region.range.overlaps(range))).cloned()
    }

    /// Takes a kept region out of the index; what becomes of watching it is the caller's.
    fn retire(&mut self, region: &Arc<Region>, cleared: &mut Cleared) {
        self.kept.remove(&region.range.start());
        self.kept_bytes -= region.range.bytes();
        region.set_left();
        if region.is_used() {
            self.used_bytes -= region.range.bytes();
            self.used_entries -= 1;
        } else {
            self.unused.remove(&region.unused_since());
            cleared.unpin.push(Arc::clone(region));
        }
    }

    fn count_used(&mut self, region: &Region) {
        self.used_bytes += region.range.bytes();
        self.used_entries += 1;
    }

    fn remove_pending(&mut self, ticket: &Ticket) -> bool {
        let at = self.pending.iter().position(|pending| pending.number == ticket.number);
        at.is_none_or(|at| self.pending.swap_remove(at).spoiled)
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

    fn begin(index: &mut Index, range: PageRange, cleared: &mut Cleared) -> Ticket {
        index.begin(range, Access::Read, true, cleared).unwrap()
    }

    #[test]
    fn a_pin_whose_memory_changes_while_it_is_made_is_not_kept() {
        let (mut index, mut cleared) = (Index::new(Limits::default()), Cleared::default());
        let (range, other) = (pages(10, 5), pages(20, 5));
        let tickets = [range, other].map(|range| begin(&mut index, range, &mut cleared));
        index.invalidate(pages(14, 1), None, &mut cleared);
        let spoiled = index.commit(&tickets[0], range, Token(0), &mut cleared);
        let good = index.commit(&tickets[1], other, Token(1), &mut cleared);
        assert!(!spoiled.is_kept() && spoiled.is_stale() && good.is_kept());
        assert!(index.find(range, Access::Read).is_none());
        assert!(index.release(&spoiled) && !index.release(&good));
        assert_eq!(cleared.unwatch, [range]);
    }

    #[test]
    fn of_two_threads_that_pin_the_same_memory_the_later_gives_way() {
        let (mut index, mut cleared) = (Index::new(Limits::default()), Cleared::default());
        let range = pages(10, 5);
        let tickets = [range, range].map(|range| begin(&mut index, range, &mut cleared));
        let first = index.commit(&tickets[0], range, Token(0), &mut cleared);
        let second = index.commit(&tickets[1], range, Token(1), &mut cleared);
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(cleared.unpin.iter().map(|region| region.token).collect::<Vec<_>>(), [Token(1)]);
    }

    #[test]
    fn what_is_kept_or_being_pinned_stays_watched() {
        let (mut index, mut cleared) = (Index::new(Limits::default()), Cleared::default());
        let kept = begin(&mut index, pages(10, 5), &mut cleared);
        index.commit(&kept, pages(10, 5), Token(0), &mut cleared);
        let pending = begin(&mut index, pages(20, 5), &mut cleared);
        assert_eq!(index.uncovered(pages(8, 20)), [pages(8, 2), pages(15, 5), pages(25, 3)]);
        index.abandon(&pending, &mut cleared);
        assert_eq!(index.uncovered(pages(8, 20)), [pages(8, 2), pages(15, 13)]);
    }

    #[test]
    fn the_part_that_is_gone_needs_no_unwatching() {
        let (mut index, mut cleared) = (Index::new(Limits::default()), Cleared::default());
        let ticket = begin(&mut index, pages(10, 5), &mut cleared);
        index.commit(&ticket, pages(10, 5), Token(0), &mut cleared);
        index.invalidate(pages(8, 4), Some(pages(8, 4)), &mut cleared);
        assert_eq!(cleared.unwatch, [pages(12, 3)]);
    }
}
