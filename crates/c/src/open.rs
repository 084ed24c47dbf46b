//! The open library: the ferry, its GPU if one is in use, and the program's allocations and
//! registrations of that GPU. It detects the kind of memory of each request; without a GPU nothing
//! is queried.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use memferry::{CudaEngine, DeviceBuffer, Ferry, MemoryKind, Region, Request};
use memferry_sys::sync::lock;

use crate::code::{ADMA_EINVAL, ADMA_ENODEV, ADMA_EOPNOTSUPP, CallError};

/// The open library. Fields are dropped in their order: regions first, which refer to the ferry,
/// then the ferry, so that all copies are complete before the memory of the GPU is freed.
#[derive(Debug)]
pub(crate) struct LibraryState {
    /// Registered memory by address, one entry for each registration; `None` has no bytes.
    regions: Mutex<HashMap<usize, Vec<Option<Region>>>>,
    ferry: Ferry,
    gpu: Option<Arc<CudaEngine>>,
    /// Allocations of the program on the GPU, by address.
    memory: Mutex<HashMap<usize, DeviceBuffer>>,
}

impl LibraryState {
    pub(crate) fn new(ferry: Ferry) -> Self {
        let gpu = ferry.engine_as();
        Self { ferry, gpu, memory: Mutex::default(), regions: Mutex::default() }
    }

    pub(crate) fn ferry(&self) -> &Ferry {
        &self.ferry
    }

    /// The GPU, if one is in use.
    pub(crate) fn gpu(&self) -> Option<&CudaEngine> {
        self.gpu.as_deref()
    }

    /// A copy; the kind of memory is detected.
    #[inline]
    pub(crate) fn copy<'a>(
        &self,
        source: *const u8,
        target: *mut u8,
        length: usize,
    ) -> Request<'a> {
        self.located(Request::copy(source, target, length), source, target)
    }

    /// A fill, likewise.
    #[inline]
    pub(crate) fn fill<'a>(&self, target: *mut u8, value: u8, length: usize) -> Request<'a> {
        self.located(Request::fill(target, value, length), target, target)
    }

    /// A compare, likewise.
    #[inline]
    pub(crate) fn compare<'a>(
        &self,
        left: *const u8,
        right: *const u8,
        length: usize,
    ) -> Request<'a> {
        self.located(Request::compare(left, right, length), left, right)
    }

    /// Detects the kind of memory of a request.
    #[inline]
    fn located<'a>(
        &self,
        request: Request<'a>,
        source: *const u8,
        target: *const u8,
    ) -> Request<'a> {
        if self.gpu.is_none() {
            return request;
        }
        request.memory(self.ferry.memory_kind(source), self.ferry.memory_kind(target))
    }

    /// Rejects memory of the GPU, for calls that take ordinary memory alone.
    pub(crate) fn refuse_device_memory(
        &self,
        mut addresses: impl Iterator<Item = *const u8>,
    ) -> Result<(), CallError> {
        if self.gpu.is_none() {
            return Ok(());
        }
        match addresses.find(|address| self.ferry.memory_kind(*address) == MemoryKind::Device) {
            None => Ok(()),
            Some(address) => {
                let text = format!("{address:p} is memory of a GPU: copy it with adma_icopy");
                Err(CallError::new(ADMA_EOPNOTSUPP, text))
            }
        }
    }

    /// Allocates memory of the GPU. Zero bytes have a null address.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<*mut u8, CallError> {
        let gpu = self.gpu().ok_or_else(no_gpu)?;
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let memory = gpu.allocate(bytes)?;
        let address = memory.as_ptr();
        lock(&self.memory).insert(address as usize, memory);
        Ok(address)
    }

    /// Frees it.
    pub(crate) fn free(&self, address: *const u8) -> Result<(), CallError> {
        // Dropped after the lock is released: the driver is not called under it.
        let memory = lock(&self.memory).remove(&(address as usize));
        memory.map(drop).ok_or_else(|| not_of_the_gpu(address))
    }

    /// Registers memory; registrations are counted.
    pub(crate) fn register(&self, address: *const u8, length: usize) -> Result<(), CallError> {
        self.gpu().ok_or_else(no_gpu)?;
        // SAFETY: the C call requires that memory stays mapped until it is unregistered.
        let register = || unsafe { self.ferry.register(address, length) };
        let region = (length > 0).then(register).transpose()?;
        lock(&self.regions).entry(address as usize).or_default().push(region);
        Ok(())
    }

    /// Undoes the last registration that starts at an address.
    pub(crate) fn unregister(&self, address: *const u8) -> Result<(), CallError> {
        let mut regions = lock(&self.regions);
        let here = regions.get_mut(&(address as usize));
        let Some(region) = here.and_then(Vec::pop) else { return Err(not_registered(address)) };
        if regions.get(&(address as usize)).is_some_and(Vec::is_empty) {
            regions.remove(&(address as usize));
        }
        drop(regions);
        drop(region);
        Ok(())
    }
}

fn no_gpu() -> CallError {
    let text = "no GPU is in use: call adma_use_gpu before all other calls, or set MEMFERRY_GPU to \
                auto or to the number of a GPU; `memferry doctor` tells whether there is one";
    CallError::new(ADMA_ENODEV, text)
}

/// The error for memory that is no allocation of the GPU.
pub(crate) fn not_of_the_gpu(address: *const u8) -> CallError {
    let text = format!(
        "{address:p} is not what adma_device_alloc gave, or was freed since: by adma_device_free, \
         or by adma_fini"
    );
    CallError::new(ADMA_EINVAL, text)
}

/// The error for memory that is not registered.
pub(crate) fn not_registered(address: *const u8) -> CallError {
    let text = format!(
        "nothing that begins at {address:p} is registered: pass the address that adma_register \
         was given, once for each time"
    );
    CallError::new(ADMA_EINVAL, text)
}

#[cfg(test)]
mod tests;
