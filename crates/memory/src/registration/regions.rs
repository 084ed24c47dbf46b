//! Memory that its owner has registered with an engine; each range is one region.
//!
//! Other libraries in the process may use the same device, PyTorch for example. A driver rejects a
//! copy that crosses the edge of a registration. So one driver call registers a range, from its
//! first byte to its last and nothing beyond: memory that its owner passes to other libraries lies
//! inside one registration, and memory of other owners is not registered, not even on the same
//! page.
//!
//! Registrations are counted. A range inside a registered range needs no region of its own until
//! the larger range is unregistered. A range that overlaps another in any other form is rejected,
//! as by the driver.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::lock;

use crate::pinning::{Access, PageRange, PinError, PinToken, Pinner};

/// One registered range. It stays registered until the last reference is dropped; copies in flight
/// hold references.
#[derive(Debug)]
pub struct RegisteredRegion {
    pinner: Arc<dyn Pinner>,
    address: usize,
    length: usize,
    access: Access,
    range: PageRange,
    token: PinToken,
    owner: OwnerProcess,
}

impl RegisteredRegion {
    fn new(pinner: &Arc<dyn Pinner>, address: usize, length: usize) -> Result<Self, PinError> {
        let range = PageRange::covering(address, length)?;
        let pin = |access| Ok((access, pinner.pin_bytes(address, length, access)?));
        let (access, token) = pin(Access::Write).or_else(|error| match error {
            PinError::BadMemory { .. } => Err(error),
            // The memory may be read-only.
            _ => pin(Access::Read).map_err(|_: PinError| error),
        })?;
        let (pinner, owner) = (pinner.clone(), OwnerProcess::current());
        Ok(Self { pinner, address, length, access, range, token, owner })
    }

    /// The end address.
    pub fn end(&self) -> usize {
        self.address + self.length
    }

    fn contains(&self, address: usize, length: usize) -> bool {
        self.address <= address && address.saturating_add(length) <= self.end()
    }
}

impl Drop for RegisteredRegion {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.pinner.unpin(self.range, &self.token);
        }
    }
}

/// The registered ranges of one engine.
#[derive(Debug)]
pub(super) struct RegionTable {
    pinner: Arc<dyn Pinner>,
    /// The registration count of each range. The mutex is held while the driver registers; only
    /// threads that register or unregister wait for it.
    refcounts: Mutex<HashMap<(usize, usize), usize>>,
    /// The regions, by start address. They never overlap.
    regions: RwLock<BTreeMap<usize, Arc<RegisteredRegion>>>,
    owner: OwnerProcess,
}

impl RegionTable {
    pub(super) fn new(pinner: Arc<dyn Pinner>) -> Self {
        let (refcounts, regions) = (Mutex::default(), RwLock::default());
        Self { pinner, refcounts, regions, owner: OwnerProcess::current() }
    }

    /// Registers a range; one that is registered is counted once more. After an error nothing has
    /// changed.
    pub(super) fn register(&self, address: usize, length: usize) -> Result<(), PinError> {
        if self.is_forked() {
            return Err(super::FORKED);
        }
        let mut refcounts = lock(&self.refcounts);
        // A counted range may have no region: a larger range was unregistered while a copy held it.
        if !self.covers(address, length)
            && let Err(error) = self.add_region(address, length)
            && !refcounts.contains_key(&(address, length))
        {
            return Err(error);
        }
        *refcounts.entry((address, length)).or_default() += 1;
        Ok(())
    }

    /// Undoes one registration of exactly this range; returns whether there was one. Copies in
    /// flight keep their reference to the region.
    pub(super) fn unregister(&self, address: usize, length: usize) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut refcounts = lock(&self.refcounts);
        let Some(count) = refcounts.get_mut(&(address, length)) else { return false };
        *count -= 1;
        if *count > 0 {
            return true;
        }
        refcounts.remove(&(address, length));
        let region = {
            let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
            let is_it = regions.get(&address).is_some_and(|region| region.length == length);
            is_it.then(|| regions.remove(&address)).flatten()
        };
        let Some(region) = region else { return true };
        let is_free = Arc::into_inner(region).is_some();
        // The memory of the region may be unmapped now, so ranges inside it get regions of their
        // own. While copies hold the old region, the driver would reject these, and the ranges are
        // copied without registration.
        let is_inside = |range: &&(usize, usize)| {
            address <= range.0 && range.0 + range.1 <= address.saturating_add(length)
        };
        let mut inside: Vec<_> = refcounts.keys().filter(is_inside).copied().collect();
        inside.sort_unstable_by_key(|(_, length)| std::cmp::Reverse(*length));
        for (address, length) in inside.into_iter().filter(|_| is_free) {
            if !self.covers(address, length)
                && let Err(error) = self.add_region(address, length)
            {
                tracing::warn!(%error, "a range inside an unregistered one could not be registered");
            }
        }
        true
    }

    /// The region at an address, if it allows the access.
    pub(super) fn find(&self, address: usize, access: Access) -> Option<Arc<RegisteredRegion>> {
        if self.is_forked() {
            return None;
        }
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = regions.range(..=address).next_back()?;
        (region.contains(address, 1) && region.access >= access).then(|| region.clone())
    }

    /// Whether a range lies inside one region. It takes no reference: one that is held for a moment
    /// would look like a copy in flight to a thread that unregisters the region.
    pub(super) fn covers(&self, address: usize, length: usize) -> bool {
        if self.is_forked() {
            return false;
        }
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region = regions.range(..=address).next_back();
        region.is_some_and(|(_, region)| region.contains(address, length.max(1)))
    }

    fn add_region(&self, address: usize, length: usize) -> Result<(), PinError> {
        let region = Arc::new(RegisteredRegion::new(&self.pinner, address, length)?);
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.insert(address, region);
        Ok(())
    }

    /// Whether this is a forked child, in which a lock that was held at the fork stays locked.
    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pins nothing, and lists the ranges that are pinned.
    #[derive(Debug, Default)]
    struct RecordingPinner(Mutex<RecordedPins>);

    #[derive(Debug, Default)]
    struct RecordedPins {
        last: u64,
        bytes: BTreeMap<u64, (usize, usize)>,
    }

    impl RecordingPinner {
        fn pinned(&self) -> Vec<(usize, usize)> {
            let mut all: Vec<_> = lock(&self.0).bytes.values().copied().collect();
            all.sort_unstable();
            all
        }
    }

    impl Pinner for RecordingPinner {
        fn name(&self) -> &'static str {
            "list"
        }

        fn pin(&self, range: PageRange, _access: Access) -> Result<PinToken, PinError> {
            panic!("pages are not bytes: {range}")
        }

        fn pin_bytes(&self, at: usize, length: usize, _: Access) -> Result<PinToken, PinError> {
            let mut pins = lock(&self.0);
            if pins.bytes.values().any(|(other, n)| at < other + n && *other < at + length) {
                return Err(PinError::Unsupported { what: "an overlap", fix: "none" });
            }
            pins.last += 1;
            let number = pins.last;
            pins.bytes.insert(number, (at, length));
            Ok(PinToken::new(number))
        }

        fn unpin(&self, _range: PageRange, token: &PinToken) {
            lock(&self.0).bytes.remove(&token.number()).expect("what was pinned");
        }

        fn tracks_mapping(&self) -> bool {
            false
        }
    }

    fn regions() -> (Arc<RecordingPinner>, RegionTable) {
        let list = Arc::new(RecordingPinner::default());
        (list.clone(), RegionTable::new(list))
    }

    #[test]
    fn a_range_is_one_piece_of_exactly_its_bytes_until_it_is_unregistered_as_often() {
        let (list, regions) = regions();
        regions.register(10_001, 9_000).unwrap();
        regions.register(10_001, 9_000).unwrap();
        assert_eq!(list.pinned(), [(10_001, 9_000)]);
        assert!(regions.unregister(10_001, 9_000));
        assert!(regions.covers(10_001, 9_000) && !regions.covers(10_000, 2));
        assert!(regions.unregister(10_001, 9_000));
        assert_eq!(list.pinned(), []);
        assert!(!regions.unregister(10_001, 9_000));
    }

    #[test]
    fn ranges_on_one_page_are_independent() {
        let (list, regions) = regions();
        regions.register(4096, 100).unwrap();
        regions.register(4196, 5000).unwrap();
        assert!(regions.unregister(4096, 100));
        assert_eq!(list.pinned(), [(4196, 5000)]);
        assert!(regions.find(4195, Access::Read).is_none());
        assert_eq!(regions.find(4196, Access::Write).map(|region| region.end()), Some(9196));
    }

    #[test]
    fn a_range_inside_another_gets_a_piece_of_its_own_when_the_larger_one_goes() {
        let (list, regions) = regions();
        regions.register(10_000, 10_000).unwrap();
        regions.register(12_000, 1_000).unwrap();
        regions.register(12_100, 100).unwrap();
        assert_eq!(list.pinned(), [(10_000, 10_000)]);
        assert!(regions.unregister(10_000, 10_000));
        assert_eq!(list.pinned(), [(12_000, 1_000)]);
        assert!(regions.unregister(12_100, 100));
        assert!(regions.unregister(12_000, 1_000));
        assert_eq!(list.pinned(), []);
    }

    #[test]
    fn a_range_that_overlaps_another_is_refused_and_changes_nothing() {
        let (list, regions) = regions();
        regions.register(10_000, 1_000).unwrap();
        for (address, length) in [(9_999, 2), (10_999, 2), (9_000, 5_000)] {
            assert!(regions.register(address, length).is_err());
            assert!(!regions.unregister(address, length));
        }
        assert_eq!(list.pinned(), [(10_000, 1_000)]);
    }

    #[test]
    fn a_piece_that_a_copy_holds_stays_registered_and_is_found_by_nobody() {
        let (list, regions) = regions();
        regions.register(10_000, 1_000).unwrap();
        regions.register(10_100, 10).unwrap();
        let copy = regions.find(10_500, Access::Write);
        assert!(regions.unregister(10_000, 1_000));
        assert_eq!(list.pinned(), [(10_000, 1_000)]);
        assert!(!regions.covers(10_500, 1) && !regions.covers(10_100, 10));
        drop(copy);
        assert_eq!(list.pinned(), []);
        assert!(regions.unregister(10_100, 10));
    }

    #[test]
    fn a_question_about_a_piece_does_not_take_it_from_the_ranges_inside() {
        let (list, regions) = regions();
        let is_asked = std::sync::atomic::AtomicBool::new(true);
        let round = || {
            let is_registered =
                regions.register(10_000, 1_000).is_ok() && regions.register(10_100, 10).is_ok();
            regions.unregister(10_000, 1_000);
            let is_kept = list.pinned() == [(10_100, 10)];
            regions.unregister(10_100, 10);
            is_registered && is_kept
        };
        let rounds: Vec<bool> = std::thread::scope(|scope| {
            scope.spawn(|| {
                while is_asked.load(std::sync::atomic::Ordering::Relaxed) {
                    regions.covers(10_000, 500);
                }
            });
            let rounds = (0..20_000).map(|_| round()).collect();
            is_asked.store(false, std::sync::atomic::Ordering::Relaxed);
            rounds
        });
        assert!(rounds.iter().all(|is_good| *is_good));
    }

    #[test]
    fn a_range_that_lost_its_piece_to_a_copy_of_a_larger_one_gets_one_when_it_is_registered_again()
    {
        let (list, regions) = regions();
        regions.register(10_000, 1_000).unwrap();
        regions.register(10_100, 10).unwrap();
        let copy = regions.find(10_500, Access::Write);
        assert!(regions.unregister(10_000, 1_000));
        regions.register(10_100, 10).expect("it is counted, though it has no region");
        assert!(!regions.covers(10_100, 10));
        drop(copy);
        regions.register(10_100, 10).unwrap();
        assert!(regions.covers(10_100, 10));
        assert_eq!(list.pinned(), [(10_100, 10)]);
        (0..3).for_each(|_| assert!(regions.unregister(10_100, 10)));
        assert_eq!(list.pinned(), []);
    }
}
