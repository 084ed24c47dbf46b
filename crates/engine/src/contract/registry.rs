//! The memory of an engine that registers it itself: what is registered now, and what was met.
//!
//! By default nothing is registered but what its owner has registered (`regions.rs`), and memory whose
//! owner has promised to forget it and to use it with nobody else: others who use the same device in this
//! process would meet what is registered behind their back. All other memory is copied by other ways.
//!
//! Where the engine is the device's [only user](Registry::set_sole_user), a pin-down cache registers by
//! itself. Registering pays from the second use on. So what is met for the first time is only remembered,
//! unless registering is the quickest way even for one use; what comes again is registered and kept,
//! within limits, until it is unmapped, forgotten, or makes room for other memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_memory::pin_cache::{Lease, PinCache, Promises, StartError, Watching};
use memferry_memory::pinning::{Access, PinError, Pinner};
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use memferry_memory::pin_cache::Limits;

use super::regions::{Held, Regions};

/// What is known of a piece of ordinary memory. Later ones are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Acquaintance {
    /// It is met for the first time, or so long after the last time that this is forgotten; or it is
    /// not registered, and nobody but its owner may register it.
    New,
    /// The same, and it is made of huge pages, which are registered quicker.
    NewAndHuge,
    /// It is registered, or was met before and is worth it.
    Known,
}

/// What is registered with an engine, and what was met.
#[derive(Debug)]
pub struct Registry {
    cache: PinCache,
    /// What its owners have registered.
    regions: Regions,
    /// Memory that its owner has promised to forget before it is unmapped.
    promised: Promises,
    /// Nobody else uses the device in this process.
    is_sole_user: AtomicBool,
    refused: AtomicU64,
    last_refusal: Mutex<Option<PinError>>,
}

/// What keeps memory registered while a copy uses it.
#[derive(Debug)]
pub enum Holding {
    /// Its owner has registered it.
    Region(Arc<Held>),
    /// It is in the cache.
    Lease(Lease),
    /// Somebody else has registered it, and keeps it so while it is copied.
    Theirs,
}

impl Registry {
    /// An empty registry. Where the kernel does not tell what is unmapped, only what is promised is
    /// kept: other memory that was mapped at the same place would be taken for the old.
    pub fn new(pinner: Arc<dyn Pinner>, limits: Limits) -> Result<Self, StartError> {
        Ok(Self {
            cache: PinCache::new(pinner.clone(), limits, Watching::EventsOrExplicit)?,
            regions: Regions::new(pinner),
            promised: Promises::new(),
            is_sole_user: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            last_refusal: Mutex::default(),
        })
    }

    /// The program says that nobody else uses the device in this process: memory may be registered
    /// that nobody has asked for. There is no way back.
    pub fn set_sole_user(&self) {
        self.is_sole_user.store(true, Ordering::Relaxed);
    }

    /// Whether the program has said so.
    pub fn is_sole_user(&self) -> bool {
        self.is_sole_user.load(Ordering::Relaxed)
    }

    /// What is known of memory. From now on it is known, until it is unmapped, if it may be registered.
    pub fn meet(&self, address: u64, length: u64) -> Acquaintance {
        let (at, bytes) = (address as usize, length as usize);
        match self.acquaintance(address, length) {
            Acquaintance::Known => Acquaintance::Known,
            _ if self.is_promised(address, length) => Acquaintance::Known,
            _ if self.is_theirs(address, length) => Acquaintance::Known,
            _ if self.is_sole_user() && self.cache.remember(at, bytes) => Acquaintance::Known,
            new => new,
        }
    }

    /// What is known of memory, without making it known: only what is registered is.
    pub fn acquaintance(&self, address: u64, length: u64) -> Acquaintance {
        let (address, length) = (address as usize, length as usize);
        if self.regions.cover(address, length)
            || self.uses_cache() && self.cache.keeps(address, length, Access::Read)
        {
            return Acquaintance::Known;
        }
        match self.is_sole_user() && residency::is_huge(address, length) {
            true => Acquaintance::NewAndHuge,
            false => Acquaintance::New,
        }
    }

    /// Whether memory that nobody has promised anything about stays registered after its use.
    pub fn keeps_anything(&self) -> bool {
        self.is_sole_user() && self.cache.watching() == Watching::Events
    }

    /// What is registered at an address, up to an end that it tells. Registers nothing.
    pub fn find(&self, address: u64, access: Access) -> Option<Holding> {
        if let Some(piece) = self.regions.find(address as usize, access) {
            return Some(Holding::Region(piece));
        }
        let lease = self.uses_cache().then(|| self.cache.find(address as usize, 1, access));
        lease.flatten().map(Holding::Lease)
    }

    /// Whether memory may be registered that nobody has registered.
    pub fn may_acquire(&self, address: u64, length: u64) -> bool {
        self.is_sole_user() || self.is_promised(address, length)
    }

    /// Registers memory, or finds it registered. Counts what is refused.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> Result<Lease, PinError> {
        let (at, bytes) = (address as usize, length as usize);
        let promised = self.promised.acquire(&self.cache, at, bytes, access);
        let acquired = if let Some(acquired) = promised {
            acquired
        } else if self.keeps_anything() {
            self.cache.acquire(at, bytes, access)
        } else if self.is_sole_user() {
            self.cache.acquire_once(at, bytes, access)
        } else {
            Err(PinError::Unsupported {
                what: "registering memory that nobody has registered",
                cure: "register it, or say that nobody else uses CUDA (MEMFERRY_CUDA_SOLE_USER=1)",
            })
        };
        acquired.inspect_err(|error| self.count_refusal(error))
    }

    fn count_refusal(&self, error: &PinError) {
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "memory cannot be registered: it is copied in other ways");
        }
        *lock(&self.last_refusal) = Some(error.clone());
    }

    /// Registers memory of which its owner says when it goes, in one piece of exactly these bytes, until
    /// it is [unregistered](Registry::unregister) as often. Where the device has no other user, memory of
    /// which a part is registered is registered part by part instead, which the lease keeps.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered, and until copies of it are over: the device
    /// keeps its page frames.
    pub unsafe fn register(
        &self,
        address: usize,
        length: usize,
    ) -> Result<Option<Lease>, PinError> {
        let error = match self.regions.register(address, length) {
            Ok(()) => return Ok(None),
            Err(error) => error,
        };
        if !self.is_sole_user() || matches!(error, PinError::BadMemory { .. }) {
            self.count_refusal(&error);
            return Err(error);
        }
        // SAFETY: passed on; `unregister` withdraws it.
        unsafe { self.promised.hold(address, length) };
        // SAFETY: passed on; `unregister` forgets it.
        let acquire = |access| unsafe { self.cache.acquire_promised(address, length, access) };
        match acquire(Access::Write).or_else(|_| acquire(Access::Read)) {
            Ok(lease) => Ok(Some(lease)),
            Err(error) => {
                self.unregister(address, length);
                self.count_refusal(&error);
                Err(error)
            }
        }
    }

    /// Undoes one [`Registry::register`] of the same range. Copies under way are not disturbed.
    pub fn unregister(&self, address: usize, length: usize) {
        if !self.regions.unregister(address, length) {
            for pages in self.promised.withdraw(address, length) {
                self.cache.forget(pages.start(), pages.bytes());
            }
        }
    }

    /// Lets no later request find this memory registered, or known. What its owners have
    /// [registered](Registry::register) is left alone.
    pub fn forget(&self, address: usize, length: usize) {
        for pages in self.promised.forget(address, length) {
            self.cache.forget(pages.start(), pages.bytes());
        }
    }

    /// Takes memory for known whose owner promises to [forget](Registry::forget) it before it is
    /// unmapped, and that no other user of the device copies it: it need not be watched, may be such as
    /// cannot be, and is registered part by part as it is used.
    ///
    /// # Safety
    /// The owner must keep both promises.
    pub unsafe fn promise(&self, address: usize, length: usize) {
        // SAFETY: passed on.
        unsafe { self.promised.add(address, length) };
    }

    /// Whether somebody else has registered memory with the same device.
    pub fn is_theirs(&self, address: u64, length: u64) -> bool {
        self.cache.pinner().is_pinned_by_others(address as usize, length as usize)
    }

    /// Whether anything can be in the cache.
    fn uses_cache(&self) -> bool {
        self.is_sole_user() || !self.promised.is_empty()
    }

    fn is_promised(&self, address: u64, length: u64) -> bool {
        self.promised.cover(address as usize, length as usize)
    }

    /// What it has kept and done.
    pub fn cache(&self) -> &PinCache {
        &self.cache
    }

    /// How often memory was refused, and why the last time.
    pub fn refusals(&self) -> (u64, Option<PinError>) {
        (self.refused.load(Ordering::Relaxed), lock(&self.last_refusal).clone())
    }
}
