//! An asynchronous engine that may only copy pinned memory: a channel of the copy core, which is
//! handed nothing but pinned pieces.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry::sys::pages::Pages;
use memferry::{Ferry, Options, Request, Transfer};
use memferry_memory::pin_cache::{Limits, PinCache, Watching};
use memferry_memory::pinning::{Access, Chunk, ChunkSchedule, Overlapped, PinError, Pinner};

/// How memory is pinned for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// In such pieces, for this copy alone.
    EachTime(ChunkSchedule),
    /// Kept pinned from copy to copy.
    Cached,
}

/// The engine, and how its memory is pinned.
pub(super) struct Device {
    ferry: Ferry,
    cache: PinCache,
}

/// A piece that the engine has, with what keeps it pinned.
struct Underway {
    transfer: Transfer,
    _pins: [Chunk; 2],
}

/// The most pieces that the engine has at a time: as many as a short queue of descriptors.
const MOST_UNDERWAY: usize = 64;

impl Device {
    pub(super) fn new(pinner: Arc<dyn Pinner>) -> anyhow::Result<Self> {
        let ferry = Ferry::builder().channels(1).build()?;
        let cache = PinCache::new(pinner, Limits::default(), Watching::EventsOrExplicit)?;
        Ok(Self { ferry, cache })
    }

    pub(super) fn pinner(&self) -> &Arc<dyn Pinner> {
        self.cache.pinner()
    }

    /// Copies one to the other, from pinning to unpinning. Both have the same length.
    pub(super) fn copy(
        &self,
        way: Way,
        source: &Pages,
        target: &mut Pages,
    ) -> Result<(), PinError> {
        assert_eq!(source.len(), target.len());
        match way {
            Way::EachTime(schedule) => self.copy_pinning(schedule, source, target),
            Way::Cached => self.copy_cached(source, target),
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
            Overlapped::new(Arc::clone(self.pinner()), address, length, access, schedule)
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
            // What is done is unpinned while the rest goes on.
            while let Some(first) = underway.front()
                && (first.transfer.is_done() || underway.len() == MOST_UNDERWAY)
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
        self.hand_over(source.as_ptr() as usize, target.as_ptr() as usize, source.len())
            .wait()
            .expect("memory of this process is good");
        Ok(())
    }

    fn start(&self, source: Chunk, target: Chunk) -> Underway {
        assert_eq!(source.length, target.length);
        let transfer = self.hand_over(source.address, target.address, source.length);
        Underway { transfer, _pins: [source, target] }
    }

    /// Hands a copy over; the caller's core does none of it.
    fn hand_over(&self, source: usize, target: usize, length: usize) -> Transfer {
        let request = Request::copy(source as *const u8, target as *mut u8, length)
            .with(Options::new().spare_caller());
        // SAFETY: both are whole buffers or parts of them, lent to `copy`, which waits for all that
        // it handed over before it returns.
        unsafe { self.ferry.start(request) }.expect("the ranges are valid")
    }
}

fn finish(underway: Underway) {
    underway.transfer.wait().expect("memory of this process is good");
}

#[cfg(test)]
mod tests {
    use memferry_memory::pinning::{Lock, Populate, Registered};

    use super::*;

    #[test]
    fn every_way_copies_all_bytes() {
        let mut pinners: Vec<Arc<dyn Pinner>> = vec![Arc::new(Lock::new()), Arc::new(Populate)];
        pinners.extend(Registered::new().ok().map(|pinner| Arc::new(pinner) as Arc<dyn Pinner>));
        for pinner in pinners {
            let device = Device::new(pinner).unwrap();
            for (series, way) in crate::bench::pinning::ways() {
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
