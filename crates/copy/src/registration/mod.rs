//! Memory for engines that touch only what is pinned for them.
//!
//! Each such engine has a pin-down cache of its own, with the engine's pinner behind it. Before a
//! descriptor is submitted its memory is pinned, or found pinned, and the leases travel with it
//! until it is gone. What cannot be pinned is carried out by the processor, and counted.
//!
//! A pin is kept for later only if the kernel tells when its memory is unmapped, or the owner of the
//! memory has promised to. Every other pin is for one use: were it kept, the engine would go on with
//! the old page frames once other memory is mapped at the same addresses.

mod pieces;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_engine::completion::{Notify, Order};
use memferry_engine::contract::{Pins, Registration as Needs};
use memferry_engine::{Descriptor, Engine, ExecutionError, MemoryKind};
use memferry_memory::pin_cache::{Lease, Limits, PinCache, Promises, Watching};
use memferry_memory::pinning::{Access, PinError};
use memferry_sys::fork;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub(crate) use pieces::PinnedPieces;

use crate::error::BuildError;
use crate::request::Request;
use crate::statistics::PinStatistics;

/// The pinned memory of one engine.
#[derive(Debug)]
pub(crate) struct Registration {
    engine: String,
    cache: PinCache,
    /// Memory whose owner says when it goes.
    promised: Promises,
    /// The engine sets notification variables.
    notifies: bool,
    refused: AtomicU64,
    refused_bytes: AtomicU64,
    last_refusal: Mutex<Option<PinError>>,
    fork_generation: u64,
}

/// Why memory is not pinned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unpinned {
    /// It could not be, which says nothing about the memory.
    Refused,
    /// It is not there.
    Missing { address: u64 },
}

impl Registration {
    /// What an engine needs, if it needs anything.
    pub(crate) fn of(engine: &dyn Engine, limits: Limits) -> Result<Option<Self>, BuildError> {
        let capabilities = engine.capabilities();
        if capabilities.registration != Needs::ByMemoryLayer {
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
        let cache = PinCache::new(pinner, limits, Watching::EventsOrExplicit)
            .map_err(|error| BuildError::Pinning { engine: engine.name().into(), error })?;
        Ok(Some(Self {
            engine: engine.name().into(),
            cache,
            promised: Promises::new(),
            notifies: capabilities.notifies,
            refused: AtomicU64::new(0),
            refused_bytes: AtomicU64::new(0),
            last_refusal: Mutex::new(None),
            fork_generation: fork::generation(),
        }))
    }

    /// Lets no later request find this memory pinned, apart from pages that are held.
    pub(crate) fn forget(&self, address: usize, length: usize) {
        for pages in self.promised.forget(address, length) {
            self.cache.forget(pages.start(), pages.bytes());
        }
    }

    /// Memory whose owner promises to [forget](Registration::forget) it before it is unmapped.
    ///
    /// # Safety
    /// The owner must do so.
    pub(crate) unsafe fn promise(&self, address: usize, length: usize) {
        // SAFETY: passed on.
        unsafe { self.promised.add(address, length) };
    }

    /// The same, until it is withdrawn as often.
    ///
    /// # Safety
    /// The memory must stay mapped until then.
    pub(crate) unsafe fn hold(&self, address: usize, length: usize) {
        // SAFETY: passed on.
        unsafe { self.promised.hold(address, length) };
    }

    /// Ends one [`Registration::hold`] of the same range.
    pub(crate) fn withdraw(&self, address: usize, length: usize) {
        for pages in self.promised.withdraw(address, length) {
            self.cache.forget(pages.start(), pages.bytes());
        }
    }

    pub(crate) fn statistics(&self) -> PinStatistics {
        // A lock that was held at a fork is held for ever in the child.
        let last_refusal = if self.is_forked() { None } else { lock(&self.last_refusal).clone() };
        PinStatistics {
            cache: self.cache.statistics(),
            watching: self.cache.watching(),
            refused: self.refused.load(Ordering::Relaxed),
            refused_bytes: self.refused_bytes.load(Ordering::Relaxed),
            last_refusal,
        }
    }

    /// Pins a notification variable, if the engine sets such variables. Where that is refused, the
    /// processor sets it as ever.
    pub(crate) fn variable(&self, notify: Option<&Notify>) -> Option<Arc<Lease>> {
        let address = notify.filter(|_| self.notifies && !self.is_forked())?.address() as usize;
        let bytes = size_of::<u64>();
        self.acquire(address, bytes, Access::Write).ok().map(Arc::new)
    }

    /// Pins memory, or finds it pinned; keeps the pin if somebody says when the memory goes.
    fn acquire(&self, address: usize, length: usize, access: Access) -> Result<Lease, PinError> {
        if let Some(acquired) = self.promised.acquire(&self.cache, address, length, access) {
            acquired
        } else if self.cache.watching() == Watching::Events {
            self.cache.acquire(address, length, access)
        } else {
            self.cache.acquire_once(address, length, access)
        }
    }

    /// Pins memory, or finds it pinned.
    pub(crate) fn lease(
        &self,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Arc<Lease>, Unpinned> {
        self.pin(address, length, access).map(Arc::new)
    }

    /// The order for a request that is one descriptor: what `submit` makes of it once its memory is
    /// pinned, or one that no channel gets.
    pub(crate) fn whole(
        &self,
        request: &Request<'_>,
        descriptor: Descriptor,
        variable: Option<Arc<Lease>>,
        submit: impl FnOnce(Descriptor) -> Order,
    ) -> Order {
        match self.pin_whole(request) {
            Ok(pins) => submit(descriptor.pinned_by(Arc::new(Pins { variable, ..pins }))),
            Err(unpinned) => self.without_pins(descriptor, unpinned),
        }
    }

    fn pin_whole(&self, request: &Request<'_>) -> Result<Pins, Unpinned> {
        let Request { operation, source, target, length, .. } = *request;
        let is_host = |kind| kind == MemoryKind::Host;
        if request.is_host_only() && request.overlaps() {
            // Both are in one stretch: pinned one after the other, the second would replace the
            // first in the cache.
            let start = source.min(target);
            let lease = self.pin(start, source.max(target) + length - start, Access::Write)?;
            let lease = Some(Arc::new(lease));
            return Ok(Pins { source: lease.clone(), target: lease, variable: None });
        }
        let mut pins = Pins::default();
        if let Some(access) = operation.source_access().filter(|_| is_host(request.source_memory)) {
            pins.source = Some(Arc::new(self.pin(source, length, access)?));
        }
        if is_host(request.target_memory) {
            pins.target = Some(Arc::new(self.pin(target, length, operation.target_access())?));
        }
        Ok(pins)
    }

    /// Pins, or finds pinned. Counts and traces what is refused.
    fn pin(&self, address: u64, length: u64, access: Access) -> Result<Lease, Unpinned> {
        if self.is_forked() {
            // The engine is the parent's, and so is what it pins.
            return Err(Unpinned::Refused);
        }
        let error = match self.acquire(address as usize, length as usize, access) {
            Ok(lease) => return Ok(lease),
            Err(error) => error,
        };
        if let PinError::BadMemory { .. } = error {
            return Err(Unpinned::Missing { address: first_missing(address, length) });
        }
        let engine = &self.engine;
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(engine, %error, "memory cannot be pinned: the processor copies instead");
        } else {
            tracing::debug!(engine, %error, "memory cannot be pinned");
        }
        *lock(&self.last_refusal) = Some(error);
        Err(Unpinned::Refused)
    }

    /// What becomes of a descriptor whose memory is not pinned.
    pub(crate) fn without_pins(&self, descriptor: Descriptor, unpinned: Unpinned) -> Order {
        match unpinned {
            Unpinned::Missing { address } => {
                Order::failed(descriptor, ExecutionError::BadMemory { address, done_bytes: 0 })
            }
            Unpinned::Refused if descriptor.is_host_only() => {
                self.refused_bytes.fetch_add(descriptor.length(), Ordering::Relaxed);
                Order::here(descriptor)
            }
            Unpinned::Refused => {
                let reason = "memory could not be pinned, and no processor reaches the other side";
                Order::failed(descriptor, ExecutionError::Engine { done_bytes: 0, reason })
            }
        }
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

/// The first address of a range at which nothing is mapped; where everything is, its first: then it
/// is the protection that forbids the access.
fn first_missing(address: u64, length: u64) -> u64 {
    let page = page_bytes() as u64;
    let first = address & !(page - 1);
    let pages = (first..address + length).step_by(page_bytes());
    let missing = pages.into_iter().find(|at| !residency::is_mapped(*at as usize, page_bytes()));
    missing.map_or(address, |at| at.max(address))
}
