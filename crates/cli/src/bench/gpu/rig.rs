//! Everything that copies are made with, the copies themselves, and the look whether all bytes have
//! arrived.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use memferry::sys::pages::Pages;
use memferry::{CudaEngine, DeviceMemory, Ferry, Options, Request, Transfer};

use super::cases::{Direction, PageSize, Way};
use super::memory::{self, Host, SPOILT};
use super::peer::Peer;
use crate::bench::measure::memcpy;

/// A ferry with a GPU, the driver beside it, and memory of the device.
pub(super) struct Rig {
    device: DeviceMemory,
    peer: Peer,
    /// What every copy moves.
    pattern: Pages,
    /// Where the device's memory is read back to.
    scratch: Pages,
    /// Last, so that it goes when the device's memory is given back.
    pub(super) ferry: Ferry,
}

impl Rig {
    /// For copies of up to so many bytes.
    pub(super) fn new(
        ferry: Ferry,
        gpu: &Arc<CudaEngine>,
        peer: Peer,
        most_bytes: usize,
    ) -> anyhow::Result<Self> {
        let device = gpu.allocate(most_bytes).context("the GPU has no memory to spare")?;
        let (pattern, scratch) = (memory::pattern(most_bytes)?, Pages::huge(most_bytes)?);
        let mut rig = Self { device, peer, pattern, scratch, ferry };
        rig.settle()?;
        Ok(rig)
    }

    /// Lets every channel of the ferry take what it takes with its first copies.
    fn settle(&mut self) -> anyhow::Result<()> {
        const BYTES: usize = 64 << 20;
        const COPIES: usize = 16;
        for direction in Direction::ALL {
            for _ in 0..2 {
                let mut host =
                    self.fresh(direction, PageSize::Small, BYTES.min(self.most_bytes()))?;
                for _ in 0..COPIES {
                    self.perform(Way::Ferry, &mut host)?;
                }
                host.retire(&self.ferry);
            }
        }
        Ok(())
    }

    /// How many bytes a copy may have at most.
    pub(super) fn most_bytes(&self) -> usize {
        self.pattern.len()
    }

    /// Memory that is newly mapped and written.
    pub(super) fn fresh(
        &self,
        direction: Direction,
        pages: PageSize,
        bytes: usize,
    ) -> anyhow::Result<Host> {
        Host::new(direction, pages, &self.pattern.as_slice()[..bytes])
    }

    /// Puts the pattern to where it is copied from, if that is not ordinary memory.
    pub(super) fn prepare(&mut self, direction: Direction, bytes: usize) -> anyhow::Result<()> {
        let pattern = &self.pattern.as_slice()[..bytes];
        match direction {
            Direction::HostToHost => {}
            // Without pinned memory its copies say so.
            Direction::ToDevice => {
                if let Ok(pinned) = self.peer.pinned(bytes) {
                    memory::write(pinned, Some(pattern));
                }
            }
            Direction::FromDevice => {
                self.peer.copy_in(pattern, &mut self.device)?;
                // The driver may return while the last bytes are on their way to the device. What
                // it reads comes after them.
                self.peer.copy_out(&self.device, &mut [0])?;
            }
        }
        Ok(())
    }

    /// Makes one copy.
    pub(super) fn perform(&mut self, way: Way, host: &mut Host) -> anyhow::Result<()> {
        let bytes = host.bytes();
        match (host, way) {
            (Host::Pair { source, target }, way) => {
                let (source, target) = (source.as_slice(), target.as_mut_slice());
                match way {
                    Way::Ferry => {
                        let sparing = Options::new().spare_caller();
                        self.ferry.copy_with(source, target, sparing)?;
                    }
                    Way::FerryHelped => self.ferry.copy(source, target)?,
                    Way::Memcpy => memcpy(target, source),
                    Way::Driver => self.peer.host_to_host(source, target)?,
                    Way::Pinned => bail!("no such copy"),
                }
            }
            (Host::Source(source), way) => match way {
                Way::Ferry => {
                    self.ferry.copy_to_device(source.as_slice(), &mut self.device, 0)?;
                }
                Way::Driver => self.peer.copy_in(source.as_slice(), &mut self.device)?,
                Way::Pinned => self.peer.pinned_in(&mut self.device, bytes)?,
                Way::FerryHelped | Way::Memcpy => bail!("no such copy"),
            },
            (Host::Target(target), way) => match way {
                Way::Ferry => {
                    self.ferry.copy_from_device(&self.device, 0, target.as_mut_slice())?;
                }
                Way::Driver => self.peer.copy_out(&self.device, target.as_mut_slice())?,
                Way::Pinned => self.peer.pinned_out(&self.device, bytes)?,
                Way::FerryHelped | Way::Memcpy => bail!("no such copy"),
            },
        }
        Ok(())
    }

    /// Starts a copy between ordinary memory that spares the caller's core.
    ///
    /// # Safety
    /// Neither piece of memory may be touched or unmapped before the transfer is over.
    pub(super) unsafe fn start(&self, source: &Pages, target: &Pages) -> anyhow::Result<Transfer> {
        ensure!(source.len() == target.len(), "both must be of one length");
        let request = Request::copy(source.as_ptr(), target.as_ptr(), target.len())
            .with(Options::new().spare_caller());
        // SAFETY: passed on.
        Ok(unsafe { self.ferry.start(request) }?)
    }

    /// Makes what a copy has to write wrong, so that it is seen whether it writes everything.
    pub(super) fn spoil(&mut self, way: Way, host: &mut Host) -> anyhow::Result<()> {
        let bytes = host.bytes();
        match host {
            Host::Source(_) => self.peer.clear(&mut self.device, bytes)?,
            Host::Target(_) if way == Way::Pinned => self.peer.pinned(bytes)?.fill(SPOILT),
            Host::Pair { target, .. } | Host::Target(target) => target.as_mut_slice().fill(SPOILT),
        }
        Ok(())
    }

    /// Looks whether every byte has arrived.
    pub(super) fn verify(&mut self, way: Way, host: &Host) -> anyhow::Result<()> {
        let bytes = host.bytes();
        let arrived = match host {
            Host::Source(_) => {
                let scratch = &mut self.scratch.as_mut_slice()[..bytes];
                scratch.fill(SPOILT);
                self.peer.copy_out(&self.device, scratch)?;
                scratch
            }
            Host::Target(_) if way == Way::Pinned => self.peer.pinned(bytes)?,
            Host::Pair { target, .. } | Host::Target(target) => target.as_slice(),
        };
        let expected = &self.pattern.as_slice()[..bytes];
        if arrived != expected {
            let place = arrived.iter().zip(expected).position(|(is, should)| is != should);
            bail!("a byte is wrong: the first at {}", place.unwrap_or(bytes));
        }
        Ok(())
    }
}
