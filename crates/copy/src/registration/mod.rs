//! Pinned memory for engines that access only pinned memory.
//!
//! Each such engine has its own pin cache on top of the engine's pinner. Before a descriptor is
//! submitted, its memory is pinned or found in the cache, and the descriptor holds the leases until
//! it is dropped. The processor copies memory that cannot be pinned, and the fallback is counted.
//!
//! A pin is cached only if userfaultfd monitors its memory, or the owner of the memory guarantees
//! to invalidate it. Every other pin serves one use: a cached one would let the engine access the
//! old page frames after other memory is mapped at the same addresses.

mod pipeline;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_engine::completion::{ChannelBatch, PendingNotification};
use memferry_engine::contract::{DescriptorLeases, RegistrationMode as Needs};
use memferry_engine::{Descriptor, Engine, ExecutionError, MemoryKind};
use memferry_memory::pin_cache::{
    InvalidationMode, Lease, PinCache, PinCacheLimits, UnmonitoredRanges,
};
use memferry_memory::pinning::{Access, PinError};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub(crate) use pipeline::PipelinedRegistration;

use crate::error::BuildError;
use crate::request::Request;
use crate::statistics::RegistrationStatistics;

/// The pinned memory of one engine.
#[derive(Debug)]
pub(crate) struct EngineRegistrations {
    engine: String,
    cache: PinCache,
    /// Ranges that their owner guarantees to invalidate.
    unmonitored: UnmonitoredRanges,
    /// Whether the engine writes notification variables.
    writes_notifications: bool,
    failures: AtomicU64,
    fallback_bytes: AtomicU64,
    last_error: Mutex<Option<PinError>>,
    owner: OwnerProcess,
}

/// The reason why memory is not pinned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RegistrationError {
    /// The pinner failed, for a reason other than the memory itself.
    Refused,
    /// The memory is not mapped.
    Unmapped { address: u64 },
}

impl EngineRegistrations {
    /// Creates the pin cache of an engine; returns `None` if the engine needs no pinned memory.
    pub(crate) fn of(
        engine: &dyn Engine,
        limits: PinCacheLimits,
    ) -> Result<Option<Self>, BuildError> {
        let capabilities = engine.capabilities();
        if capabilities.registration != Needs::BySubmitter {
            return Ok(None);
        }
        let incomplete = |expected| {
            let (name, value) = ("engine", engine.name().to_owned());
            BuildError::Setting { name, value, expected }
        };
        if capabilities.claims_chunks {
            let expected = "an engine that claims no chunks, since it needs pinned memory";
            return Err(incomplete(expected));
        }
        let pinner = engine.pinner();
        let pinner = pinner.ok_or_else(|| incomplete("an engine that says what pins for it"))?;
        let cache = PinCache::new(pinner, limits, InvalidationMode::Automatic)
            .map_err(|error| BuildError::Pinning { engine: engine.name().into(), error })?;
        Ok(Some(Self {
            engine: engine.name().into(),
            cache,
            unmonitored: UnmonitoredRanges::new(),
            writes_notifications: capabilities.writes_notifications,
            failures: AtomicU64::new(0),
            fallback_bytes: AtomicU64::new(0),
            last_error: Mutex::new(None),
            owner: OwnerProcess::current(),
        }))
    }

    /// Removes a range from the cache, except for pages of a registered region.
    pub(crate) fn invalidate(&self, address: usize, length: usize) {
        for pages in self.unmonitored.invalidate(address, length) {
            self.cache.invalidate(pages.start(), pages.bytes());
        }
    }

    /// Marks memory that its owner guarantees to [invalidate](EngineRegistrations::invalidate)
    /// before it is unmapped.
    ///
    /// # Safety
    /// The owner must invalidate the memory before it is unmapped.
    pub(crate) unsafe fn mark_unmonitored(&self, address: usize, length: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe { self.unmonitored.add(address, length) };
    }

    /// Marks memory as unmonitored until it is withdrawn as many times as it was held.
    ///
    /// # Safety
    /// The memory must stay mapped until then.
    pub(crate) unsafe fn hold(&self, address: usize, length: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe { self.unmonitored.add_ref(address, length) };
    }

    /// Reverts one [`EngineRegistrations::hold`] of the same range.
    pub(crate) fn withdraw(&self, address: usize, length: usize) {
        for pages in self.unmonitored.remove_ref(address, length) {
            self.cache.invalidate(pages.start(), pages.bytes());
        }
    }

    pub(crate) fn statistics(&self) -> RegistrationStatistics {
        // In a forked child, a lock that was held at the fork stays locked for ever.
        let last_refusal = if self.is_forked() { None } else { lock(&self.last_error).clone() };
        RegistrationStatistics {
            cache: self.cache.statistics(),
            invalidation_mode: self.cache.invalidation_mode(),
            failures: self.failures.load(Ordering::Relaxed),
            fallback_bytes: self.fallback_bytes.load(Ordering::Relaxed),
            last_error: last_refusal,
        }
    }

    /// Pins a notification variable if the engine writes such variables. If pinning fails, the
    /// processor writes the variable.
    pub(crate) fn notification_lease(
        &self,
        notify: Option<&PendingNotification>,
    ) -> Option<Arc<Lease>> {
        let address =
            notify.filter(|_| self.writes_notifications && !self.is_forked())?.address() as usize;
        let bytes = size_of::<u64>();
        self.acquire(address, bytes, Access::Write).ok().map(Arc::new)
    }

    /// Pins memory, or finds it in the cache. The pin is cached only if the memory is monitored or
    /// its owner invalidates it.
    fn acquire(&self, address: usize, length: usize, access: Access) -> Result<Lease, PinError> {
        if let Some(acquired) = self.unmonitored.acquire(&self.cache, address, length, access) {
            acquired
        } else if self.cache.invalidation_mode() == InvalidationMode::KernelEvents {
            self.cache.acquire(address, length, access)
        } else {
            self.cache.acquire_uncached(address, length, access)
        }
    }

    /// Returns a shared lease of a pinned range.
    pub(crate) fn lease(
        &self,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Arc<Lease>, RegistrationError> {
        self.pin(address, length, access).map(Arc::new)
    }

    /// Returns the batch of a request that is one descriptor: the batch of `submit` if its memory
    /// can be pinned, else a batch that bypasses the channel.
    pub(crate) fn single_batch(
        &self,
        request: &Request<'_>,
        descriptor: Descriptor,
        variable: Option<Arc<Lease>>,
        submit: impl FnOnce(Descriptor) -> ChannelBatch,
    ) -> ChannelBatch {
        match self.pin_request(request) {
            Ok(pins) => {
                submit(descriptor.pinned_by(Arc::new(DescriptorLeases { variable, ..pins })))
            }
            Err(unpinned) => self.unpinned_batch(descriptor, unpinned),
        }
    }

    fn pin_request(&self, request: &Request<'_>) -> Result<DescriptorLeases, RegistrationError> {
        let Request { operation, source, target, length, .. } = *request;
        let is_host = |kind| kind == MemoryKind::Host;
        if request.is_host_only() && request.overlaps() {
            // One lease covers both ranges: if they were pinned one after the other, the second pin
            // would replace the first one in the cache.
            let start = source.min(target);
            let lease = self.pin(start, source.max(target) + length - start, Access::Write)?;
            let lease = Some(Arc::new(lease));
            return Ok(DescriptorLeases { source: lease.clone(), target: lease, variable: None });
        }
        let mut pins = DescriptorLeases::default();
        if let Some(access) = operation.source_access().filter(|_| is_host(request.source_memory)) {
            pins.source = Some(Arc::new(self.pin(source, length, access)?));
        }
        if is_host(request.target_memory) {
            pins.target = Some(Arc::new(self.pin(target, length, operation.target_access())?));
        }
        Ok(pins)
    }

    /// Pins memory, or finds it in the cache. A failure is counted and logged.
    fn pin(&self, address: u64, length: u64, access: Access) -> Result<Lease, RegistrationError> {
        if self.is_forked() {
            // The engine and its pins belong to the parent.
            return Err(RegistrationError::Refused);
        }
        let error = match self.acquire(address as usize, length as usize, access) {
            Ok(lease) => return Ok(lease),
            Err(error) => error,
        };
        if let PinError::BadMemory { .. } = error {
            return Err(RegistrationError::Unmapped { address: first_unmapped(address, length) });
        }
        let engine = &self.engine;
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(engine, %error, "memory cannot be pinned: the processor copies instead");
        } else {
            tracing::debug!(engine, %error, "memory cannot be pinned");
        }
        *lock(&self.last_error) = Some(error);
        Err(RegistrationError::Refused)
    }

    /// Returns the batch of a descriptor whose memory is not pinned: it fails if the memory is
    /// unmapped or a device is involved, else the processor executes it.
    pub(crate) fn unpinned_batch(
        &self,
        descriptor: Descriptor,
        unpinned: RegistrationError,
    ) -> ChannelBatch {
        match unpinned {
            RegistrationError::Unmapped { address } => ChannelBatch::failed(
                descriptor,
                ExecutionError::BadMemory { address, done_bytes: 0 },
            ),
            RegistrationError::Refused if descriptor.is_host_only() => {
                self.fallback_bytes.fetch_add(descriptor.length(), Ordering::Relaxed);
                ChannelBatch::inline(descriptor)
            }
            RegistrationError::Refused => {
                let reason =
                    "memory could not be pinned, and the processor cannot access the other memory";
                ChannelBatch::failed(descriptor, ExecutionError::Engine { done_bytes: 0, reason })
            }
        }
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }
}

/// Returns the first unmapped address of a range, or its first address if all of it is mapped: then
/// the protection forbids the access.
fn first_unmapped(address: u64, length: u64) -> u64 {
    let page = page_bytes() as u64;
    let first = address & !(page - 1);
    let pages = (first..address + length).step_by(page_bytes());
    let missing = pages.into_iter().find(|at| !residency::is_mapped(*at as usize, page_bytes()));
    missing.map_or(address, |at| at.max(address))
}
