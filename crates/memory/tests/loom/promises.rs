//! Promised memory: its owner forgets it before it goes, and no pin of it is found afterwards.

use std::sync::Arc;

use loom::thread;
use memferry_memory::pin_cache::{Lease, Limits, PinCache, Promises, Watching};
use memferry_memory::pinning::Access;

use crate::model;
use crate::news::{Memory, place};

struct World {
    cache: PinCache,
    promises: Promises,
    memory: Arc<Memory>,
}

impl World {
    fn new() -> Arc<Self> {
        let memory = Memory::new();
        let cache = PinCache::new(memory.clone(), Limits::default(), Watching::Explicit).unwrap();
        Arc::new(Self { cache, promises: Promises::new(), memory })
    }

    fn acquire(&self) -> Option<Lease> {
        let (start, end) = place();
        let lease = self.promises.acquire(&self.cache, start, end - start, Access::Write)?;
        Some(lease.unwrap())
    }

    /// Forgets the pages that are promised by nobody any more, and maps other memory there.
    fn forget_and_change(&self, left: Vec<memferry_memory::pinning::PageRange>) {
        left.iter().for_each(|range| self.cache.forget(range.start(), range.bytes()));
        self.memory.change();
    }

    /// Nothing of the memory that is gone is kept, and nothing stays pinned.
    fn check(&self) {
        let (start, end) = place();
        assert!(self.acquire().is_none(), "nothing is promised any more");
        assert!(!self.cache.keeps(start, end - start, Access::Read));
        assert_eq!(self.memory.pins(), 0);
    }
}

#[test]
fn a_pin_made_while_its_memory_is_forgotten_is_not_kept() {
    model(4, || {
        let (world, (start, end)) = (World::new(), place());
        // SAFETY: it is forgotten below before other memory is there.
        unsafe { world.promises.add(start, end - start) };
        let owner = thread::spawn({
            let world = world.clone();
            move || world.forget_and_change(world.promises.forget(start, end - start))
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
            // SAFETY: it is withdrawn as often below before other memory is there.
            unsafe { world.promises.hold(start, end - start) };
        }
        let owner = thread::spawn({
            let world = world.clone();
            move || world.promises.withdraw(start, end - start)
        });
        drop(world.acquire());
        let left = [world.promises.withdraw(start, end - start), owner.join().unwrap()].concat();
        assert_eq!(left.len(), 1, "one of the two is the last");
        world.forget_and_change(left);
        world.check();
    });
}
