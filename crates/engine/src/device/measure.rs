//! What copies by a device take, measured on the device itself when it is opened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_memory::pin_cache::{Limits, PinCache, Watching};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

use crate::contract::{ChannelOptions, CostLine, Descriptor, Engine, Operation, Pins};

/// A copy of one descriptor, and one of many.
const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;
/// How often each is made; the quickest counts, because everything else only disturbs.
const TIMES: usize = 8;
/// No copy takes so long. A device that does not answer is not measured.
const LIMIT: Duration = Duration::from_secs(2);

/// The line of an engine's copies; `None` if they do not come to an end.
pub(crate) fn measure(engine: &dyn Engine) -> Option<CostLine> {
    let pinner = engine.pinner()?;
    let cache = PinCache::new(pinner, Limits::default(), Watching::Explicit).ok()?;
    let (source, target) = (Pages::new(LARGE).ok()?, Pages::new(LARGE).ok()?);
    let lease = |pages: &Pages, access| {
        cache.acquire(pages.as_ptr() as usize, LARGE, access).ok().map(Arc::new)
    };
    let pins = Arc::new(Pins {
        source: Some(lease(&source, Access::Read)?),
        target: Some(lease(&target, Access::Write)?),
        variable: None,
    });
    // Dropped before the memory: its end is the end of everything that is under way.
    let channel = engine.open_channel(&ChannelOptions::default()).ok()?;
    let time = |bytes: usize| {
        let (from, to) = (source.as_ptr() as u64, target.as_ptr() as u64);
        let (mut batch, mut done) = (Vec::new(), 0);
        while done < bytes as u64 {
            let left = bytes as u64 - done;
            let length = engine.capabilities().longest_piece(from + done, to + done, left);
            // SAFETY: inside memory that outlives the channel, and that nobody else uses.
            let copy = unsafe { Descriptor::new(Operation::Copy, from + done, to + done, length) };
            batch.push(Some(copy.pinned_by(pins.clone())));
            done += length;
        }
        let begin = Instant::now();
        let taken = channel.submit(&mut batch).ok()?;
        let is_over = channel.park(taken.last(), LIMIT) && taken.count == batch.len();
        is_over.then(|| begin.elapsed().as_nanos() as f64)
    };
    let quickest = |bytes| {
        let times: Option<Vec<f64>> = (0..TIMES).map(|_| time(bytes)).collect();
        times?.into_iter().min_by(f64::total_cmp)
    };
    let (small, large) = (quickest(SMALL)?, quickest(LARGE)?);
    // What fails is over soonest of all.
    if channel.statistics().failed > 0 {
        return None;
    }
    let ns_per_byte = ((large - small) / (LARGE - SMALL) as f64).max(0.001);
    Some(CostLine { startup_ns: (small - ns_per_byte * SMALL as f64).max(0.0), ns_per_byte })
}
