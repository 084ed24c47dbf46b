//! The driver's own calls, one at a time, as in a program without a ferry.

use std::hint::spin_loop;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use memferry::DeviceBuffer;
use memferry_sys::cuda::{Cuda, CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind};

/// The driver of the device, for one thread, with memory that it pinned.
pub(super) struct DriverPeer {
    driver: Arc<dyn CudaDriver>,
    /// The CUDA driver, if the peer is not a model: it has one more call.
    cuda: Option<Arc<Cuda>>,
    stream: CudaStream,
    event: CudaEvent,
    pinned: Result<PinnedBuffer, DriverError>,
}

struct PinnedBuffer {
    address: u64,
    bytes: usize,
}

impl DriverPeer {
    /// Creates a peer for the calling thread.
    pub(super) fn new(
        driver: Arc<dyn CudaDriver>,
        cuda: Option<Arc<Cuda>>,
        pinned_bytes: usize,
    ) -> anyhow::Result<Self> {
        driver.make_current()?;
        let stream = driver.create_stream()?;
        let event = driver.create_event().inspect_err(|_| driver.destroy_stream(stream))?;
        let pinned = driver.allocate_pinned(pinned_bytes);
        let pinned = pinned.map(|address| PinnedBuffer { address, bytes: pinned_bytes });
        Ok(Self { driver, cuda, stream, event, pinned })
    }

    /// Memory that the driver pinned.
    pub(super) fn pinned(&mut self, bytes: usize) -> anyhow::Result<&mut [u8]> {
        let address = self.pinned_address(bytes)?;
        // SAFETY: the allocation has at least `bytes` bytes, and only this peer uses it: every copy
        // that it starts is complete when its method returns.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }

    fn pinned_address(&self, bytes: usize) -> anyhow::Result<u64> {
        match &self.pinned {
            Ok(pinned) if bytes <= pinned.bytes => Ok(pinned.address),
            Ok(pinned) => Err(anyhow!("only {} bytes are pinned", pinned.bytes)),
            Err(error) => Err(*error).context("no memory could be pinned"),
        }
    }

    /// The driver's copy of pageable memory.
    ///
    /// # Safety
    /// As for [`CudaDriver::copy_sync`].
    unsafe fn copy_sync(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.driver.copy_sync(kind, source, target, bytes, self.stream) }
    }

    /// Copies from pageable memory to the device.
    pub(super) fn copy_to_device(
        &self,
        source: &[u8],
        target: &mut DeviceBuffer,
    ) -> anyhow::Result<()> {
        check(target, source.len())?;
        let (from, to) = (source.as_ptr() as u64, target.address());
        // SAFETY: both ranges are large enough and borrowed until this method returns, when the
        // copy is complete.
        Ok(unsafe { self.copy_sync(MemcpyKind::HostToDevice, from, to, source.len()) }?)
    }

    /// Copies from the device to pageable memory.
    pub(super) fn copy_from_device(
        &self,
        source: &DeviceBuffer,
        target: &mut [u8],
    ) -> anyhow::Result<()> {
        check(source, target.len())?;
        let (from, to) = (source.address(), target.as_mut_ptr() as u64);
        // SAFETY: as above.
        Ok(unsafe { self.copy_sync(MemcpyKind::DeviceToHost, from, to, target.len()) }?)
    }

    /// Copies from pinned memory to the device by one asynchronous copy, and waits for it.
    pub(super) fn copy_pinned_to_device(
        &self,
        target: &mut DeviceBuffer,
        bytes: usize,
    ) -> anyhow::Result<()> {
        check(target, bytes)?;
        let from = self.pinned_address(bytes)?;
        // SAFETY: both ranges are large enough; until this method returns, after the copy, the
        // target is borrowed and only this peer uses the pinned memory.
        unsafe {
            self.driver.copy(MemcpyKind::HostToDevice, from, target.address(), bytes, self.stream)
        }?;
        self.synchronize()
    }

    /// Copies from the device to pinned memory by one asynchronous copy, and waits for it.
    pub(super) fn copy_pinned_from_device(
        &mut self,
        source: &DeviceBuffer,
        bytes: usize,
    ) -> anyhow::Result<()> {
        check(source, bytes)?;
        let to = self.pinned_address(bytes)?;
        // SAFETY: as above.
        unsafe {
            self.driver.copy(MemcpyKind::DeviceToHost, source.address(), to, bytes, self.stream)
        }?;
        self.synchronize()
    }

    /// Copies from host to host, registered or not, by one asynchronous copy, and waits for its
    /// stream.
    pub(super) fn host_to_host(&self, source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
        let cuda = self.cuda.as_ref().context("this driver has no such call")?;
        anyhow::ensure!(source.len() == target.len(), "both must be of one length");
        let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
        // SAFETY: both are host memory, borrowed until this method returns, after everything in the
        // stream is complete.
        let copied = unsafe { cuda.copy_host(from, to, source.len(), self.stream) };
        self.driver.synchronize(self.stream);
        Ok(copied?)
    }

    /// Sets device memory to zero.
    pub(super) fn clear(&self, target: &mut DeviceBuffer, bytes: usize) -> anyhow::Result<()> {
        check(target, bytes)?;
        // SAFETY: the memory is borrowed until this method returns, after the stream has completed
        // the fill.
        unsafe { self.driver.fill(target.address(), 0, bytes, self.stream) }?;
        self.synchronize()
    }

    /// Polls until everything in the stream is complete.
    fn synchronize(&self) -> anyhow::Result<()> {
        let ask = || {
            self.driver.record_event(self.event, self.stream)?;
            while !self.driver.is_complete(self.event)? {
                spin_loop();
            }
            Ok::<_, DriverError>(())
        };
        // On an error, the driver still waits for the stream, so that no memory is freed while a
        // copy may use it.
        Ok(ask().inspect_err(|_| self.driver.synchronize(self.stream))?)
    }
}

fn check(memory: &DeviceBuffer, bytes: usize) -> anyhow::Result<()> {
    anyhow::ensure!(bytes <= memory.len(), "{bytes} bytes are more than the device's memory has");
    Ok(())
}

impl Drop for DriverPeer {
    fn drop(&mut self) {
        self.driver.destroy_event(self.event);
        self.driver.destroy_stream(self.stream);
        if let Ok(pinned) = &self.pinned {
            // SAFETY: the address is from the matching call, and every copy was waited for.
            unsafe { self.driver.free_pinned(pinned.address) };
        }
    }
}
