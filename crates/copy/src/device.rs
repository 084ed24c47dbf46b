//! Memory of a GPU in the calls of a ferry, and ordinary memory that is made ready for it.

use std::sync::Arc;

use memferry_engine::MemoryKind;
use memferry_engine::cuda::{CudaEngine, DeviceMemory};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::PinError;

use crate::error::{Error, ValidationError};
use crate::ferry::Ferry;
use crate::request::Request;

/// Ordinary memory that stays registered with the engines until this is dropped.
#[derive(Debug)]
pub struct Region {
    /// What was registered part by part.
    leases: Vec<Lease>,
    /// The engines with which it is registered.
    engines: Vec<usize>,
    ferry: Ferry,
    address: usize,
    length: usize,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.leases.clear();
        // In a forked child engines are the parent's, and so are locks that were held at the fork.
        if self.ferry.inner.waiting.is_forked() {
            return;
        }
        for index in &self.engines {
            let open = &self.ferry.inner.engines[*index];
            if let Some(registration) = &open.registration {
                registration.withdraw(self.address, self.length);
            }
            if let Some(registry) = open.engine.registry() {
                registry.unregister(self.address, self.length);
            }
        }
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

    /// Takes memory for known from its first use on: engines that register memory keep it registered,
    /// part by part as it is used, without watching what becomes of it.
    ///
    /// # Safety
    /// The memory must be [forgotten](Ferry::forget) before it is unmapped, or engines go on with the
    /// old pages when other memory is mapped at its place. Nobody else who uses CUDA in this process may
    /// copy it meanwhile: the driver would refuse what crosses the edge of a part.
    /// [`Ferry::register`] has no such condition.
    pub unsafe fn promise_to_forget(&self, address: *const u8, length: usize) {
        if self.inner.waiting.is_forked() {
            return;
        }
        for open in &self.inner.engines {
            if let Some(registration) = &open.registration {
                // SAFETY: passed on.
                unsafe { registration.promise(address as usize, length) };
            }
            if let Some(registry) = open.engine.registry() {
                // SAFETY: passed on.
                unsafe { registry.promise(address as usize, length) };
            }
        }
    }

    /// Registers memory with the engines that copy registered memory quicker, or only such, and keeps it
    /// registered until the region is dropped. Copies are quickest from the first on then. Without this
    /// call no memory of the program is registered with a GPU, unless
    /// [the program says](crate::Builder::sole_cuda_user) that nobody else uses CUDA.
    ///
    /// A GPU's driver is given exactly these bytes, in one piece: others who use CUDA can copy them, or a
    /// part of them, as they can copy memory beside them; a copy of theirs that reaches over the edge is
    /// refused by the driver. So register what is copied together as one range, best on pages of its own.
    /// Memory may be registered several times, and ranges may share a page or lie inside each other; a
    /// range that overlaps another otherwise is refused. Memory that CUDA has pinned or registered already
    /// is used as it is.
    ///
    /// # Safety
    /// The memory must stay mapped until the region is dropped, and until copies of it are over.
    pub unsafe fn register(&self, address: *const u8, length: usize) -> Result<Region, PinError> {
        let (leases, engines) = (Vec::new(), Vec::new());
        let (ferry, address) = (self.clone(), address as usize);
        // Undone by the region when it is dropped, also if it is dropped here.
        let mut region = Region { leases, engines, ferry, address, length };
        for (index, open) in self.inner.engines.iter().enumerate() {
            if let Some(registration) = &open.registration {
                // SAFETY: passed on; the region withdraws it when it is dropped.
                unsafe { registration.hold(address, length) };
                region.engines.push(index);
            }
            if let Some(registry) = open.engine.registry() {
                // SAFETY: passed on; the region unregisters it when it is dropped.
                region.leases.extend(unsafe { registry.register(address, length)? });
                region.engines.push(index);
            }
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
