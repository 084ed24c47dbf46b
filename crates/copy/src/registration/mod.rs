//! Pinned memory for engines whose submitter registers it.
//!
//! Each such engine has a registration cache on top of its pinner. Before a descriptor is submitted,
//! its memory is pinned or found in the cache, and the descriptor holds the leases until it is
//! dropped. The processor copies memory that cannot be pinned, and the fallback is counted.

mod pipeline;

use std::sync::Arc;

use memferry_engine::completion::{ChannelBatch, PendingNotification};
use memferry_engine::contract::{DescriptorLeases, RegistrationMode as Needs};
use memferry_engine::{Descriptor, Engine, ExecutionError, MemoryKind, Opcode};
use memferry_memory::pin_cache::{Lease, PinCacheLimits};
use memferry_memory::pinning::{Access, PinError};
use memferry_memory::registration::{RegistrationCache, RegistrationError, first_unmapped};

pub(crate) use pipeline::{PipelinedRegistration, is_pinned_at_once};

use crate::error::BuildError;
use crate::request::Request;
use memferry_sys::stats::{self, kinds::Fallback};

/// The pinned memory of one engine.
#[derive(Debug)]
pub(crate) struct EngineRegistrations {
    cache: RegistrationCache,
    /// Whether the engine writes notification variables.
    writes_notifications: bool,
}

impl EngineRegistrations {
    /// Creates the registration cache of an engine; returns `None` if its submitter registers
    /// nothing.
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
        let cache = RegistrationCache::exclusive(pinner, limits)
            .map_err(|error| BuildError::Pinning { engine: engine.name().into(), error })?;
        Ok(Some(Self { cache, writes_notifications: capabilities.writes_notifications }))
    }

    /// The registration cache.
    pub(crate) fn cache(&self) -> &RegistrationCache {
        &self.cache
    }

    /// Pins a notification variable if the engine writes such variables. If pinning fails, the
    /// processor writes the variable.
    pub(crate) fn notification_lease(
        &self,
        notify: Option<&PendingNotification>,
    ) -> Option<Arc<Lease>> {
        let address = notify.filter(|_| self.writes_notifications)?.address();
        let bytes = size_of::<u64>() as u64;
        self.cache.acquire_optional(address, bytes, Access::Write).map(Arc::new)
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

    /// Returns shared leases of a source and a target: where both are pinned, one look at the kernel's
    /// events is enough for them.
    pub(crate) fn lease_both(
        &self,
        ranges: [(u64, u64, Access); 2],
    ) -> Result<[Arc<Lease>; 2], RegistrationError> {
        if let Some(found) = self.cache.find_both(ranges) {
            return Ok(found.map(Arc::new));
        }
        let [source, target] =
            ranges.map(|(address, length, access)| self.lease(address, length, access));
        Ok([source?, target?])
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
        let Request { operation, source, target, second, length, .. } = *request;
        let is_host = |kind| kind == MemoryKind::Host;
        if request.is_host_only() && request.overlaps() && operation != Opcode::Crc {
            // One lease covers both ranges: if they were pinned one after the other, the second pin
            // would replace the first one in the cache.
            let start = source.min(target);
            let access = operation.target_access().unwrap_or(Access::Read);
            let lease = self.pin(start, source.max(target) + length - start, access)?;
            let lease = Some(Arc::new(lease));
            let leases = DescriptorLeases::default();
            return Ok(DescriptorLeases { source: lease.clone(), target: lease, ..leases });
        }
        let access_from = operation.source_access().filter(|_| is_host(request.source_memory));
        let access_to = operation.target_access().filter(|_| is_host(request.target_memory));
        let mut pins = DescriptorLeases::default();
        if let (Some(from), Some(to)) = (access_from, access_to) {
            let both = self.lease_both([(source, length, from), (target, length, to)])?;
            [pins.source, pins.target] = both.map(Some);
        } else {
            pins.source = access_from.map(|from| self.lease(source, length, from)).transpose()?;
            pins.target = access_to.map(|to| self.lease(target, length, to)).transpose()?;
        }
        if let Some(to) = access_to.filter(|_| operation == Opcode::Dualcast) {
            pins.second = Some(self.lease(second, length, to)?);
        }
        Ok(pins)
    }

    /// Pins memory, or finds it in the cache. A failure is counted and logged.
    fn pin(&self, address: u64, length: u64, access: Access) -> Result<Lease, RegistrationError> {
        self.cache.acquire(address, length, access).map_err(|error| match error {
            PinError::BadMemory { .. } => {
                RegistrationError::Unmapped { address: first_unmapped(address, length) }
            }
            _ => RegistrationError::Refused,
        })
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
                self.cache.count_fallback(descriptor.length());
                stats::thread(|counters| counters.fall_back(Fallback::Unpinned));
                ChannelBatch::inline(descriptor)
            }
            RegistrationError::Refused => {
                let reason =
                    "memory could not be pinned, and the processor cannot access the other memory";
                ChannelBatch::failed(descriptor, ExecutionError::Engine { done_bytes: 0, reason })
            }
        }
    }
}
