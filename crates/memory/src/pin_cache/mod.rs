//! The pin cache: memory stays pinned after use, so that the next request finds it pinned.
//!
//! [`PinCache::acquire`] pins memory, or finds it pinned, and returns a [`Lease`]. Overlapping
//! requests are merged into one entry. When a limit is reached, unused entries are unpinned, the
//! least recently used first. Memory in use is never unpinned, and a request that does not fit is
//! pinned for one use.
//!
//! # When the mapping changes
//!
//! A pin of page frames permanently refers to the old bytes once other memory is mapped at its
//! addresses. With [`InvalidationMode::Explicit`] the application calls [`PinCache::invalidate`]
//! for memory that it unmaps, before other memory can be mapped there. With
//! [`InvalidationMode::KernelEvents`] the kernel reports changes:
//!
//! 1. Memory is registered with the userfaultfd before it is pinned, so every later change has an
//!    event. A pin during which an event for its memory arrives is used once and not cached.
//!
//! 2. A thread that unmaps, moves or replaces monitored memory returns when its event has been
//!    read. But the memory is unmapped before that, and another thread may get the same addresses
//!    from the kernel while the first still waits. So a request first queries the kernel for
//!    changes whose event has not been read ([`Userfault::has_pending_changes`], which the kernel
//!    counts under its lock of the mappings). If there are none, the events of all earlier changes
//!    have been read.
//!
//! 3. An event that was read is in the event queue, which the request applies before it searches
//!    the index. The reader takes the lock of the queue and sets its flag before it reads, so a
//!    thread that knows that an event was read sees the flag and waits for the lock.
//!
//! Together: if other memory was mapped at an address before a request for it began, the old
//! mapping was removed before that, so its change is either pending or read when the request
//! queries the kernel, and the old entry is out of the index when the request searches it. If
//! changes stay pending, the request is pinned for one use, which is correct, unless the pinner
//! shares page frames among pins: it could return those of unmapped memory, so the request fails.
//!
//! The queue is bounded. If it overflows, all entries are invalidated. The thread that reads events
//! never waits for the cache's lock, so a thread may free memory while it holds that lock.
//!
//! An entry whose mapping changed is removed from the index at once. Its leases report that they
//! are stale, and it is unpinned when the last of them is dropped.
//!
//! # Discarded memory
//!
//! The event of `madvise(MADV_DONTNEED)` is read *before* the pages are discarded. A request
//! between the two pins the old pages. The application requests memory that it is discarding at the
//! same time, and whether it sees old bytes or zeroes is its own race. An application without such
//! a race is safe under any scheduling: its event invalidates requests before the call, and
//! requests after it pin the new pages. For applications with the race, pins of that memory are not
//! cached for 100 ms after the event, so that *later* requests are correct again. This is a time
//! limit and not a proof: if the discarding thread does not run for that long between its event and
//! its work, and another thread copies the same memory just then, the old pages may stay cached
//! until the memory is invalidated or its mapping changes.
//!
//! # Changes without events
//!
//! - Mapped files, System V shared memory and memory of another userfaultfd cannot be monitored.
//!   They are pinned for one use.
//! - Holes punched into shared memory through its descriptor, its truncation, and
//!   `MADV_GUARD_INSTALL` have no event, nor have `shmat` with `SHM_REMAP` and `remap_file_pages`
//!   over monitored memory. Call [`PinCache::invalidate`].
//!
//! # Cost of monitoring
//!
//! A request that finds its memory makes one system call without effect. Unmapping monitored memory
//! waits until the reader has run: about 10 us, and milliseconds if all cores are busy. The kernel
//! splits off the monitored part of a mapping, which adds up to two mappings for each entry, and
//! splits a huge page at its edge. Ranges of dropped entries are unregistered, and their mappings
//! merge again; unmapping unregisters by itself.
//!
//! Memory that was never touched is pinned for one use and cached from its second use on: memory
//! that is mapped for one copy and unmapped after it is never monitored.
//!
//! # If the reader fails
//!
//! A reader that panics closes its descriptor, so that no thread that unmaps memory waits for it.
//! From then on no events arrive: all entries are invalidated, and memory is pinned for one use.
//!
//! # Forked children
//!
//! A child has neither the threads nor the entries of its parent. Its requests are pinned for one
//! use by the same pinner; inherited leases have no effect.
//!
//! [`Userfault::has_pending_changes`]: memferry_sys::userfault::Userfault::has_pending_changes

mod acquire;
mod entry;
mod events;
mod index;
mod lease;
mod monitor;
mod quarantine;
mod shared;
mod statistics;
mod unmonitored;

use std::io;
use std::sync::Arc;

use memferry_sys::userfault::UserfaultDenied;

use crate::pinning::{Access, PageRange, PinError, Pinner};

use entry::PinEntry;
use index::{DeferredRelease, PinIndex};
use monitor::MonitorThreads;
use shared::{MappingMonitor, PinCacheShared};

pub use lease::Lease;
pub use statistics::PinCacheStatistics;
pub use unmonitored::UnmonitoredRanges;

/// Limits of what a cache keeps pinned. They do not limit memory in use.
///
/// ```
/// use memferry::{Ferry, PinLimits};
///
/// let limits = PinLimits { max_bytes: 64 << 20, ..PinLimits::default() };
/// let ferry = Ferry::builder().pin_limits(limits).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinCacheLimits {
    /// Maximum bytes of all cached entries.
    pub max_bytes: usize,
    /// Maximum number of cached entries.
    pub max_entries: usize,
}

impl Default for PinCacheLimits {
    fn default() -> Self {
        Self { max_bytes: 256 << 20, max_entries: 1024 }
    }
}

/// How a cache learns of changed mappings.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::engine::testing::nic_model::NicModel;
/// use memferry::engine::nic::{NicConfig, NicEngine};
/// use memferry::{Ferry, InvalidationMode};
///
/// let card = Arc::new(NicEngine::over_model(NicModel::new(), NicConfig::default())?);
/// let statistics = Ferry::builder().engine(card, 1).build()?.statistics();
/// match statistics.pinning("nic").map(|pinning| pinning.invalidation_mode) {
///     Some(InvalidationMode::KernelEvents) => println!("unmapped memory is noticed"),
///     _ => println!("call `Ferry::invalidate` before memory is unmapped"),
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidationMode {
    /// By userfaultfd events.
    KernelEvents,
    /// By calls of [`PinCache::invalidate`].
    Explicit,
    /// By userfaultfd events if they are permitted, otherwise by [`PinCache::invalidate`].
    Automatic,
}

/// Why a cache could not be created. The cause is the [source](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
pub enum PinCacheError {
    /// Events were requested and are not available.
    #[error("changes of mappings cannot be monitored")]
    NoEvents(#[source] UserfaultDenied),
    /// A thread or a descriptor could not be created.
    #[error("a thread or a descriptor of the pin cache could not be created")]
    NoThread(#[source] io::Error),
}

/// A cache of pinned memory.
#[derive(Debug)]
pub struct PinCache {
    shared: Arc<PinCacheShared>,
    monitor_threads: Option<MonitorThreads>,
    events_denied: Option<UserfaultDenied>,
}

impl PinCache {
    /// Creates an empty cache that uses `pinner`.
    pub fn new(
        pinner: Arc<dyn Pinner>,
        limits: PinCacheLimits,
        mode: InvalidationMode,
    ) -> Result<Self, PinCacheError> {
        let shared = Arc::new(PinCacheShared::new(pinner, limits));
        let (threads, denied) = match mode {
            InvalidationMode::Explicit => (None, None),
            InvalidationMode::KernelEvents => (Some(MonitorThreads::start(&shared)?), None),
            InvalidationMode::Automatic => match MonitorThreads::start(&shared) {
                Ok(threads) => (Some(threads), None),
                Err(PinCacheError::NoEvents(denied)) => {
                    tracing::info!(%denied, "userfaultfd unavailable: pin cache needs explicit invalidation before memory is unmapped");
                    (None, Some(denied))
                }
                Err(error) => return Err(error),
            },
        };
        Ok(Self { shared, monitor_threads: threads, events_denied: denied })
    }

    /// The mode in effect: kernel events or explicit.
    pub fn invalidation_mode(&self) -> InvalidationMode {
        if self.monitor_threads.is_some() {
            InvalidationMode::KernelEvents
        } else {
            InvalidationMode::Explicit
        }
    }

    /// Why events are not available, if they were requested.
    pub fn events_denied(&self) -> Option<UserfaultDenied> {
        self.events_denied
    }

    /// The pinner.
    pub fn pinner(&self) -> &Arc<dyn Pinner> {
        &self.shared.pinner
    }

    /// Pins `length` bytes at `address`, or finds them pinned.
    pub fn acquire(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.acquire_with(address, length, access, false)
    }

    /// As [`PinCache::acquire`], without monitoring: the pin is cached because the caller
    /// guarantees to [invalidate](PinCache::invalidate) the memory before it is unmapped.
    ///
    /// # Safety
    /// The caller must keep that guarantee: otherwise a later request finds the pin for other
    /// memory at the same addresses.
    pub unsafe fn acquire_unmonitored(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.acquire_with(address, length, access, true)
    }

    /// Pins memory for one use, without the cache.
    pub fn acquire_uncached(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<Lease, PinError> {
        self.pin_uncached(PageRange::covering(address, length)?, access)
    }

    /// The cached entry that contains `length` bytes at `address`, if there is one. Pins nothing.
    pub fn find(&self, address: usize, length: usize, access: Access) -> Option<Lease> {
        let requested = PageRange::covering(address, length).ok()?;
        if !self.shared.is_owner_process()
            || !self.monitor_threads.as_ref().is_none_or(MonitorThreads::quiesce)
        {
            return None;
        }
        let entry = self.shared.with(self.monitor(), |index, _| {
            let found = index.find(requested, access);
            index.statistics.hits += u64::from(found.is_some());
            found
        })?;
        Some(self.lease(entry))
    }

    /// The cached entries that contain two ranges, if there are both: one look at the kernel's events is
    /// enough for them. Pins nothing, and counts nothing if one is missing.
    pub fn find_both(&self, wanted: [(usize, usize, Access); 2]) -> Option<[Lease; 2]> {
        let [first, second] = wanted.map(|(address, length, access)| {
            PageRange::covering(address, length).ok().map(|range| (range, access))
        });
        let (first, second) = (first?, second?);
        if !self.shared.is_owner_process()
            || !self.monitor_threads.as_ref().is_none_or(MonitorThreads::quiesce)
        {
            return None;
        }
        let (one, other) = self.shared.with(self.monitor(), |index, _| {
            let one = index.find(first.0, first.1);
            let other = one.as_ref().and_then(|_| index.find(second.0, second.1));
            index.statistics.hits += 2 * u64::from(other.is_some());
            (one, other)
        });
        // Without the other, the lease of the one ends here.
        let one = self.lease(one?);
        Some([one, self.lease(other?)])
    }

    /// Records the first use of memory. Returns whether an earlier call has recorded it and its
    /// mapping has not changed since. Pins nothing. Does not record memory that overlaps a cached
    /// entry or cannot be monitored.
    pub fn note_first_use(&self, address: usize, length: usize) -> bool {
        let Ok(requested) = PageRange::covering(address, length) else { return false };
        if !self.shared.is_owner_process()
            || !self.monitor_threads.as_ref().is_some_and(MonitorThreads::quiesce)
        {
            return false;
        }
        let (is_recorded, is_free) = self.shared.with(self.monitor(), |index, deferred| {
            let recorded = index.find_monitored(requested);
            // The caller pins recorded memory next, in chunks, and the chunks must not be merged
            // with this record.
            recorded.into_iter().for_each(|range| index.invalidate(range, None, deferred));
            (recorded.is_some(), recorded.is_none() && !index.overlaps(requested))
        });
        if is_free {
            drop(self.acquire(address, length, Access::MonitorOnly));
        }
        is_recorded
    }

    /// Whether cached entries cover `length` bytes at `address`. Only a hint: the state may change
    /// before the caller uses the result.
    pub fn covers(&self, address: usize, length: usize, access: Access) -> bool {
        let Ok(requested) = PageRange::covering(address, length) else { return false };
        let covers =
            |index: &mut PinIndex, _: &mut DeferredRelease| index.covers(requested, access);
        self.shared.is_owner_process() && self.shared.with(self.monitor(), covers)
    }

    /// Removes entries that overlap `length` bytes at `address` from the index, and unpins them
    /// when they are not in use any more.
    pub fn invalidate(&self, address: usize, length: usize) {
        if let Ok(range) = PageRange::covering(address, length)
            && self.shared.is_owner_process()
        {
            let shared = &self.shared;
            shared.with(self.monitor(), |index, deferred| {
                shared.invalidate(range, None, index, deferred);
            });
        }
    }

    /// Invalidates all entries.
    pub fn invalidate_all(&self) {
        if self.shared.is_owner_process() {
            let shared = &self.shared;
            shared.with(self.monitor(), |index, deferred| shared.invalidate_all(index, deferred));
        }
    }

    /// Counters since the creation, and the current content. All 0 in a forked child.
    pub fn statistics(&self) -> PinCacheStatistics {
        if !self.shared.is_owner_process() {
            return PinCacheStatistics::default();
        }
        self.shared.statistics(self.monitor())
    }

    fn monitor(&self) -> Option<&MappingMonitor> {
        self.monitor_threads.as_ref().map(MonitorThreads::monitor)
    }

    fn lease(&self, entry: Arc<PinEntry>) -> Lease {
        Lease::new(&self.shared, entry)
    }
}

impl Drop for PinCache {
    fn drop(&mut self) {
        self.invalidate_all();
        if let Some(threads) = self.monitor_threads.take() {
            if self.shared.is_owner_process() {
                threads.shut_down();
            } else {
                threads.leak_after_fork();
            }
        }
    }
}

#[cfg(test)]
mod tests;
