//! `offload`: the copy engines of the receiver's process make the only copy, for memory that is
//! mapped in this process. The receiver itself copies the first part through its cache, because the
//! application reads it first; the engines write the rest around the caches. Memory that is not
//! resident is prefaulted in growing chunks, and each is submitted as soon as it is resident.

use std::collections::VecDeque;
use std::ops::Range;

use memferry_copy::{CacheHint, Ferry, Options, Request, Transfer};
use memferry_memory::pinning::{Access as Use, ChunkRanges, ChunkSchedule, PageRange};
use memferry_sys::shared_memory::Protection;

use super::{
    MessagePath, ReceiveStage, Receiving, RendezvousFetch, StepContext, StepResult, pinning,
};
use crate::connection::{Connection, CopyError};
use crate::error::{Error, MemorySide};
use crate::plan::{BufferEnds, PathKind};
use crate::quarantine::ClaimKind;
use crate::ring::cells::ProtocolError;
use crate::segments::{Segment, Segments};

pub(super) struct Offload;

/// The state of the engines' copies of a message.
#[derive(Debug)]
pub(crate) struct OffloadProgress {
    /// Transfers that are not known to be complete, the oldest first.
    transfers: VecDeque<Transfer>,
    /// The pages that are not submitted.
    remaining: ChunkRanges,
}

/// The maximum number of transfers of a message in flight.
const MAX_TRANSFERS: usize = 64;

impl MessagePath for Offload {
    fn begin(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<(), ProtocolError> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let started = match &receiving.segments {
            Segments::One(target) => start(fetch, *target, accepted, (context.ferry)()),
            Segments::Many(_) => None,
        };
        if started.is_none() {
            // There are several segments, or no engine is available.
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        let accepted = receiving.accepted();
        let segments = receiving.segments.as_slice();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else {
            return Ok(StepResult::Idle);
        };
        let prefault = fetch.plan.prefault.ends;
        let Some(engines) = &mut fetch.offload else { return Ok(StepResult::Idle) };
        while let Some(ended) = engines.transfers.front().and_then(Transfer::check) {
            engines.transfers.pop_front();
            if ended.is_err() {
                wait_all(engines);
                return Ok(StepResult::Failed(Error::BadMemory(MemorySide::Local)));
            }
        }
        if engines.transfers.len() < MAX_TRANSFERS
            && let Some(pages) = engines.remaining.next()
        {
            let part = bytes_in_pages(pages, segments[0], fetch.plan.cached_bytes, accepted);
            if submit(fetch, segments[0], part.clone(), (context.ferry)()).is_some() {
                return Ok(StepResult::Progressed);
            }
            // SAFETY: as below; this part was not submitted to an engine.
            let copied = unsafe {
                pinning::copy(
                    &fetch.buffers.peer,
                    segments,
                    part,
                    Protection::ReadOnly,
                    None,
                    prefault,
                )
            };
            return Ok(step_result(fetch, copied));
        }
        let cached_bytes = fetch.plan.cached_bytes.min(accepted);
        if fetch.done == cached_bytes {
            let is_done = engines.transfers.is_empty();
            return Ok(if is_done { StepResult::Done } else { StepResult::Idle });
        }
        fetch.done = cached_bytes;
        // SAFETY: the operation is in flight, so its owner guarantees the segments; engines have
        // only later parts.
        let copied = unsafe {
            pinning::copy(
                &fetch.buffers.peer,
                segments,
                0..cached_bytes,
                Protection::ReadOnly,
                None,
                prefault,
            )
        };
        Ok(step_result(fetch, copied))
    }

    fn revoke(&self, receiving: &mut Receiving, _: &mut Connection) -> Option<ClaimKind> {
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return None };
        // Engines of this process write: they complete soon, whatever the peer does.
        if let Some(engines) = &mut fetch.offload {
            wait_all(engines);
        }
        None
    }
}

/// Starts to submit everything behind the cached part: at once, or in growing chunks if it must be
/// prefaulted.
fn start(
    fetch: &mut RendezvousFetch,
    target: Segment,
    accepted: u64,
    ferry: Option<&Ferry>,
) -> Option<()> {
    let cached_bytes = fetch.plan.cached_bytes.min(accepted) as usize;
    let uncached = target.address as usize + cached_bytes;
    let pages = PageRange::covering(uncached, accepted as usize - cached_bytes).ok()?;
    let schedule = match fetch.plan.prefault.ends {
        BufferEnds { source: false, target: false } => ChunkSchedule::Whole,
        _ => ChunkSchedule::default(),
    };
    let mut remaining = schedule.chunks(pages);
    let first = bytes_in_pages(remaining.next()?, target, fetch.plan.cached_bytes, accepted);
    fetch.offload = Some(OffloadProgress { transfers: VecDeque::new(), remaining });
    let submitted = submit(fetch, target, first, ferry);
    if submitted.is_none() {
        fetch.offload = None;
    }
    submitted
}

/// The bytes of the target in these pages, without those at both ends that are not for engines.
fn bytes_in_pages(
    pages: PageRange,
    target: Segment,
    cached_bytes: u64,
    accepted: u64,
) -> Range<u64> {
    let start = target.address as usize;
    let from = pages.start().max(start) - start;
    (from as u64).max(cached_bytes)..((pages.end() - start) as u64).min(accepted)
}

/// Prefaults and submits a part. Returns `None` if no engine accepts it.
fn submit(
    fetch: &mut RendezvousFetch,
    target: Segment,
    part: Range<u64>,
    ferry: Option<&Ferry>,
) -> Option<()> {
    let (source, ferry) = (fetch.buffers.peer.mapped_address()?, ferry?);
    let (from, length) = (part.start as usize, part.end - part.start);
    let prefault = fetch.plan.prefault.ends;
    if prefault.source {
        pinning::populate(
            pinning::mapped_segments(&fetch.buffers.peer),
            part.start,
            length,
            Use::Read,
        );
    }
    if prefault.target {
        pinning::populate(&[target], part.start, length, Use::Write);
    }
    let (source, target) = (source.wrapping_add(from), target.address.wrapping_add(from));
    let request = Request::copy(source, target, length as usize)
        .with(Options::new().cache_hint(CacheHint::Cold).no_caller_assist());
    // SAFETY: the operation is in flight until the transfer is complete: `receive` ends it only then,
    // or stops it before, and `revoke` waits. The source is kept mapped by the view in `fetch`.
    let transfer = unsafe { ferry.start_raw(request) }.ok()?;
    fetch.offload.as_mut()?.transfers.push_back(transfer);
    Some(())
}

/// The result of a copy that the receiver made itself. After a failure no engine accesses the
/// memory.
fn step_result(fetch: &mut RendezvousFetch, copied: Result<(), CopyError>) -> StepResult {
    match copied {
        Ok(()) => StepResult::Progressed,
        Err(error) => {
            fetch.offload.as_mut().map(wait_all);
            super::copy_failed(error)
        }
    }
}

/// Cancels all transfers and waits for them.
fn wait_all(engines: &mut OffloadProgress) {
    for transfer in &engines.transfers {
        transfer.cancel();
    }
    for transfer in engines.transfers.drain(..) {
        let _ = transfer.wait();
    }
}
