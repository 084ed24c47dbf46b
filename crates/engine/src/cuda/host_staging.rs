//! A pool of registered host buffers of equal size, which unregistered memory is copied through.

use std::sync::Arc;

use memferry_sys::cuda::CudaDriver;

/// The pool. Its memory is allocated at the first use at the latest, and freed on drop.
#[derive(Debug)]
pub(super) struct HostStagingPool {
    driver: Arc<dyn CudaDriver>,
    buffer_bytes: usize,
    count: usize,
    /// The memory, once it is allocated.
    base: Option<u64>,
    /// A stack: the buffer that was freed last is the likeliest to be in the cache.
    free: Vec<u64>,
    /// The allocation failed; it is not retried.
    is_unavailable: bool,
}

/// The result of an allocation from a staging area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StagingAlloc {
    /// The address of a buffer, which is in use now.
    Buffer(u64),
    /// All buffers are in use: one will be free later.
    Busy,
    /// There is no memory for buffers.
    Unavailable,
}

impl HostStagingPool {
    pub(super) fn new(driver: Arc<dyn CudaDriver>, buffer_bytes: usize, count: usize) -> Self {
        let (free, is_unavailable) = (Vec::new(), false);
        Self { driver, buffer_bytes, count, base: None, free, is_unavailable }
    }

    /// Allocates a buffer.
    pub(super) fn allocate(&mut self) -> StagingAlloc {
        self.prepare();
        if self.is_unavailable {
            return StagingAlloc::Unavailable;
        }
        self.free.pop().map_or(StagingAlloc::Busy, StagingAlloc::Buffer)
    }

    /// Allocates the memory, unless that was done or failed before.
    pub(super) fn prepare(&mut self) {
        if self.base.is_none() && !self.is_unavailable {
            match self.driver.allocate_pinned(self.buffer_bytes * self.count) {
                Ok(base) => {
                    self.base = Some(base);
                    let buffer = |index| base + (index * self.buffer_bytes) as u64;
                    self.free = (0..self.count).map(buffer).collect();
                }
                Err(error) => {
                    tracing::warn!(%error, "no pinned memory for staging buffers");
                    self.is_unavailable = true;
                }
            }
        }
    }

    /// Frees a buffer.
    pub(super) fn free(&mut self, buffer: u64) {
        self.free.push(buffer);
    }
}

impl Drop for HostStagingPool {
    fn drop(&mut self) {
        let Some(base) = self.base else { return };
        // SAFETY: it is from the matching call, and users of buffers waited for the device.
        unsafe { self.driver.free_pinned(base) };
    }
}
