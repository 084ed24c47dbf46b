//! The cost of copies by a device, measured on the device when it is opened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

use crate::contract::{
    Channel, ChannelOptions, CostLine, Descriptor, DescriptorLeases, Engine, Opcode,
};

/// The sizes of a copy of one descriptor and of a copy of many, in bytes.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// The number of repetitions; the fastest counts, because disturbances only slow a copy down.
const REPEATS: usize = 8;
/// The maximum time of a copy. A device that does not respond is not measured.
const COPY_TIMEOUT: Duration = Duration::from_secs(2);

/// The cost line of an engine's copies; `None` if they do not complete.
pub(crate) fn measure(engine: &dyn Engine) -> Option<CostLine> {
    MeasuredChannel::open(engine)?.line()
}

/// A copy between the buffers of a measurement, by offsets below [`MEASURED_BYTES`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct MeasuredCopy {
    pub(crate) source: usize,
    pub(crate) target: usize,
    pub(crate) bytes: usize,
}

/// The size of the buffers of a measurement. They begin with a page.
pub(crate) const MEASURED_BYTES: usize = LARGE;

/// A channel of an engine, and pinned memory for copies.
pub(crate) struct MeasuredChannel<'a> {
    engine: &'a dyn Engine,
    // Before the memory: the drop waits for everything in flight.
    channel: Arc<dyn Channel>,
    leases: Arc<DescriptorLeases>,
    _cache: Option<PinCache>,
    source: Pages,
    target: Pages,
}

impl<'a> MeasuredChannel<'a> {
    /// Opens a channel; `None` if that fails.
    pub(crate) fn open(engine: &'a dyn Engine) -> Option<Self> {
        let cache = match engine.pinner() {
            Some(pinner) => {
                let (limits, mode) = (PinCacheLimits::default(), InvalidationMode::Explicit);
                Some(PinCache::new(pinner, limits, mode).ok()?)
            }
            None => None,
        };
        let (source, mut target) =
            (Pages::new(MEASURED_BYTES).ok()?, Pages::new(MEASURED_BYTES).ok()?);
        // Resident: page faults are no part of the cost of a copy.
        target.as_mut_slice().fill(1);
        let lease = |pages: &Pages, access| match &cache {
            Some(cache) => {
                let lease = cache.acquire(pages.as_ptr() as usize, MEASURED_BYTES, access).ok()?;
                Some(Some(Arc::new(lease)))
            }
            None => Some(None),
        };
        let leases = Arc::new(DescriptorLeases {
            source: lease(&source, Access::Read)?,
            target: lease(&target, Access::Write)?,
            second: None,
            variable: None,
        });
        let channel = engine.open_channel(&ChannelOptions::default()).ok()?;
        Some(Self { engine, channel, leases, _cache: cache, source, target })
    }

    /// The cost line of copies; `None` if they do not complete.
    pub(crate) fn line(&self) -> Option<CostLine> {
        let fastest = |bytes| {
            let copy = MeasuredCopy { source: 0, target: 0, bytes };
            let times: Option<Vec<f64>> = (0..REPEATS).map(|_| self.time(&[copy])).collect();
            times?.into_iter().min_by(f64::total_cmp)
        };
        let (small, large) = (fastest(SMALL)?, fastest(LARGE)?);
        if self.has_failed() {
            return None;
        }
        let ns_per_byte = ((large - small) / (LARGE - SMALL) as f64).max(0.001);
        Some(CostLine { startup_ns: (small - ns_per_byte * SMALL as f64).max(0.0), ns_per_byte })
    }

    /// The time in nanoseconds of copies that are submitted together; `None` if they do not complete.
    ///
    /// # Panics
    /// If a copy is not inside the buffers.
    pub(crate) fn time(&self, copies: &[MeasuredCopy]) -> Option<f64> {
        let mut batch = Vec::new();
        for MeasuredCopy { source, target, bytes } in copies {
            assert!(source.max(target) + bytes <= MEASURED_BYTES, "a copy inside the buffers");
            let from = self.source.as_ptr() as u64 + *source as u64;
            let to = self.target.as_ptr() as u64 + *target as u64;
            let (bytes, mut done) = (*bytes as u64, 0);
            while done < bytes {
                let left = bytes - done;
                let length = self.engine.capabilities().max_part(from + done, to + done, left);
                // SAFETY: inside memory that outlives the channel, and that nothing else uses.
                let copy = unsafe { Descriptor::new(Opcode::Copy, from + done, to + done, length) };
                batch.push(Some(copy.pinned_by(self.leases.clone())));
                done += length;
            }
        }
        let start = Instant::now();
        let accepted = self.channel.submit(&mut batch).ok()?;
        let is_complete =
            self.channel.park(accepted.last(), COPY_TIMEOUT) && accepted.count == batch.len();
        is_complete.then(|| start.elapsed().as_nanos() as f64)
    }

    /// Whether the device has failed to execute a copy. Failed copies end soonest of all.
    pub(crate) fn has_failed(&self) -> bool {
        self.channel.statistics().failed > 0
    }
}
