//! Memory that its owner has registered with an engine, each range in one piece.
//!
//! Others in the process may use the same device, PyTorch for example. A driver refuses a copy of theirs
//! that crosses the edge of a registered piece. So a range is registered by one call, from its first byte
//! to its last, and nothing beside it: what its owner hands to others lies inside one piece, and what is
//! not the owner's is not touched, not even on the same page.
//!
//! Registrations are counted. A range inside another that is registered needs no piece of its own, until
//! the larger one goes. A range that overlaps another otherwise is refused, as by the driver.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use memferry_memory::pinning::{Access, PageRange, PinError, Pinner, Token};
use memferry_sys::fork;
use memferry_sys::sync::lock;

/// One registered piece. It stays registered until the last who holds this is gone: copies under way
/// hold it.
#[derive(Debug)]
pub struct Held {
    pinner: Arc<dyn Pinner>,
    address: usize,
    length: usize,
    access: Access,
    range: PageRange,
    token: Token,
    fork_generation: u64,
}

impl Held {
    fn new(pinner: &Arc<dyn Pinner>, address: usize, length: usize) -> Result<Self, PinError> {
        let range = PageRange::covering(address, length)?;
        let pin = |access| Ok((access, pinner.pin_bytes(address, length, access)?));
        let (access, token) = pin(Access::Write).or_else(|error| match error {
            PinError::BadMemory { .. } => Err(error),
            // It may be memory that is only to be read.
            _ => pin(Access::Read).map_err(|_: PinError| error),
        })?;
        let (pinner, fork_generation) = (pinner.clone(), fork::generation());
        Ok(Self { pinner, address, length, access, range, token, fork_generation })
    }

    /// Where it ends.
    pub fn end(&self) -> usize {
        self.address + self.length
    }

    fn contains(&self, address: usize, length: usize) -> bool {
        self.address <= address && address.saturating_add(length) <= self.end()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if fork::generation() == self.fork_generation {
            self.pinner.unpin(self.range, self.token);
        }
    }
}

/// The registered ranges of one engine.
#[derive(Debug)]
pub(super) struct Regions {
    pinner: Arc<dyn Pinner>,
    /// How often each range was registered. Locked while the driver registers: only those who register
    /// and unregister wait for it.
    owners: Mutex<HashMap<(usize, usize), usize>>,
    /// The pieces, by their first address. They never overlap.
    pieces: RwLock<BTreeMap<usize, Arc<Held>>>,
    fork_generation: u64,
}

impl Regions {
    pub(super) fn new(pinner: Arc<dyn Pinner>) -> Self {
        fork::watch();
        let (owners, pieces) = (Mutex::default(), RwLock::default());
        Self { pinner, owners, pieces, fork_generation: fork::generation() }
    }

    /// Registers a range, once more if it is registered. After an error nothing has changed.
    pub(super) fn register(&self, address: usize, length: usize) -> Result<(), PinError> {
        if self.is_forked() {
            let what = "registering memory with a device of the parent process";
            return Err(PinError::Unsupported { what, cure: "open the device in this process" });
        }
        let mut owners = lock(&self.owners);
        // A range may be known and have no piece: a larger one went while a copy held it.
        if !self.cover(address, length)
            && let Err(error) = self.add_piece(address, length)
            && !owners.contains_key(&(address, length))
        {
            return Err(error);
        }
        *owners.entry((address, length)).or_default() += 1;
        Ok(())
    }

    /// Undoes one registration of exactly this range; says whether there was one. Copies under way go
    /// on with the piece.
    pub(super) fn unregister(&self, address: usize, length: usize) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut owners = lock(&self.owners);
        let Some(count) = owners.get_mut(&(address, length)) else { return false };
        *count -= 1;
        if *count > 0 {
            return true;
        }
        owners.remove(&(address, length));
        let piece = {
            let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
            let is_it = pieces.get(&address).is_some_and(|piece| piece.length == length);
            is_it.then(|| pieces.remove(&address)).flatten()
        };
        let Some(piece) = piece else { return true };
        let is_free = Arc::into_inner(piece).is_some();
        // The memory of the piece may be unmapped now: ranges inside it get pieces of their own. While
        // copies hold the old one the driver would refuse these, and they are copied in other ways.
        let is_inside = |range: &&(usize, usize)| {
            address <= range.0 && range.0 + range.1 <= address.saturating_add(length)
        };
        let mut inside: Vec<_> = owners.keys().filter(is_inside).copied().collect();
        inside.sort_unstable_by_key(|(_, length)| std::cmp::Reverse(*length));
        for (address, length) in inside.into_iter().filter(|_| is_free) {
            if !self.cover(address, length)
                && let Err(error) = self.add_piece(address, length)
            {
                tracing::warn!(%error, "memory that was registered inside a larger range is not any more");
            }
        }
        true
    }

    /// The piece at an address, if it may be used so.
    pub(super) fn find(&self, address: usize, access: Access) -> Option<Arc<Held>> {
        if self.is_forked() {
            return None;
        }
        let pieces = self.pieces.read().unwrap_or_else(PoisonError::into_inner);
        let (_, piece) = pieces.range(..=address).next_back()?;
        (piece.contains(address, 1) && piece.access >= access).then(|| piece.clone())
    }

    /// Whether a range lies inside one piece.
    pub(super) fn cover(&self, address: usize, length: usize) -> bool {
        let piece = self.find(address, Access::Read);
        piece.is_some_and(|piece| piece.contains(address, length))
    }

    fn add_piece(&self, address: usize, length: usize) -> Result<(), PinError> {
        let piece = Arc::new(Held::new(&self.pinner, address, length)?);
        let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
        pieces.insert(address, piece);
        Ok(())
    }

    /// A lock that was held at a fork is held for ever in the child.
    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pins nothing, and keeps a list of the bytes that are pinned.
    #[derive(Debug, Default)]
    struct List(Mutex<Pins>);

    #[derive(Debug, Default)]
    struct Pins {
        last: u64,
        bytes: BTreeMap<u64, (usize, usize)>,
    }

    impl List {
        fn pinned(&self) -> Vec<(usize, usize)> {
            let mut all: Vec<_> = lock(&self.0).bytes.values().copied().collect();
            all.sort_unstable();
            all
        }
    }

    impl Pinner for List {
        fn name(&self) -> &'static str {
            "list"
        }

        fn pin(&self, range: PageRange, _access: Access) -> Result<Token, PinError> {
            panic!("pages are not bytes: {range}")
        }

        fn pin_bytes(&self, at: usize, length: usize, _: Access) -> Result<Token, PinError> {
            let mut pins = lock(&self.0);
            if pins.bytes.values().any(|(other, n)| at < other + n && *other < at + length) {
                return Err(PinError::Unsupported { what: "an overlap", cure: "none" });
            }
            pins.last += 1;
            let number = pins.last;
            pins.bytes.insert(number, (at, length));
            Ok(Token(number))
        }

        fn unpin(&self, _range: PageRange, token: Token) {
            lock(&self.0).bytes.remove(&token.0).expect("what was pinned");
        }

        fn follows_mapping(&self) -> bool {
            false
        }
    }

    fn regions() -> (Arc<List>, Regions) {
        let list = Arc::new(List::default());
        (list.clone(), Regions::new(list))
    }

    #[test]
    fn a_range_is_one_piece_of_exactly_its_bytes_until_it_is_unregistered_as_often() {
        let (list, regions) = regions();
        regions.register(10_001, 9_000).unwrap();
        regions.register(10_001, 9_000).unwrap();
        assert_eq!(list.pinned(), [(10_001, 9_000)]);
        assert!(regions.unregister(10_001, 9_000));
        assert!(regions.cover(10_001, 9_000) && !regions.cover(10_000, 2));
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
        assert_eq!(regions.find(4196, Access::Write).map(|piece| piece.end()), Some(9196));
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
        assert!(!regions.cover(10_500, 1) && !regions.cover(10_100, 10));
        drop(copy);
        assert_eq!(list.pinned(), []);
        assert!(regions.unregister(10_100, 10));
    }

    #[test]
    fn a_range_that_lost_its_piece_to_a_copy_of_a_larger_one_gets_one_when_it_is_registered_again()
    {
        let (list, regions) = regions();
        regions.register(10_000, 1_000).unwrap();
        regions.register(10_100, 10).unwrap();
        let copy = regions.find(10_500, Access::Write);
        assert!(regions.unregister(10_000, 1_000));
        regions.register(10_100, 10).expect("it is registered, though it has no piece");
        assert!(!regions.cover(10_100, 10));
        drop(copy);
        regions.register(10_100, 10).unwrap();
        assert!(regions.cover(10_100, 10));
        assert_eq!(list.pinned(), [(10_100, 10)]);
        (0..3).for_each(|_| assert!(regions.unregister(10_100, 10)));
        assert_eq!(list.pinned(), []);
    }
}
