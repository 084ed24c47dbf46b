//! The cost of copies by a device, measured on the device when it is opened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

use crate::contract::{ChannelOptions, CostLine, Descriptor, DescriptorLeases, Engine, Opcode};

/// The sizes of a copy of one descriptor and of a copy of many, in bytes.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// The number of repetitions; the fastest counts, because disturbances only slow a copy down.
const REPEATS: usize = 8;
/// The maximum time of a copy. A device that does not respond is not measured.
const COPY_TIMEOUT: Duration = Duration::from_secs(2);

/// The cost line of an engine's copies; `None` if they do not complete.
pub(crate) fn measure(engine: &dyn Engine) -> Option<CostLine> {
    let cache = match engine.pinner() {
        Some(pinner) => {
            let (limits, mode) = (PinCacheLimits::default(), InvalidationMode::Explicit);
            Some(PinCache::new(pinner, limits, mode).ok()?)
        }
        None => None,
    };
    let (source, mut target) = (Pages::new(LARGE).ok()?, Pages::new(LARGE).ok()?);
    // Resident: page faults are no part of the cost of a copy.
    target.as_mut_slice().fill(1);
    let lease = |pages: &Pages, access| match &cache {
        Some(cache) => {
            let lease = cache.acquire(pages.as_ptr() as usize, LARGE, access).ok()?;
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
    // Dropped before the memory: the drop waits for everything in flight.
    let channel = engine.open_channel(&ChannelOptions::default()).ok()?;
    let time = |bytes: usize| {
        let (from, to) = (source.as_ptr() as u64, target.as_ptr() as u64);
        let (mut batch, mut done) = (Vec::new(), 0);
        while done < bytes as u64 {
            let left = bytes as u64 - done;
            let length = engine.capabilities().max_part(from + done, to + done, left);
            // SAFETY: inside memory that outlives the channel, and that nothing else uses.
            let copy = unsafe { Descriptor::new(Opcode::Copy, from + done, to + done, length) };
            batch.push(Some(copy.pinned_by(leases.clone())));
            done += length;
        }
        let start = Instant::now();
        let accepted = channel.submit(&mut batch).ok()?;
        let is_complete =
            channel.park(accepted.last(), COPY_TIMEOUT) && accepted.count == batch.len();
        is_complete.then(|| start.elapsed().as_nanos() as f64)
    };
    let fastest = |bytes| {
        let times: Option<Vec<f64>> = (0..REPEATS).map(|_| time(bytes)).collect();
        times?.into_iter().min_by(f64::total_cmp)
    };
    let (small, large) = (fastest(SMALL)?, fastest(LARGE)?);
    // Failed copies end soonest of all.
    if channel.statistics().failed > 0 {
        return None;
    }
    let ns_per_byte = ((large - small) / (LARGE - SMALL) as f64).max(0.001);
    Some(CostLine { startup_ns: (small - ns_per_byte * SMALL as f64).max(0.0), ns_per_byte })
}
