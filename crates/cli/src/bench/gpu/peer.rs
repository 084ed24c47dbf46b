//! The driver's own calls, one at a time, as a program makes them that goes without a ferry.

use std::hint::spin_loop;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use memferry::DeviceMemory;
use memferry_sys::cuda::{Cuda, Driver, DriverError, Event, Stream, Way};

/// The driver of the device, for one thread, with memory that it pinned.
pub(super) struct Peer {
    driver: Arc<dyn Driver>,
    /// The driver of this machine, if it is that: it has one call more.
    cuda: Option<Arc<Cuda>>,
    stream: Stream,
    event: Event,
    pinned: Result<Pinned, DriverError>,
}

struct Pinned {
    address: u64,
    bytes: usize,
}

impl Peer {
    /// For the calling thread alone.
    pub(super) fn new(
        driver: Arc<dyn Driver>,
        cuda: Option<Arc<Cuda>>,
        pinned_bytes: usize,
    ) -> anyhow::Result<Self> {
        driver.enter()?;
        let stream = driver.create_stream()?;
        let event = driver.create_event().inspect_err(|_| driver.destroy_stream(stream))?;
        let pinned = driver.allocate_pinned(pinned_bytes);
        let pinned = pinned.map(|address| Pinned { address, bytes: pinned_bytes });
        Ok(Self { driver, cuda, stream, event, pinned })
    }

    /// The memory that the driver pinned.
    pub(super) fn pinned(&mut self, bytes: usize) -> anyhow::Result<&mut [u8]> {
        let address = self.pinned_address(bytes)?;
        // SAFETY: so many bytes are there, and they are this peer's alone: every copy that it
        // starts is over when its method returns.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }

    fn pinned_address(&self, bytes: usize) -> anyhow::Result<u64> {
        match &self.pinned {
            Ok(pinned) if bytes <= pinned.bytes => Ok(pinned.address),
            Ok(pinned) => Err(anyhow!("only {} bytes are pinned", pinned.bytes)),
            Err(error) => Err(*error).context("no memory could be pinned"),
        }
    }

    /// From pageable memory.
    pub(super) fn copy_in(&self, source: &[u8], target: &mut DeviceMemory) -> anyhow::Result<()> {
        check(target, source.len())?;
        let (from, to) = (source.as_ptr() as u64, target.address());
        // SAFETY: both are borrowed until this returns, when the copy is over, and large enough.
        Ok(unsafe { self.driver.copy_now(Way::In, from, to, source.len()) }?)
    }

    /// To pageable memory.
    pub(super) fn copy_out(&self, source: &DeviceMemory, target: &mut [u8]) -> anyhow::Result<()> {
        check(source, target.len())?;
        let (from, to) = (source.address(), target.as_mut_ptr() as u64);
        // SAFETY: as above.
        Ok(unsafe { self.driver.copy_now(Way::Out, from, to, target.len()) }?)
    }

    /// From pinned memory, by one asynchronous copy that is waited for.
    pub(super) fn pinned_in(&self, target: &mut DeviceMemory, bytes: usize) -> anyhow::Result<()> {
        check(target, bytes)?;
        let from = self.pinned_address(bytes)?;
        // SAFETY: both are large enough, the target is borrowed and the pinned memory is nobody
        // else's until this returns, after the copy.
        unsafe { self.driver.copy(Way::In, from, target.address(), bytes, self.stream) }?;
        self.wait()
    }

    /// To pinned memory, likewise.
    pub(super) fn pinned_out(&mut self, source: &DeviceMemory, bytes: usize) -> anyhow::Result<()> {
        check(source, bytes)?;
        let to = self.pinned_address(bytes)?;
        // SAFETY: as above.
        unsafe { self.driver.copy(Way::Out, source.address(), to, bytes, self.stream) }?;
        self.wait()
    }

    /// Between ordinary memory, registered or not: an asynchronous copy, and waiting for its stream.
    pub(super) fn host_to_host(&self, source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
        let cuda = self.cuda.as_ref().context("this driver has no such call")?;
        anyhow::ensure!(source.len() == target.len(), "both must be of one length");
        let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
        // SAFETY: both are ordinary memory, borrowed until this returns, after everything in the
        // stream is over.
        let copied = unsafe { cuda.copy_host(from, to, source.len(), self.stream) };
        self.driver.drain(self.stream);
        Ok(copied?)
    }

    /// Sets memory of the device to zero.
    pub(super) fn clear(&self, target: &mut DeviceMemory, bytes: usize) -> anyhow::Result<()> {
        check(target, bytes)?;
        // SAFETY: the memory is borrowed until this returns, after the stream has passed it.
        unsafe { self.driver.fill(target.address(), 0, bytes, self.stream) }?;
        self.wait()
    }

    /// Waits until everything in the stream is over, by asking again and again.
    fn wait(&self) -> anyhow::Result<()> {
        let ask = || {
            self.driver.record(self.event, self.stream)?;
            while !self.driver.is_reached(self.event)? {
                spin_loop();
            }
            Ok::<_, DriverError>(())
        };
        // Whatever went wrong, memory that a copy may use is not given back before its end.
        Ok(ask().inspect_err(|_| self.driver.drain(self.stream))?)
    }
}

fn check(memory: &DeviceMemory, bytes: usize) -> anyhow::Result<()> {
    anyhow::ensure!(bytes <= memory.len(), "{bytes} bytes are more than the device's memory has");
    Ok(())
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.driver.destroy_event(self.event);
        self.driver.destroy_stream(self.stream);
        if let Ok(pinned) = &self.pinned {
            // SAFETY: from the matching call; every copy was waited for.
            unsafe { self.driver.free_pinned(pinned.address) };
        }
    }
}
