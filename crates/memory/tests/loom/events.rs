//! Mapping events with concurrent requests: a request after a change gets the new memory, a thread that
//! changes memory is not blocked, and nothing stays pinned.

use std::sync::{Arc, OnceLock};

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use memferry_memory::pin_cache::{InvalidationMode, Lease, PinCache, PinCacheLimits};
use memferry_memory::pinning::{Access, PageRange, PinError, PinToken, Pinner};
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use memferry_sys::userfault::changing;

use crate::model;

/// The start and end address of one page, which is always resident.
pub(crate) fn place() -> (usize, usize) {
    static PAGES: OnceLock<Pages> = OnceLock::new();
    let pages = PAGES.get_or_init(|| {
        let mut pages = Pages::new(page_bytes()).unwrap();
        pages.as_mut_slice().fill(1);
        pages
    });
    let start = pages.as_ptr() as usize;
    (start, start + page_bytes())
}

/// The memory at the page, and its pins. The token of a pin is the number of the memory that was pinned.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// The number of the memory. It changes under the kernel's lock, as the mapping does.
    number: AtomicU64,
    pins: Mutex<usize>,
    unpinned: Condvar,
    /// Pins are of addresses: they stay valid when the pages change.
    follows: bool,
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.load(Ordering::SeqCst)
    }

    /// Maps other memory at the page.
    pub(crate) fn change(&self) {
        self.number.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn pins(&self) -> usize {
        *self.pins.lock().unwrap()
    }

    fn wait_until_unpinned(&self) {
        let mut pins = self.pins.lock().unwrap();
        while *pins > 0 {
            pins = self.unpinned.wait(pins).unwrap();
        }
    }
}

impl Pinner for Memory {
    fn name(&self) -> &'static str {
        "model"
    }

    fn pin(&self, _: PageRange, _: Access) -> Result<PinToken, PinError> {
        *self.pins.lock().unwrap() += 1;
        Ok(PinToken::new(self.number()))
    }

    fn unpin(&self, _: PageRange, _: &PinToken) {
        *self.pins.lock().unwrap() -= 1;
        self.unpinned.notify_all();
    }

    fn tracks_mapping(&self) -> bool {
        self.follows
    }
}

/// A monitored pin cache, and the memory.
#[derive(Clone)]
struct World {
    cache: Arc<PinCache>,
    memory: Arc<Memory>,
}

impl World {
    fn new(memory: Memory) -> Self {
        let memory = Arc::new(memory);
        let cache = PinCache::new(
            memory.clone(),
            PinCacheLimits::default(),
            InvalidationMode::KernelEvents,
        )
        .unwrap();
        Self { cache: Arc::new(cache), memory }
    }

    /// A cache whose pins are of addresses: these need no sweeps, which makes the models smaller.
    fn of_addresses() -> Self {
        Self::new(Memory { follows: true, ..Memory::default() })
    }

    /// Acquires a lease, and checks that its memory is at least as new as the memory at the start of the
    /// request.
    fn acquire(&self) -> Lease {
        let number = self.memory.number();
        let (start, end) = place();
        let lease = self.cache.acquire(start, end - start, Access::Write).unwrap();
        assert!(lease.token().number() >= number, "a pin of memory that is gone");
        lease
    }

    /// Caches a pin of the present memory.
    fn keep(&self) {
        assert!(self.acquire().is_cached());
    }

    fn replace(&self) {
        let (start, end) = place();
        changing::replace(start, end, || self.memory.change());
    }

    fn discard(&self) {
        let (start, end) = place();
        changing::discard(start, end, || self.memory.change());
    }

    /// Runs `work` on a thread of its own.
    fn beside(&self, work: impl FnOnce(&Self) + Send + 'static) -> thread::JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || work(&world))
    }

    /// Requests the memory while it changes, and afterwards, and ends the model.
    fn request_beside(self, change: fn(&Self)) {
        let changing = self.beside(change);
        drop(self.acquire());
        changing.join().unwrap();
        drop(self.acquire());
        self.end();
    }

    /// Ends the model, and checks that nothing stays pinned.
    fn end(self) {
        let Self { cache, memory } = self;
        drop(cache);
        assert_eq!(memory.pins(), 0);
    }
}

#[test]
fn a_request_beside_a_change_never_finds_what_was_there_before() {
    model(3, || {
        let world = World::of_addresses();
        world.keep();
        world.request_beside(World::replace);
    });
}

#[test]
fn a_pin_that_is_made_while_its_memory_changes_is_not_found_afterwards() {
    model(3, || {
        let world = World::of_addresses();
        world.request_beside(World::replace);
    });
}

#[test]
fn a_lease_beside_a_change_stays_pinned_and_is_called_stale() {
    model(3, || {
        let world = World::of_addresses();
        let lease = world.acquire();
        let changing = world.beside(World::replace);
        drop(world.acquire());
        assert!(world.memory.pins() > 0, "it is in use");
        changing.join().unwrap();
        assert_eq!(world.acquire().token().number(), 1);
        assert!(lease.is_stale() && !lease.is_cached());
        drop(lease);
        world.end();
    });
}

#[test]
fn pins_of_memory_that_is_being_discarded_are_not_found_afterwards() {
    model(2, || {
        let world = World::new(Memory::default());
        world.keep();
        world.request_beside(World::discard);
    });
}

#[test]
fn memory_that_is_replaced_is_swept_by_the_reaper_before_its_owner_goes_on() {
    model(2, || {
        let world = World::new(Memory::default());
        world.keep();
        world.request_beside(World::replace);
    });
}

#[test]
fn what_nobody_asks_for_is_unpinned_after_a_while() {
    model(2, || {
        let world = World::of_addresses();
        world.keep();
        changing::let_time_pass();
        world.replace();
        world.memory.wait_until_unpinned();
        world.end();
    });
}

#[test]
fn a_reader_that_panics_keeps_nobody_waiting_and_nothing_is_found_afterwards() {
    model(2, || {
        let world = World::of_addresses();
        world.keep();
        changing::let_reader_panic();
        let changing = world.beside(World::replace);
        drop(world.acquire());
        changing.join().unwrap();
        let lease = world.acquire();
        assert!(!lease.is_cached());
        drop(lease);
        world.end();
    });
}

#[test]
fn a_cache_that_ends_beside_a_change_keeps_nobody_waiting() {
    model(2, || {
        let world = World::of_addresses();
        world.keep();
        let memory = world.memory.clone();
        let changing = thread::spawn(move || {
            let (start, end) = place();
            changing::replace(start, end, || memory.change());
        });
        world.end();
        changing.join().unwrap();
    });
}
