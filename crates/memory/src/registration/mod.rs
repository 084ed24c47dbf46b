//! The registered memory of an engine: one service for all engines that access registered memory only,
//! or copy it faster.
//!
//! A cache of a device that [this library alone](RegistrationCache::exclusive) uses registers memory
//! when it is used, and keeps it registered, within limits, until it is unmapped, invalidated or
//! evicted. A registration is kept only if userfaultfd monitors its memory, or the owner of the memory
//! guarantees to invalidate it. Every other registration serves one use: a kept one would let the
//! device access the old page frames after other memory is mapped at the same addresses.
//!
//! A cache of a device that [other libraries](RegistrationCache::shared) of the process may use too
//! contains only memory that its owner has registered (`regions.rs`), and unmonitored
//! memory, whose owner guarantees to invalidate it and to use it with no other library:
//! registrations that other users of the device do not know of could make their copies fail. All
//! other memory is copied without registration.
//!
//! If the engine becomes the device's [only user](RegistrationCache::set_sole_user), it registers
//! memory automatically. Registering pays off from the second use of a range, so the
//! first use is only recorded, unless registering is the cheapest route even for a single transfer.

mod regions;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_sys::fork::OwnerProcess;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use regions::RegisteredRegion;

use crate::pin_cache::{
    InvalidationMode, Lease, PinCache, PinCacheError, PinCacheLimits, PinCacheStatistics,
    UnmonitoredRanges,
};
use crate::pinning::{Access, PinError, Pinner};
use regions::RegionTable;

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
    /// Ranges that their owners have registered, each as one region of exactly its bytes. `None` for
    /// a device without other users, whose ranges are registered part by part as they are used.
    regions: Option<RegionTable>,
    /// Ranges that their owners guarantee to invalidate before they are unmapped.
    unmonitored: UnmonitoredRanges,
    /// No other library of this process uses the device.
    is_sole_user: AtomicBool,
    failures: AtomicU64,
    fallback_bytes: AtomicU64,
    last_error: Mutex<Option<PinError>>,
    owner: OwnerProcess,
}

/// The reason why memory is not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegistrationError {
    /// The memory must not be registered, or the pinner failed for a reason other than the memory
    /// itself.
    Refused,
    /// The memory is not mapped.
    Unmapped {
        /// The first address that is not mapped.
        address: u64,
    },
}

/// Statistics of the memory that is registered for an engine.
///
/// ```
/// use memferry::{Ferry, RegistrationStatistics};
///
/// let statistics = Ferry::new()?.statistics();
/// let nic: Option<&RegistrationStatistics> = statistics.pinning("nic");
/// assert!(nic.is_none()); // no such engine
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrationStatistics {
    /// The counters and the current contents of its pin cache.
    pub cache: PinCacheStatistics,
    /// How the cache is notified of unmapped memory: by kernel events, or by the program
    /// (`Ferry::invalidate`).
    pub invalidation_mode: InvalidationMode,
    /// How often mapped memory could not be pinned.
    pub failures: u64,
    /// Bytes that the processor copied because of these failures.
    pub fallback_bytes: u64,
    /// The most recent error of pinning.
    pub last_error: Option<PinError>,
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
    /// Creates an empty cache of a device that only this library uses. If the kernel does not report
    /// unmapped memory, only unmonitored ranges stay registered: other memory could be mapped at the
    /// same address and be mistaken for the old.
    pub fn exclusive(
        pinner: Arc<dyn Pinner>,
        limits: PinCacheLimits,
    ) -> Result<Self, PinCacheError> {
        Self::new(pinner, limits, None)
    }

    /// Creates an empty cache of a device that other libraries of the process may use too.
    pub fn shared(pinner: Arc<dyn Pinner>, limits: PinCacheLimits) -> Result<Self, PinCacheError> {
        let regions = RegionTable::new(pinner.clone());
        Self::new(pinner, limits, Some(regions))
    }

    fn new(
        pinner: Arc<dyn Pinner>,
        limits: PinCacheLimits,
        regions: Option<RegionTable>,
    ) -> Result<Self, PinCacheError> {
        Ok(Self {
            cache: PinCache::new(pinner, limits, InvalidationMode::Automatic)?,
            is_sole_user: AtomicBool::new(regions.is_none()),
            regions,
            unmonitored: UnmonitoredRanges::new(),
            failures: AtomicU64::new(0),
            fallback_bytes: AtomicU64::new(0),
            last_error: Mutex::default(),
            owner: OwnerProcess::current(),
        })
    }

    /// Declares that no other library of this process uses the device: the cache may register
    /// memory that its owner has not registered. This cannot be undone.
    pub fn set_sole_user(&self) {
        self.is_sole_user.store(true, Ordering::Relaxed);
    }

    /// Whether no other library uses the device.
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
        if self.regions.as_ref().is_some_and(|regions| regions.covers(address, length))
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
        let region = self.regions.as_ref().and_then(|all| all.find(address as usize, access));
        if let Some(region) = region {
            return Some(RegistrationRef::Region(region));
        }
        let lease = self.uses_cache().then(|| self.cache.find(address as usize, 1, access));
        lease.flatten().map(RegistrationRef::Lease)
    }

    /// Whether the cache may register memory that its owner has not registered.
    pub fn may_acquire(&self, address: u64, length: u64) -> bool {
        self.is_sole_user() || self.is_unmonitored(address, length)
    }

    /// Registers memory, or finds it registered. Counts failures, except of memory that is not
    /// mapped.
    pub fn acquire(&self, address: u64, length: u64, access: Access) -> Result<Lease, PinError> {
        if self.is_forked() {
            // The device and its registrations belong to the parent.
            return Err(FORKED);
        }
        self.acquire_quietly(address, length, access)
            .inspect_err(|error| self.record_failure(error))
    }

    /// The cached registrations of two ranges, if both are monitored and cached: what
    /// [`acquire`](RegistrationCache::acquire) would find for each, with one look at the kernel's events.
    pub fn find_both(&self, wanted: [(u64, u64, Access); 2]) -> Option<[Lease; 2]> {
        if self.is_forked() || !self.caches_by_default() || !self.unmonitored.is_empty() {
            return None;
        }
        let wanted =
            wanted.map(|(address, length, access)| (address as usize, length as usize, access));
        self.cache.find_both(wanted)
    }

    /// As [`acquire`](RegistrationCache::acquire), for memory that need not be registered: a failure
    /// is not counted.
    pub fn acquire_optional(&self, address: u64, length: u64, access: Access) -> Option<Lease> {
        if self.is_forked() {
            return None;
        }
        self.acquire_quietly(address, length, access).ok()
    }

    fn acquire_quietly(
        &self,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Lease, PinError> {
        let (at, bytes) = (address as usize, length as usize);
        let unmonitored = self.unmonitored.acquire(&self.cache, at, bytes, access);
        if let Some(acquired) = unmonitored {
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
        }
    }

    fn record_failure(&self, error: &PinError) {
        if matches!(error, PinError::BadMemory { .. }) {
            return;
        }
        let pinner = self.cache.pinner().name();
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(pinner, %error, "memory cannot be registered: copying it another way");
        } else {
            tracing::debug!(pinner, %error, "memory cannot be registered");
        }
        *lock(&self.last_error) = Some(error.clone());
    }

    /// Counts bytes that the processor copied because their memory could not be registered.
    pub fn count_fallback(&self, bytes: u64) {
        self.fallback_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Registers memory whose owner reports its end, until
    /// [unregister](RegistrationCache::unregister) was called for each registration: as one region of
    /// exactly these bytes, or, with an [exclusive](RegistrationCache::exclusive) device, part by part
    /// as it is used. If a shared device has got no other user, memory of which a part is registered
    /// already is registered part by part too, and the returned lease keeps it.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered and until all copies of it are
    /// complete: the device keeps its page frames.
    pub unsafe fn register(
        &self,
        address: usize,
        length: usize,
    ) -> Result<Option<Lease>, PinError> {
        let Some(regions) = &self.regions else {
            // SAFETY: the caller's guarantee; `unregister` withdraws the range.
            unsafe { self.unmonitored.add_ref(address, length) };
            return Ok(None);
        };
        let error = match regions.register(address, length) {
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
        let is_region =
            self.regions.as_ref().is_some_and(|regions| regions.unregister(address, length));
        if !is_region {
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

    /// The counters so far.
    pub fn statistics(&self) -> RegistrationStatistics {
        // In a forked child, a lock that was held at the fork stays locked for ever.
        let last_error = if self.is_forked() { None } else { lock(&self.last_error).clone() };
        RegistrationStatistics {
            cache: self.cache.statistics(),
            invalidation_mode: self.cache.invalidation_mode(),
            failures: self.failures.load(Ordering::Relaxed),
            fallback_bytes: self.fallback_bytes.load(Ordering::Relaxed),
            last_error,
        }
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }
}

/// The error of a forked child.
const FORKED: PinError = PinError::Unsupported {
    what: "registering memory with a device of the parent process",
    fix: "open the device in this process",
};

/// The first unmapped address of a range, or its first address if all of it is mapped: then the
/// protection forbids the access.
pub fn first_unmapped(address: u64, length: u64) -> u64 {
    let page = page_bytes() as u64;
    let first = address & !(page - 1);
    let pages = (first..address + length).step_by(page_bytes());
    let missing = pages.into_iter().find(|at| !residency::is_mapped(*at as usize, page_bytes()));
    missing.map_or(address, |at| at.max(address))
}

#[cfg(test)]
mod tests;
