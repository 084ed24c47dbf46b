//! `offload`: one copy, by the copy engines of the receiver's process, for memory that is mapped
//! here. The receiver itself copies the first part through its cache, where the reader will look
//! first; engines write the rest around the caches. Memory that is not there is brought in piece by
//! piece, in growing pieces, and engines follow close behind.

use std::collections::VecDeque;
use std::ops::Range;

use memferry_copy::{Ferry, Options, Request, Temperature, Transfer};
use memferry_memory::pinning::{Access as Use, ChunkSchedule, Chunks, PageRange};
use memferry_sys::shared_memory::Access;

use super::{Fetch, Path, ReceiveStage, Receiving, Step, Turn, pinning};
use crate::connection::{CopyError, Wire};
use crate::error::{Error, Who};
use crate::pieces::{Piece, Pieces};
use crate::plan::{Ends, PathKind};
use crate::quarantine::Claimed;
use crate::ring::cells::Nonsense;

pub(super) struct Offload;

/// What engines do for a message.
#[derive(Debug)]
pub(crate) struct Engines {
    /// Copies that engines have not been seen to finish, the oldest first.
    transfers: VecDeque<Transfer>,
    /// What has not been handed over.
    left: Chunks,
}

/// The most pieces of a message that engines have at a time.
const MOST_TRANSFERS: usize = 64;

impl Path for Offload {
    fn begin(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let started = match &receiving.pieces {
            Pieces::One(target) => start(fetch, *target, accepted, (turn.ferry)()),
            Pieces::Many(_) => None,
        };
        if started.is_none() {
            // Several pieces, or no engine to be had.
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let accepted = receiving.accepted();
        let pieces = receiving.pieces.as_slice();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        let populates = fetch.plan.populating.ends;
        let Some(engines) = &mut fetch.engines else { return Ok(Step::Idle) };
        while let Some(ended) = engines.transfers.front().and_then(Transfer::check) {
            engines.transfers.pop_front();
            if ended.is_err() {
                stop(engines);
                return Ok(Step::Failed(Error::BadMemory(Who::Ours)));
            }
        }
        if engines.transfers.len() < MOST_TRANSFERS
            && let Some(pages) = engines.left.next()
        {
            let part = part_in(pages, pieces[0], fetch.plan.warm_bytes, accepted);
            if hand_over(fetch, pieces[0], part.clone(), (turn.ferry)()).is_some() {
                return Ok(Step::Moved);
            }
            // SAFETY: as below; engines have not got this part.
            let copied = unsafe {
                pinning::copy(&fetch.sides.theirs, pieces, part, Access::Read, None, populates)
            };
            return Ok(moved_or_failed(fetch, copied));
        }
        let warm = fetch.plan.warm_bytes.min(accepted);
        if fetch.done == warm {
            let is_over = engines.transfers.is_empty();
            return Ok(if is_over { Step::Done } else { Step::Idle });
        }
        fetch.done = warm;
        // SAFETY: the operation is under way, so its owner vouches for the pieces; engines have
        // only what comes behind this part.
        let copied = unsafe {
            pinning::copy(&fetch.sides.theirs, pieces, 0..warm, Access::Read, None, populates)
        };
        Ok(moved_or_failed(fetch, copied))
    }

    fn give_up(&self, receiving: &mut Receiving, _: &mut Wire) -> Option<Claimed> {
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return None };
        // Engines of this process write: they end soon, whatever the peer does.
        if let Some(engines) = &mut fetch.engines {
            stop(engines);
        }
        None
    }
}

/// Begins to hand over everything behind the warm part: at once, or in growing pieces if it has to
/// be brought in first.
fn start(fetch: &mut Fetch, target: Piece, accepted: u64, ferry: Option<&Ferry>) -> Option<()> {
    let warm = fetch.plan.warm_bytes.min(accepted) as usize;
    let cold = target.address as usize + warm;
    let pages = PageRange::covering(cold, accepted as usize - warm).ok()?;
    let schedule = match fetch.plan.populating.ends {
        Ends { source: false, target: false } => ChunkSchedule::Whole,
        _ => ChunkSchedule::default(),
    };
    let mut left = schedule.chunks(pages);
    let first = part_in(left.next()?, target, fetch.plan.warm_bytes, accepted);
    fetch.engines = Some(Engines { transfers: VecDeque::new(), left });
    let handed = hand_over(fetch, target, first, ferry);
    if handed.is_none() {
        fetch.engines = None;
    }
    handed
}

/// What lies in these pages of the target. Those at both ends may hold bytes that are not for
/// engines.
fn part_in(pages: PageRange, target: Piece, warm_bytes: u64, accepted: u64) -> Range<u64> {
    let start = target.address as usize;
    let from = pages.start().max(start) - start;
    (from as u64).max(warm_bytes)..((pages.end() - start) as u64).min(accepted)
}

/// Hands over a part, once it is there. `None` if there is nobody to take it.
fn hand_over(
    fetch: &mut Fetch,
    target: Piece,
    part: Range<u64>,
    ferry: Option<&Ferry>,
) -> Option<()> {
    let (source, ferry) = (fetch.sides.theirs.near_address()?, ferry?);
    let (from, length) = (part.start as usize, part.end - part.start);
    let populates = fetch.plan.populating.ends;
    if populates.source {
        pinning::populate(pinning::near_pieces(&fetch.sides.theirs), part.start, length, Use::Read);
    }
    if populates.target {
        pinning::populate(&[target], part.start, length, Use::Write);
    }
    let (source, target) = (source.wrapping_add(from), target.address.wrapping_add(from));
    let request = Request::copy(source, target, length as usize)
        .with(Options::new().temperature(Temperature::Cold).spare_caller());
    // SAFETY: the operation is under way until the transfer is over: `receive` ends it only then,
    // or stops it before, and `give_up` waits. The source is kept mapped by the view in `fetch`.
    let transfer = unsafe { ferry.start(request) }.ok()?;
    fetch.engines.as_mut()?.transfers.push_back(transfer);
    Some(())
}

/// After a copy by the receiver itself. The memory is engines' no more when the message fails.
fn moved_or_failed(fetch: &mut Fetch, copied: Result<(), CopyError>) -> Step {
    match copied {
        Ok(()) => Step::Moved,
        Err(error) => {
            fetch.engines.as_mut().map(stop);
            super::copy_failed(error)
        }
    }
}

/// Waits until engines are done, with as little more work as possible.
fn stop(engines: &mut Engines) {
    for transfer in &engines.transfers {
        transfer.cancel();
    }
    for transfer in engines.transfers.drain(..) {
        let _ = transfer.wait();
    }
}
