//! Registration cache of one engine that registers memory itself.
//!
//! By default it contains only memory that its owner has registered (`regions.rs`), and unmonitored
//! memory, whose owner guarantees to invalidate it and to use it with no other library:
//! registrations that other users of the device do not know of could make their copies fail. All
//! other memory is copied without registration.
//!
//! If the engine is the device's [only user](RegistrationCache::set_sole_user), a pin cache
//! registers memory automatically. Registering pays off from the second use of a range, so the
//! first use is only recorded, unless registering is the cheapest route even for a single transfer.
//! Reused ranges stay registered, within limits, until they are unmapped, invalidated or evicted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_memory::pin_cache::{
    InvalidationMode, Lease, PinCache, PinCacheError, UnmonitoredRanges,
};
use memferry_memory::pinning::{Access, PinError, Pinner};
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use memferry_memory::pin_cache::PinCacheLimits;

use super::regions::{RegionTable, RegisteredRegion};

/// What the cache knows about a range of host memory. Later variants are better.
///
/// ```
/// use memferry::plan::{CopyQuery, ReuseHint};
///
/// let again = CopyQuery { reuse: ReuseHint::Reused, ..CopyQuery::copy(4 << 20, false) };
/// assert!(again.reuse > ReuseHint::FirstUse);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReuseHint {
    /// The range is used for the first time, or its last use is no longer recorded; or it is not
    /// registered, and only its owner may register it.
    FirstUse,
    /// Like [`FirstUse`](Self::FirstUse), in huge pages, which are faster to register.
    FirstUseHugePages,
    /// The range is registered, or it was used before and registering pays off.
    Reused,
}

/// The registered ranges of an engine, and the record of used ones.
#[derive(Debug)]
pub struct RegistrationCache {
    cache: PinCache,
    /// Ranges that their owners have registered.
    regions: RegionTable,
    /// Ranges that their owners guarantee to invalidate before they are unmapped.
    unmonitored: UnmonitoredRanges,
    /// No other library of this process uses the device.
    is_sole_user: AtomicBool,
    failures: AtomicU64,
    last_error: Mutex<Option<PinError>>,
}

/// A reference that keeps memory registered while a copy uses it.
#[derive(Debug)]
pub enum RegistrationRef {
    /// The owner has registered the memory.
    Region(Arc<RegisteredRegion>),
    /// The cache has registered the memory.
    Lease(Lease),
    /// Another library has registered the memory, and keeps it registered during the copy.
    Foreign,
}

impl RegistrationCache {
    /// Creates an empty cache. If the kernel does not report unmapped memory, only unmonitored
    /// ranges are cached: other memory could be mapped at the same address and be mistaken for the
    /// old.
    pub fn new(pinner: Arc<dyn Pinner>, limits: PinCacheLimits) -> Result<Self, PinCacheError> {
        Ok(Self {
            cache: PinCache::new(pinner.clone(), limits, InvalidationMode::Automatic)?,
            regions: RegionTable::new(pinner),
            unmonitored: UnmonitoredRanges::new(),
            is_sole_user: AtomicBool::new(false),
            failures: AtomicU64::new(0),
            last_error: Mutex::default(),
        })
    }

    /// Declares that no other library of this process uses the device: the cache may register
    /// memory that its owner has not registered. This cannot be undone.
    pub fn set_sole_user(&self) {
        self.is_sole_user.store(true, Ordering::Relaxed);
    }

    /// Whether the program declared this.
    pub fn is_sole_user(&self) -> bool {
        self.is_sole_user.load(Ordering::Relaxed)
    }

    /// The reuse hint for a range. Records the use, until the range is unmapped, if the range may
    /// be registered.
    pub fn record_use(&self, address: u64, length: u64) -> ReuseHint {
        let (at, bytes) = (address as usize, length as usize);
        match self.reuse_hint(address, length) {
            ReuseHint::Reused => ReuseHint::Reused,
            _ if self.is_unmonitored(address, length) => ReuseHint::Reused,
            _ if self.is_registered_by_others(address, length) => ReuseHint::Reused,
            _ if self.is_sole_user() && self.cache.note_first_use(at, bytes) => ReuseHint::Reused,
            new => new,
        }
    }

    /// The reuse hint for a range, without recording a use.
    pub fn reuse_hint(&self, address: u64, length: u64) -> ReuseHint {
        let (address, length) = (address as usize, length as usize);
        if self.regions.covers(address, length)
            || self.uses_cache() && self.cache.covers(address, length, Access::Read)
        {
            return ReuseHint::Reused;
        }
        match self.is_sole_user() && residency::is_huge(address, length) {
            true => ReuseHint::FirstUseHugePages,
            false => ReuseHint::FirstUse,
        }
    }

    /// Whether monitored memory stays registered after its use.
    pub fn caches_by_default(&self) -> bool {
        self.is_sole_user() && self.cache.invalidation_mode() == InvalidationMode::KernelEvents
    }

    /// The registration at an address, which may end before the range of the caller. Registers
    /// nothing.
    pub fn find(&self, address: u64, access: Access) -> Option<RegistrationRef> {
        if let Some(region) = self.regions.find(address as usize, access) {
            return Some(RegistrationRef::Region(region));
        }
        let lease = self.uses_cache().then(|| self.cache.find(address as usize, 1, access));
        lease.flatten().map(RegistrationRef::Lease)
    }

    /// Whether the cache may register memory that its owner has not registered.
    pub fn may_acquire(&self, address: u64, length: u64) -> bool {
        self.is_sole_user() || self.is_unmonitored(address, length)
    }

    /// Registers memory, or finds it registered. Counts failures.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> Result<Lease, PinError> {
        let (at, bytes) = (address as usize, length as usize);
        let unmonitored = self.unmonitored.acquire(&self.cache, at, bytes, access);
        let acquired = if let Some(acquired) = unmonitored {
            acquired
        } else if self.caches_by_default() {
            self.cache.acquire(at, bytes, access)
        } else if self.is_sole_user() {
            self.cache.acquire_uncached(at, bytes, access)
        } else {
            Err(PinError::Unsupported {
                what: "registering memory that its owner has not registered",
                fix: "register it, or declare the sole use of CUDA (MEMFERRY_CUDA_SOLE_USER=1)",
            })
        };
        acquired.inspect_err(|error| self.record_failure(error))
    }

    fn record_failure(&self, error: &PinError) {
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "memory cannot be registered: copying it without registration");
        }
        *lock(&self.last_error) = Some(error.clone());
    }

    /// Registers memory whose owner reports its end, as one region of exactly these bytes, until
    /// [unregister](RegistrationCache::unregister) was called for each registration. If the device
    /// has no other user, memory of which a part is registered already is registered part by part
    /// instead, and the returned lease keeps it.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered and until all copies of it are
    /// complete: the device keeps its page frames.
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
            self.record_failure(&error);
            return Err(error);
        }
        // SAFETY: the caller's guarantee; `unregister` withdraws the range.
        unsafe { self.unmonitored.add_ref(address, length) };
        // SAFETY: the caller's guarantee; `unregister` invalidates the range.
        let acquire = |access| unsafe { self.cache.acquire_unmonitored(address, length, access) };
        match acquire(Access::Write).or_else(|_| acquire(Access::Read)) {
            Ok(lease) => Ok(Some(lease)),
            Err(error) => {
                self.unregister(address, length);
                self.record_failure(&error);
                Err(error)
            }
        }
    }

    /// Undoes one [`RegistrationCache::register`] of the same range. Copies in flight are not
    /// affected.
    pub fn unregister(&self, address: usize, length: usize) {
        if !self.regions.unregister(address, length) {
            for pages in self.unmonitored.remove_ref(address, length) {
                self.cache.invalidate(pages.start(), pages.bytes());
            }
        }
    }

    /// Removes the range from the cache and from the record of uses. Ranges that their owners have
    /// [registered](RegistrationCache::register) stay.
    pub fn invalidate(&self, address: usize, length: usize) {
        for pages in self.unmonitored.invalidate(address, length) {
            self.cache.invalidate(pages.start(), pages.bytes());
        }
    }

    /// Marks memory whose owner guarantees to [invalidate](RegistrationCache::invalidate) it before
    /// it is unmapped, and that no other user of the device copies it. The memory is not monitored,
    /// may be of a kind that cannot be, and is registered part by part as it is used.
    ///
    /// # Safety
    /// Both guarantees must hold.
    pub unsafe fn mark_unmonitored(&self, address: usize, length: usize) {
        // SAFETY: the caller's guarantee.
        unsafe { self.unmonitored.add(address, length) };
    }

    /// Whether another library has registered the memory with the same device.
    pub fn is_registered_by_others(&self, address: u64, length: u64) -> bool {
        self.cache.pinner().is_pinned_by_others(address as usize, length as usize)
    }

    /// Whether the pin cache can contain anything.
    fn uses_cache(&self) -> bool {
        self.is_sole_user() || !self.unmonitored.is_empty()
    }

    fn is_unmonitored(&self, address: u64, length: u64) -> bool {
        self.unmonitored.covers(address as usize, length as usize)
    }

    /// The pin cache, with its limits and statistics.
    pub fn cache(&self) -> &PinCache {
        &self.cache
    }

    /// The number of failed registrations, and the last error.
    pub fn failures(&self) -> (u64, Option<PinError>) {
        (self.failures.load(Ordering::Relaxed), lock(&self.last_error).clone())
    }
}
