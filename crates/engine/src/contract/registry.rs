//! The memory of an engine that registers it itself: what is registered now, and what was met.
//!
//! Registering pays from the second use on. So what is met for the first time is only remembered,
//! unless registering is the quickest way even for one use; what comes again is registered and kept,
//! within limits, until it is unmapped, forgotten, or makes room for other memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_memory::pin_cache::{Lease, PinCache, Promises, StartError, Watching};
use memferry_memory::pinning::{Access, PinError, Pinner};
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use memferry_memory::pin_cache::Limits;

/// What is known of a piece of ordinary memory. Later ones are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Acquaintance {
    /// It is met for the first time, or so long after the last time that this is forgotten.
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
    /// Memory that its owner has promised to forget before it is unmapped.
    promised: Promises,
    refused: AtomicU64,
    last_refusal: Mutex<Option<PinError>>,
}

impl Registry {
    /// An empty registry. Where the kernel does not tell what is unmapped, only what is promised is
    /// kept: other memory that was mapped at the same place would be taken for the old.
    pub fn new(pinner: Arc<dyn Pinner>, limits: Limits) -> Result<Self, StartError> {
        let cache = PinCache::new(pinner, limits, Watching::EventsOrExplicit)?;
        let (promised, last_refusal) = (Promises::new(), Mutex::default());
        Ok(Self { cache, promised, refused: AtomicU64::new(0), last_refusal })
    }

    /// What is known of memory. From now on it is known, until it is unmapped.
    pub fn meet(&self, address: u64, length: u64) -> Acquaintance {
        match self.acquaintance(address, length) {
            Acquaintance::Known => Acquaintance::Known,
            _ if self.is_promised(address, length) => Acquaintance::Known,
            _ if self.cache.remember(address as usize, length as usize) => Acquaintance::Known,
            new => new,
        }
    }

    /// What is known of memory, without making it known: only what is registered is.
    pub fn acquaintance(&self, address: u64, length: u64) -> Acquaintance {
        let (address, length) = (address as usize, length as usize);
        if self.cache.keeps(address, length, Access::Read) {
            return Acquaintance::Known;
        }
        match residency::is_huge(address, length) {
            true => Acquaintance::NewAndHuge,
            false => Acquaintance::New,
        }
    }

    /// Whether memory that nobody has promised anything about stays registered after its use.
    pub fn keeps_anything(&self) -> bool {
        self.cache.watching() == Watching::Events
    }

    /// What is registered at an address, up to an end that the lease tells.
    pub fn find(&self, address: u64, access: Access) -> Option<Lease> {
        self.cache.find(address as usize, 1, access)
    }

    /// Registers memory, or finds it registered. Counts what is refused.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> Result<Lease, PinError> {
        let (at, bytes) = (address as usize, length as usize);
        let acquired = if self.is_promised(address, length) {
            self.cache.acquire_promised(at, bytes, access)
        } else if self.keeps_anything() {
            self.cache.acquire(at, bytes, access)
        } else {
            self.cache.acquire_once(at, bytes, access)
        };
        acquired.inspect_err(|error| {
            if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(%error, "memory cannot be registered: it is copied in other ways");
            }
            *lock(&self.last_refusal) = Some(error.clone());
        })
    }

    /// Lets no later request find this memory registered, or known. What is
    /// [held](Registry::hold) of its pages is left alone.
    pub fn forget(&self, address: usize, length: usize) {
        for pages in self.promised.forget(address, length) {
            self.cache.forget(pages.start(), pages.bytes());
        }
    }

    /// Takes memory for known whose owner promises to [forget](Registry::forget) it before it is
    /// unmapped: it need not be watched, and may be such as cannot be.
    pub fn promise(&self, address: usize, length: usize) {
        self.promised.add(address, length);
    }

    /// As [`Registry::promise`], until it is [withdrawn](Registry::withdraw) as often.
    pub fn hold(&self, address: usize, length: usize) {
        self.promised.hold(address, length);
    }

    /// Ends one [`Registry::hold`] of the same range. With the last, what is kept of it is forgotten.
    pub fn withdraw(&self, address: usize, length: usize) {
        for pages in self.promised.withdraw(address, length) {
            self.cache.forget(pages.start(), pages.bytes());
        }
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
