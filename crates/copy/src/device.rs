//! Memory of a GPU in the calls of a ferry, and ordinary memory that is made ready for it.

use std::sync::Arc;

use memferry_engine::MemoryKind;
use memferry_engine::cuda::{CudaEngine, DeviceMemory};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, PinError};

use crate::error::{Error, ValidationError};
use crate::ferry::Ferry;
use crate::request::Request;

/// Ordinary memory that stays registered with an engine until this is dropped.
#[derive(Debug)]
pub struct Region {
    leases: Vec<Lease>,
    ferry: Ferry,
    address: *const u8,
    length: usize,
}

// SAFETY: the address is only a name here: nothing is read or written through it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        self.leases.clear();
        self.ferry.withdraw(self.address as usize, self.length);
    }
}

impl Ferry {
    /// The GPU that the builder opened, to take memory of it.
    pub fn gpu(&self) -> Option<&Arc<CudaEngine>> {
        self.inner.gpu.as_ref()
    }

    /// What kind of memory an address is of: the device's if an engine knows it as such.
    pub fn memory_kind(&self, address: *const u8) -> MemoryKind {
        let kinds = self.inner.engines.iter().filter_map(|o| o.engine.kind_of(address as u64));
        kinds.into_iter().next().unwrap_or(MemoryKind::Host)
    }

    /// Copies to a GPU, from `offset` on in its memory, and returns when it is done.
    pub fn copy_to_device(
        &self,
        source: &[u8],
        target: &mut DeviceMemory,
        offset: usize,
    ) -> Result<(), Error> {
        check_inside(target, offset, source.len())?;
        let to = target.as_ptr().wrapping_add(offset);
        let request = Request::copy(source.as_ptr(), to, source.len())
            .memory(MemoryKind::Host, MemoryKind::Device);
        // SAFETY: both are borrowed until this returns, which is after the end; the range lies
        // inside the memory.
        unsafe { self.run(request) }.map(|_| ())
    }

    /// Copies from a GPU, from `offset` on in its memory, and returns when it is done.
    pub fn copy_from_device(
        &self,
        source: &DeviceMemory,
        offset: usize,
        target: &mut [u8],
    ) -> Result<(), Error> {
        check_inside(source, offset, target.len())?;
        let from = source.as_ptr().wrapping_add(offset);
        let request = Request::copy(from, target.as_mut_ptr(), target.len())
            .memory(MemoryKind::Device, MemoryKind::Host);
        // SAFETY: as above.
        unsafe { self.run(request) }.map(|_| ())
    }

    /// Takes memory for known from its first use on: engines that register memory keep it registered
    /// without watching what becomes of it.
    ///
    /// # Safety
    /// The memory must be [forgotten](Ferry::forget) before it is unmapped, or engines go on with the
    /// old pages when other memory is mapped at its place.
    pub unsafe fn promise_to_forget(&self, address: *const u8, length: usize) {
        if self.inner.waiting.is_forked() {
            return;
        }
        for open in &self.inner.engines {
            if let Some(registration) = &open.registration {
                registration.promise(address as usize, length);
            }
            if let Some(registry) = open.engine.registry() {
                registry.promise(address as usize, length);
            }
        }
    }

    /// Promises that memory stays mapped until this is withdrawn as often.
    fn hold(&self, address: usize, length: usize) {
        for open in &self.inner.engines {
            if let Some(registration) = &open.registration {
                registration.hold(address, length);
            }
            if let Some(registry) = open.engine.registry() {
                registry.hold(address, length);
            }
        }
    }

    fn withdraw(&self, address: usize, length: usize) {
        // In a forked child engines are the parent's, and so are locks that were held at the fork.
        if self.inner.waiting.is_forked() {
            return;
        }
        for open in &self.inner.engines {
            if let Some(registration) = &open.registration {
                registration.withdraw(address, length);
            }
            if let Some(registry) = open.engine.registry() {
                registry.withdraw(address, length);
            }
        }
    }

    /// Registers memory with the engines that would register it anyway, sooner or later, and keeps
    /// it so until the region is dropped. Copies are quickest from the first on then. Memory may be
    /// registered several times, and regions may share pages: each counts for itself.
    ///
    /// # Safety
    /// The memory must stay mapped until the region is dropped.
    pub unsafe fn register(&self, address: *const u8, length: usize) -> Result<Region, PinError> {
        // Withdrawn by the region when it is dropped, also if it is dropped here.
        self.hold(address as usize, length);
        let mut region = Region { leases: Vec::new(), ferry: self.clone(), address, length };
        for registry in self.inner.engines.iter().filter_map(|open| open.engine.registry()) {
            let register = |access| registry.acquire(address as u64, length as u64, access);
            region.leases.push(register(Access::Write).or_else(|error| match error {
                PinError::BadMemory { .. } => Err(error),
                _ => register(Access::Read),
            })?);
        }
        Ok(region)
    }
}

fn check_inside(
    memory: &DeviceMemory,
    offset: usize,
    length: usize,
) -> Result<(), ValidationError> {
    let (from, to) = (offset as u64, offset.saturating_add(length) as u64);
    let length = memory.len() as u64;
    if to <= length { Ok(()) } else { Err(ValidationError::OutOfRange { from, to, length }) }
}
