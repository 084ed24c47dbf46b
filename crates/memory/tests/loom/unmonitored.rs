//! Unmonitored memory: its owner invalidates it before it is unmapped, and no pin of it is found
//! afterwards.

use std::sync::Arc;

use loom::thread;
use memferry_memory::pin_cache::{
    InvalidationMode, Lease, PinCache, PinCacheLimits, UnmonitoredRanges,
};
use memferry_memory::pinning::Access;

use crate::events::{Memory, place};
use crate::model;

struct World {
    cache: PinCache,
    promises: UnmonitoredRanges,
    memory: Arc<Memory>,
}

impl World {
    fn new() -> Arc<Self> {
        let memory = Memory::new();
        let cache =
            PinCache::new(memory.clone(), PinCacheLimits::default(), InvalidationMode::Explicit)
                .unwrap();
        Arc::new(Self { cache, promises: UnmonitoredRanges::new(), memory })
    }

    fn acquire(&self) -> Option<Lease> {
        let (start, end) = place();
        let lease = self.promises.acquire(&self.cache, start, end - start, Access::Write)?;
        Some(lease.unwrap())
    }

    /// Invalidates the pages that no owner guarantees any more, and maps other memory there.
    fn forget_and_change(&self, left: Vec<memferry_memory::pinning::PageRange>) {
        left.iter().for_each(|range| self.cache.invalidate(range.start(), range.bytes()));
        self.memory.change();
    }

    /// Checks that no unmapped memory is cached, and that nothing stays pinned.
    fn check(&self) {
        let (start, end) = place();
        assert!(self.acquire().is_none(), "nothing is promised any more");
        assert!(!self.cache.covers(start, end - start, Access::Read));
        assert_eq!(self.memory.pins(), 0);
    }
}

#[test]
fn a_pin_made_while_its_memory_is_forgotten_is_not_kept() {
    model(4, || {
        let (world, (start, end)) = (World::new(), place());
        // SAFETY: the memory is invalidated below before other memory is mapped.
        unsafe { world.promises.add(start, end - start) };
        let owner = thread::spawn({
            let world = world.clone();
            move || world.forget_and_change(world.promises.invalidate(start, end - start))
        });
        drop(world.acquire());
        owner.join().unwrap();
        world.check();
    });
}

#[test]
fn of_two_owners_the_last_to_withdraw_ends_the_pins() {
    model(3, || {
        let (world, (start, end)) = (World::new(), place());
        for _ in 0..2 {
            // SAFETY: each reference is removed below before other memory is mapped.
            unsafe { world.promises.add_ref(start, end - start) };
        }
        let owner = thread::spawn({
            let world = world.clone();
            move || world.promises.remove_ref(start, end - start)
        });
        drop(world.acquire());
        let left = [world.promises.remove_ref(start, end - start), owner.join().unwrap()].concat();
        assert_eq!(left.len(), 1, "one of the two is the last");
        world.forget_and_change(left);
        world.check();
    });
}
