//! GPU memory in the calls of a ferry, and registration of host memory.

use std::any::Any;
use std::sync::Arc;

use bytemuck::Pod;
use memferry_engine::contract::{CopyDirection, DeviceAllocator, DeviceStream};
use memferry_engine::{DeviceBuffer, Engine, Kernel, MemoryKind, Opcode};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::PinError;

use crate::error::{Error, ValidationError};
use crate::ferry::Ferry;
use crate::plan::{CopyPlan, CopyQuery, CopyReason, CopyStrategy};
use crate::request::Request;

/// Host memory that stays registered with the engines until the region is dropped.
///
/// ```
/// use memferry::Ferry;
///
/// let (ferry, memory) = (Ferry::new()?, vec![0u8; 1 << 20]);
/// // SAFETY: the memory outlives the region and its copies.
/// let region = unsafe { ferry.register(memory.as_ptr(), memory.len()) }?;
/// // ... copies of the memory ...
/// drop(region);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Region {
    /// The leases of the ranges that the engines registered.
    leases: Vec<Lease>,
    /// The indices of the engines with which the range is registered.
    engines: Vec<usize>,
    ferry: Ferry,
    address: usize,
    length: usize,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.leases.clear();
        // In a forked child, the engines and the locks held at the fork belong to the parent.
        if self.ferry.core.wait_config.is_forked() {
            return;
        }
        for index in &self.engines {
            let open = &self.ferry.core.engines[*index];
            if let Some(registrations) = open.registration_cache() {
                registrations.unregister(self.address, self.length);
            }
        }
    }
}

impl Ferry {
    /// Returns the first engine of this type, such as the GPU that the builder opened.
    ///
    /// ```
    /// use memferry::{CudaEngine, Ferry};
    ///
    /// let gpu = Ferry::new()?.engine_as::<CudaEngine>();
    /// println!("{:?}", gpu.map(|gpu| gpu.info().name.clone()));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn engine_as<E: Engine>(&self) -> Option<Arc<E>> {
        self.core.engines.iter().find_map(|open| {
            let engine: Arc<dyn Any + Send + Sync> = open.engine.clone();
            engine.downcast().ok()
        })
    }

    /// Returns the allocator of device memory of the first engine that has one.
    pub fn device_allocator(&self) -> Option<&dyn DeviceAllocator> {
        self.core.engines.iter().find_map(|open| open.engine.device_allocator())
    }

    /// Opens a queue of the device of the first engine that has one, for the calling thread.
    #[doc(hidden)]
    pub fn open_stream(&self) -> Option<Box<dyn DeviceStream>> {
        if self.core.wait_config.is_forked() {
            return None;
        }
        self.core.engines.iter().find_map(|open| open.engine.open_stream())
    }

    /// Lets an engine make a plain copy between host and device memory on the calling thread, if
    /// that is faster than a channel: short copies are.
    ///
    /// # Safety
    /// As for [`Ferry::run_raw`].
    pub(crate) unsafe fn copy_by_caller(&self, request: &Request<'_>) -> Option<Result<(), Error>> {
        let (source, target) = (request.source_memory, request.target_memory);
        if source == target {
            return None;
        }
        let direction = CopyDirection { source, target };
        let is_plain = request.operation == Opcode::Copy
            && request.length > 0
            && request.is_simple()
            && !request.options.no_caller_assist;
        if !is_plain || self.core.wait_config.is_forked() {
            return None;
        }
        let (source, target, bytes) = (request.source, request.target, request.length as usize);
        let device = if direction == CopyDirection::HOST_TO_DEVICE { target } else { source };
        self.core.engines.iter().filter(|open| open.engine.reaches(device)).find_map(|open| {
            // SAFETY: the caller upholds the contract.
            let done = unsafe { open.engine.copy_by_caller(direction, source, target, bytes) };
            done.map(|outcome| outcome.map_err(Error::from))
        })
    }

    /// Returns the plan of a copy that [`Ferry::copy_by_caller`] makes; `None` if a channel makes it.
    pub(crate) fn explain_caller(&self, query: &CopyQuery) -> Option<CopyPlan> {
        let (source, target) = (query.source_memory, query.target_memory);
        let is_plain = query.operation == Opcode::Copy && query.blocking && query.bytes > 0;
        if !is_plain || query.no_caller_assist || source == target {
            return None;
        }
        let direction = CopyDirection { source, target };
        let limits = self.core.engines.iter().map(|open| open.engine.max_caller_bytes(direction));
        let limit_bytes = limits.max().filter(|&limit| query.bytes <= limit)?;
        Some(CopyPlan {
            strategy: CopyStrategy::Inline,
            kernel: Kernel::Cached,
            transient: true,
            reason: CopyReason::ShortDeviceCopy { limit_bytes },
        })
    }

    /// Returns the kind of memory of an address: that of the first engine that recognises it, else
    /// host memory.
    pub fn memory_kind(&self, address: *const u8) -> MemoryKind {
        let kinds = self.core.engines.iter().filter_map(|o| o.engine.memory_kind(address as u64));
        kinds.into_iter().next().unwrap_or(MemoryKind::Host)
    }

    /// Copies to GPU memory, starting at byte `offset` in it, and returns when the copy is
    /// complete.
    pub fn copy_to_device<T: Pod>(
        &self,
        source: &[T],
        target: &mut DeviceBuffer,
        offset: usize,
    ) -> Result<(), Error> {
        check_inside(target, offset, size_of_val(source))?;
        let to = target.as_ptr().wrapping_add(offset);
        let request = Request::copy(source.as_ptr().cast(), to, size_of_val(source))
            .memory(MemoryKind::Host, MemoryKind::Device);
        // SAFETY: both buffers are borrowed until this call returns, after the transfer is
        // complete; the range lies inside the GPU memory.
        unsafe { self.run_raw(request) }.map(|_| ())
    }

    /// Copies from GPU memory, starting at byte `offset` in it, and returns when the copy is
    /// complete.
    pub fn copy_from_device<T: Pod>(
        &self,
        source: &DeviceBuffer,
        offset: usize,
        target: &mut [T],
    ) -> Result<(), Error> {
        check_inside(source, offset, size_of_val(target))?;
        let from = source.as_ptr().wrapping_add(offset);
        let request = Request::copy(from, target.as_mut_ptr().cast(), size_of_val(target))
            .memory(MemoryKind::Device, MemoryKind::Host);
        // SAFETY: as in `copy_to_device`; any bytes are valid elements.
        unsafe { self.run_raw(request) }.map(|_| ())
    }

    /// Marks memory as reused from its first use on: engines that register memory keep its ranges
    /// registered as they are used, without monitoring the mapping.
    ///
    /// # Safety
    /// The owner must [invalidate](Ferry::invalidate) the memory before it is unmapped; otherwise
    /// engines keep accessing the old pages when other memory is mapped at the same addresses.
    /// Other users of CUDA in this process must not copy the memory meanwhile: the driver would
    /// reject a copy that crosses the boundary of a registered range. [`Ferry::register`] has no
    /// such condition.
    pub unsafe fn mark_unmonitored(&self, address: *const u8, length: usize) {
        if self.core.wait_config.is_forked() {
            return;
        }
        for open in &self.core.engines {
            if let Some(registrations) = open.registration_cache() {
                // SAFETY: the caller upholds the contract.
                unsafe { registrations.mark_unmonitored(address as usize, length) };
            }
        }
    }

    /// Registers memory with the engines that copy registered memory faster, or that copy only
    /// registered memory, and keeps it registered until the region is dropped. Copies then run at
    /// full speed from the first one on. Without this call, no memory of the program is registered
    /// with a GPU, unless [the program declares](crate::FerryBuilder::sole_cuda_user) that it is
    /// the only user of CUDA.
    ///
    /// The GPU driver registers exactly these bytes as one range. Other users of CUDA can copy the
    /// range or a part of it, and the memory beside it; the driver rejects a copy of theirs that
    /// crosses the boundary. Register memory that is copied together as one range, preferably on
    /// its own pages. Memory may be registered several times, and ranges may share a page or be
    /// nested; a range that overlaps another in any other form is rejected. Memory that CUDA has
    /// already pinned or registered is used as it is.
    ///
    /// # Safety
    /// The memory must stay mapped until the region is dropped, and until all copies of it are
    /// complete.
    pub unsafe fn register(&self, address: *const u8, length: usize) -> Result<Region, PinError> {
        let (leases, engines) = (Vec::new(), Vec::new());
        let (ferry, address) = (self.clone(), address as usize);
        // Dropping the region undoes every registration, also on an early return from this
        // function.
        let mut region = Region { leases, engines, ferry, address, length };
        for (index, open) in self.core.engines.iter().enumerate() {
            if let Some(registrations) = open.registration_cache() {
                // SAFETY: the caller upholds the contract; the region unregisters the range when it
                // is dropped.
                region.leases.extend(unsafe { registrations.register(address, length)? });
                region.engines.push(index);
            }
        }
        Ok(region)
    }
}

fn check_inside(
    memory: &DeviceBuffer,
    offset: usize,
    length: usize,
) -> Result<(), ValidationError> {
    let (from, to) = (offset as u64, offset.saturating_add(length) as u64);
    let length = memory.len() as u64;
    if to <= length { Ok(()) } else { Err(ValidationError::OutOfRange { from, to, length }) }
}
