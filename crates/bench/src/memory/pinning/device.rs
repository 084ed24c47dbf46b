//! An asynchronous engine that may only copy pinned memory: a channel of the cpu engine, which gets
//! only pinned parts.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry::sys::pages::Pages;
use memferry::{Ferry, Options, Request, Transfer};
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::{Access, ChunkSchedule, PinError, PinPipeline, PinnedChunk, Pinner};

/// Method to pin memory for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PinMethod {
    /// In chunks of this schedule, for this copy alone.
    EachTime(ChunkSchedule),
    /// By the pin cache, which keeps the memory pinned between copies.
    Cached,
}

/// The engine, and the pin cache over the pinner of its memory.
pub(super) struct PinningDevice {
    ferry: Ferry,
    cache: PinCache,
}

/// A part that the engine is copying, with its pins.
struct InFlightCopy {
    transfer: Transfer,
    _pins: [PinnedChunk; 2],
}

/// Maximum number of parts in flight, as in a short queue of descriptors.
const MAX_IN_FLIGHT: usize = 64;

impl PinningDevice {
    pub(super) fn new(pinner: Arc<dyn Pinner>) -> anyhow::Result<Self> {
        let ferry = Ferry::builder().channels(1).build()?;
        let cache = PinCache::new(pinner, PinCacheLimits::default(), InvalidationMode::Automatic)?;
        Ok(Self { ferry, cache })
    }

    pub(super) fn pinner(&self) -> &Arc<dyn Pinner> {
        self.cache.pinner()
    }

    /// Copies `source` to `target`, including pinning and unpinning. Both have the same length.
    pub(super) fn copy(
        &self,
        way: PinMethod,
        source: &Pages,
        target: &mut Pages,
    ) -> Result<(), PinError> {
        assert_eq!(source.len(), target.len());
        match way {
            PinMethod::EachTime(schedule) => self.copy_pinning(schedule, source, target),
            PinMethod::Cached => self.copy_cached(source, target),
        }
    }

    fn copy_pinning(
        &self,
        schedule: ChunkSchedule,
        source: &Pages,
        target: &mut Pages,
    ) -> Result<(), PinError> {
        let pieces = |pages: &Pages, access| {
            let (address, length) = (pages.as_ptr() as usize, pages.len());
            PinPipeline::new(Arc::clone(self.pinner()), address, length, access, schedule)
        };
        let (sources, targets) = (pieces(source, Access::Read)?, pieces(target, Access::Write)?);
        let mut underway = VecDeque::new();
        let mut outcome = Ok(());
        for (source, target) in sources.zip(targets) {
            match (source, target) {
                (Ok(source), Ok(target)) => underway.push_back(self.start(source, target)),
                (Err(error), _) | (_, Err(error)) => {
                    outcome = Err(error);
                    break;
                }
            }
            // Complete parts are unpinned while the others are in flight.
            while let Some(first) = underway.front()
                && (first.transfer.is_done() || underway.len() == MAX_IN_FLIGHT)
            {
                finish(underway.pop_front().expect("there is one"));
            }
        }
        underway.into_iter().for_each(finish);
        outcome
    }

    fn copy_cached(&self, source: &Pages, target: &mut Pages) -> Result<(), PinError> {
        let lease = |pages: &Pages, access| {
            self.cache.acquire(pages.as_ptr() as usize, pages.len(), access)
        };
        let _leases = (lease(source, Access::Read)?, lease(target, Access::Write)?);
        self.submit(source.as_ptr() as usize, target.as_ptr() as usize, source.len())
            .wait()
            .expect("memory of this process is good");
        Ok(())
    }

    fn start(&self, source: PinnedChunk, target: PinnedChunk) -> InFlightCopy {
        assert_eq!(source.length, target.length);
        let transfer = self.submit(source.address, target.address, source.length);
        InFlightCopy { transfer, _pins: [source, target] }
    }

    /// Submits a copy without caller assist.
    fn submit(&self, source: usize, target: usize, length: usize) -> Transfer {
        let request = Request::copy(source as *const u8, target as *mut u8, length)
            .with(Options::new().no_caller_assist());
        // SAFETY: both ranges are whole buffers or parts of them, borrowed by `copy`, which waits
        // for everything that it submitted before it returns.
        unsafe { self.ferry.start_raw(request) }.expect("the ranges are valid")
    }
}

fn finish(underway: InFlightCopy) {
    underway.transfer.wait().expect("memory of this process is good");
}

#[cfg(test)]
mod tests {
    use memferry_memory::pinning::{IoUringPinner, MlockPinner, PopulatePinner};

    use super::*;

    #[test]
    fn every_way_copies_all_bytes() {
        let mut pinners: Vec<Arc<dyn Pinner>> =
            vec![Arc::new(MlockPinner::new()), Arc::new(PopulatePinner)];
        pinners.extend(IoUringPinner::new().ok().map(|pinner| Arc::new(pinner) as Arc<dyn Pinner>));
        for pinner in pinners {
            let device = PinningDevice::new(pinner).unwrap();
            for (series, way) in crate::memory::pinning::pin_methods() {
                for bytes in [100, (1 << 20) + 1] {
                    let mut source = Pages::new(bytes).unwrap();
                    let mut target = Pages::new(bytes).unwrap();
                    source.as_mut_slice().fill(7);
                    device.copy(way, &source, &mut target).unwrap();
                    assert!(source.as_slice() == target.as_slice(), "{series}, {bytes}");
                }
            }
        }
    }
}
