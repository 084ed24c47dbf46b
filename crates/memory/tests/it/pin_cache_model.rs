//! The pin cache against a simple model: a list with linear search.

use crate::support::recorder;

use std::sync::Arc;

use memferry_memory::pin_cache::{InvalidationMode, Lease, PinCache, PinCacheLimits};
use memferry_memory::pinning::{Access, PageRange};
use memferry_sys::pages::page_bytes;
use proptest::prelude::*;
use recorder::Recorder;

#[derive(Debug, Clone)]
enum Step {
    Acquire { first: usize, pages: usize, write: bool },
    Release { which: usize },
    Invalidate { first: usize, pages: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let acquire = (1usize..60, 1usize..9, any::<bool>())
        .prop_map(|(first, pages, write)| Step::Acquire { first, pages, write });
    let release = (0usize..100).prop_map(|which| Step::Release { which });
    let forget =
        (1usize..60, 1usize..9).prop_map(|(first, pages)| Step::Invalidate { first, pages });
    prop_oneof![6 => acquire, 5 => release, 1 => forget]
}

fn range(first: usize, pages: usize) -> PageRange {
    PageRange::covering(first * page_bytes(), pages * page_bytes()).unwrap()
}

#[derive(Debug, Clone)]
struct ModelEntry {
    name: usize,
    range: PageRange,
    access: Access,
    refcount: usize,
    cached: bool,
}

/// Entries in the order of their last use, the oldest first; those that are neither cached nor in
/// use are not pinned.
#[derive(Debug, Default)]
struct Model {
    entries: Vec<ModelEntry>,
    names: usize,
    hits: u64,
    merges: u64,
    evictions: u64,
    invalidations: u64,
    uncached: u64,
}

impl Model {
    /// Returns the id of the entry that the request uses.
    fn acquire(&mut self, asked: PageRange, access: Access, limits: PinCacheLimits) -> usize {
        let found = |entry: &&mut ModelEntry| {
            entry.cached && entry.range.contains(asked) && entry.access >= access
        };
        if let Some(entry) = self.entries.iter_mut().find(found) {
            entry.refcount += 1;
            self.hits += 1;
            return entry.name;
        }
        let overlapping = |entry: &&ModelEntry| entry.cached && entry.range.overlaps(asked);
        let (mut range, mut widest, mut merges) = (asked, access, false);
        for entry in self.entries.iter().filter(overlapping) {
            range = range.merge(entry.range);
            widest = widest.max(entry.access);
            merges = true;
        }
        if !self.fits(range, limits) {
            (range, widest, merges) = (asked, access, false);
        }
        let kept = self.fits(range, limits);
        if kept {
            self.make_space(range, limits);
            for entry in self.entries.iter_mut().filter(|entry| entry.range.overlaps(range)) {
                entry.cached = false;
            }
            self.merges += u64::from(merges);
        } else {
            self.uncached += 1;
        }
        self.names += 1;
        self.entries.push(ModelEntry {
            name: self.names,
            range,
            access: widest,
            refcount: 1,
            cached: kept,
        });
        self.names
    }

    /// Whether there is space beside the entries that are in use and not replaced.
    fn fits(&self, range: PageRange, limits: PinCacheLimits) -> bool {
        let stays = |entry: &&ModelEntry| {
            entry.cached && entry.refcount > 0 && !entry.range.overlaps(range)
        };
        let staying = || self.entries.iter().filter(stays);
        let bytes: usize = staying().map(|entry| entry.range.bytes()).sum();
        bytes + range.bytes() <= limits.max_bytes && staying().count() < limits.max_entries
    }

    fn make_space(&mut self, range: PageRange, limits: PinCacheLimits) {
        loop {
            let stays = |entry: &&ModelEntry| entry.cached && !entry.range.overlaps(range);
            let staying = || self.entries.iter().filter(stays);
            let bytes: usize = staying().map(|entry| entry.range.bytes()).sum();
            if bytes + range.bytes() <= limits.max_bytes && staying().count() < limits.max_entries {
                return;
            }
            let oldest = self
                .entries
                .iter_mut()
                .find(|entry| entry.cached && entry.refcount == 0 && !entry.range.overlaps(range));
            oldest.expect("no unused entry, although the range fits").cached = false;
            self.evictions += 1;
        }
    }

    fn release(&mut self, name: usize) {
        let at = self.entries.iter().position(|entry| entry.name == name).unwrap();
        let mut entry = self.entries.remove(at);
        entry.refcount -= 1;
        // The last use is the most recent one.
        self.entries.push(entry);
    }

    fn invalidate(&mut self, range: PageRange) {
        for entry in self.entries.iter_mut().filter(|e| e.cached && e.range.overlaps(range)) {
            entry.cached = false;
            self.invalidations += 1;
        }
    }

    fn pinned(&mut self) -> Vec<PageRange> {
        self.entries.retain(|entry| entry.cached || entry.refcount > 0);
        let mut ranges: Vec<_> = self.entries.iter().map(|entry| entry.range).collect();
        ranges.sort_by_key(|range| (range.start(), range.end()));
        ranges
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_cache_keeps_and_drops_what_the_model_does(
        steps in proptest::collection::vec(step(), 1..120),
        max_pages in 4usize..40,
        max_entries in 1usize..6,
    ) {
        let limits = PinCacheLimits { max_bytes: max_pages * page_bytes(), max_entries };
        let recorder = Arc::new(Recorder::new());
        let cache = PinCache::new(recorder.clone(), limits, InvalidationMode::Explicit).unwrap();
        let (mut model, mut leases) = (Model::default(), Vec::<(usize, Lease)>::new());
        let mut requests = 0;
        for step in steps {
            match step {
                Step::Acquire { first, pages, write } => {
                    let asked = range(first, pages);
                    let access = if write { Access::Write } else { Access::Read };
                    let lease = cache.acquire(asked.start(), asked.bytes(), access).unwrap();
                    prop_assert!(lease.range().contains(asked) && lease.access() >= access);
                    leases.push((model.acquire(asked, access, limits), lease));
                    requests += 1;
                }
                Step::Release { which } if !leases.is_empty() => {
                    let (name, lease) = leases.swap_remove(which % leases.len());
                    drop(lease);
                    model.release(name);
                }
                Step::Release { .. } => {}
                Step::Invalidate { first, pages } => {
                    let range = range(first, pages);
                    cache.invalidate(range.start(), range.bytes());
                    model.invalidate(range);
                }
            }
            prop_assert_eq!(recorder.pinned(), model.pinned());
            let mut kept: Vec<_> = model.entries.iter().filter(|entry| entry.cached).collect();
            kept.sort_by_key(|entry| entry.range.start());
            let numbers = cache.statistics();
            let bytes: usize = kept.iter().map(|entry| entry.range.bytes()).sum();
            prop_assert_eq!(numbers.entries as usize, kept.len());
            prop_assert_eq!(numbers.bytes_cached as usize, bytes);
            prop_assert!(bytes <= limits.max_bytes && kept.len() <= max_entries);
            for (_, lease) in &leases {
                prop_assert!(recorder.is_pinned(lease.token().number()));
            }
        }
        let numbers = cache.statistics();
        prop_assert_eq!(numbers.hits + numbers.misses, requests);
        prop_assert_eq!(
            (numbers.hits, numbers.merges, numbers.evictions, numbers.invalidations),
            (model.hits, model.merges, model.evictions, model.invalidations)
        );
        prop_assert_eq!(numbers.uncached, model.uncached);
        drop((leases, cache));
        prop_assert_eq!(recorder.pinned(), []);
    }
}
