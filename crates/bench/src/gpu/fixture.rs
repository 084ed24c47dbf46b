//! Fixture of the GPU bench: ferry, driver and memory, the copies, and their verification.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use memferry::sys::pages::Pages;
use memferry::{CudaEngine, DeviceBuffer, Ferry, Options, Request, Transfer};

use super::cases::{CopyMethod, GpuCopyDirection, PageSize};
use super::memory::{self, HostBuffers, POISON};
use super::peer::DriverPeer;
use crate::harness::memcpy;

/// A ferry with a GPU, the driver for comparison, and device memory.
pub(super) struct GpuFixture {
    device: DeviceBuffer,
    peer: DriverPeer,
    /// Data that every copy moves.
    pattern: Pages,
    /// Buffer into which device memory is read back.
    scratch: Pages,
    /// Declared last, so that it is dropped after the device memory is freed.
    pub(super) ferry: Ferry,
}

impl GpuFixture {
    /// Creates a fixture for copies of up to `most_bytes`.
    pub(super) fn new(
        ferry: Ferry,
        gpu: &Arc<CudaEngine>,
        peer: DriverPeer,
        most_bytes: usize,
    ) -> anyhow::Result<Self> {
        let device = gpu.allocate(most_bytes).context("the GPU has no memory to spare")?;
        let (pattern, scratch) = (memory::pattern(most_bytes)?, Pages::huge(most_bytes)?);
        let mut rig = Self { device, peer, pattern, scratch, ferry };
        rig.warm_up()?;
        Ok(rig)
    }

    /// Makes first copies, so that every channel of the ferry allocates its resources before the
    /// measurement.
    fn warm_up(&mut self) -> anyhow::Result<()> {
        const BYTES: usize = 64 << 20;
        const COPIES: usize = 16;
        for direction in GpuCopyDirection::ALL {
            for _ in 0..2 {
                let mut host =
                    self.fresh_buffers(direction, PageSize::Small, BYTES.min(self.max_bytes()))?;
                for _ in 0..COPIES {
                    self.copy(CopyMethod::Ferry, &mut host)?;
                }
                host.unmap(&self.ferry);
            }
        }
        Ok(())
    }

    /// Maximum size of a copy in bytes.
    pub(super) fn max_bytes(&self) -> usize {
        self.pattern.len()
    }

    /// Maps and writes new memory.
    pub(super) fn fresh_buffers(
        &self,
        direction: GpuCopyDirection,
        pages: PageSize,
        bytes: usize,
    ) -> anyhow::Result<HostBuffers> {
        HostBuffers::new(direction, pages, &self.pattern.as_slice()[..bytes])
    }

    /// Writes the pattern to the source of the copies, if the source is device memory or pinned
    /// memory.
    pub(super) fn prepare(
        &mut self,
        direction: GpuCopyDirection,
        bytes: usize,
    ) -> anyhow::Result<()> {
        let pattern = &self.pattern.as_slice()[..bytes];
        match direction {
            GpuCopyDirection::HostToHost => {}
            // If pinned memory is unavailable, the copies of `Pinned` report it.
            GpuCopyDirection::ToDevice => {
                if let Ok(pinned) = self.peer.pinned(bytes) {
                    memory::write(pinned, Some(pattern));
                }
            }
            GpuCopyDirection::FromDevice => {
                self.peer.copy_to_device(pattern, &mut self.device)?;
                // The driver's call may return before the last bytes have reached the device. This
                // read is ordered after them.
                self.peer.copy_from_device(&self.device, &mut [0])?;
            }
        }
        Ok(())
    }

    /// Makes one copy.
    pub(super) fn copy(&mut self, way: CopyMethod, host: &mut HostBuffers) -> anyhow::Result<()> {
        let bytes = host.bytes();
        match (host, way) {
            (HostBuffers::Pair { source, target }, way) => {
                let (source, target) = (source.as_slice(), target.as_mut_slice());
                match way {
                    CopyMethod::Ferry => {
                        let sparing = Options::new().no_caller_assist();
                        self.ferry.copy_with(source, target, sparing)?;
                    }
                    CopyMethod::FerryHelped => self.ferry.copy(source, target)?,
                    CopyMethod::Memcpy => memcpy(target, source),
                    CopyMethod::Driver => self.peer.host_to_host(source, target)?,
                    CopyMethod::Pinned => bail!("no such copy"),
                }
            }
            (HostBuffers::Source(source), way) => match way {
                CopyMethod::Ferry => {
                    self.ferry.copy_to_device(source.as_slice(), &mut self.device, 0)?;
                }
                CopyMethod::Driver => {
                    self.peer.copy_to_device(source.as_slice(), &mut self.device)?;
                }
                CopyMethod::Pinned => self.peer.copy_pinned_to_device(&mut self.device, bytes)?,
                CopyMethod::FerryHelped | CopyMethod::Memcpy => bail!("no such copy"),
            },
            (HostBuffers::Target(target), way) => match way {
                CopyMethod::Ferry => {
                    self.ferry.copy_from_device(&self.device, 0, target.as_mut_slice())?;
                }
                CopyMethod::Driver => {
                    self.peer.copy_from_device(&self.device, target.as_mut_slice())?;
                }
                CopyMethod::Pinned => self.peer.copy_pinned_from_device(&self.device, bytes)?,
                CopyMethod::FerryHelped | CopyMethod::Memcpy => bail!("no such copy"),
            },
        }
        Ok(())
    }

    /// Starts a copy from host to host without caller assist.
    ///
    /// # Safety
    ///
    /// Neither range may be accessed or unmapped before the transfer is complete.
    pub(super) unsafe fn start(&self, source: &Pages, target: &Pages) -> anyhow::Result<Transfer> {
        ensure!(source.len() == target.len(), "both must be of one length");
        let request = Request::copy(source.as_ptr(), target.as_ptr(), target.len())
            .with(Options::new().no_caller_assist());
        // SAFETY: the caller guarantees it.
        Ok(unsafe { self.ferry.start_raw(request) }?)
    }

    /// Overwrites the target of a copy, so that the verification detects bytes that the copy does
    /// not write.
    pub(super) fn poison(&mut self, way: CopyMethod, host: &mut HostBuffers) -> anyhow::Result<()> {
        let bytes = host.bytes();
        match host {
            HostBuffers::Source(_) => self.peer.clear(&mut self.device, bytes)?,
            HostBuffers::Target(_) if way == CopyMethod::Pinned => {
                self.peer.pinned(bytes)?.fill(POISON);
            }
            HostBuffers::Pair { target, .. } | HostBuffers::Target(target) => {
                target.as_mut_slice().fill(POISON);
            }
        }
        Ok(())
    }

    /// Verifies that every byte has arrived.
    pub(super) fn verify(&mut self, way: CopyMethod, host: &HostBuffers) -> anyhow::Result<()> {
        let bytes = host.bytes();
        let arrived = match host {
            HostBuffers::Source(_) => {
                let scratch = &mut self.scratch.as_mut_slice()[..bytes];
                scratch.fill(POISON);
                self.peer.copy_from_device(&self.device, scratch)?;
                scratch
            }
            HostBuffers::Target(_) if way == CopyMethod::Pinned => self.peer.pinned(bytes)?,
            HostBuffers::Pair { target, .. } | HostBuffers::Target(target) => target.as_slice(),
        };
        let expected = &self.pattern.as_slice()[..bytes];
        if arrived != expected {
            let place = arrived.iter().zip(expected).position(|(is, should)| is != should);
            bail!("a byte is wrong: the first at {}", place.unwrap_or(bytes));
        }
        Ok(())
    }
}
