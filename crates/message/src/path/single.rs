//! `single`: one copy, by the receiver alone, while the sender does what it likes.

use std::ops::Range;
use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Access;

use super::copying::{Last, Part};
use super::{Copying, Fetch, Path, ReceiveStage, Receiving, Step, Turn, copy_failed};
use crate::ring::cells::Nonsense;

pub(super) struct Single;

impl Path for Single {
    fn receive(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        match Copying::collect(&mut fetch.copying, &mut fetch.done) {
            Last::UnderWay => return Ok(Step::Idle),
            Last::Over(Err(error)) => return Ok(copy_failed(error)),
            Last::Over(Ok(())) | Last::Nothing => {}
        }
        if fetch.done == accepted {
            return Ok(Step::Done);
        }
        let is_near = fetch.sides.is_near();
        if !turn.may_copy && !is_near {
            return Ok(Step::Copy);
        }
        let end = accepted.min(fetch.done + u64::from(fetch.plan.chunk_bytes));
        let streaming = fetch.plan.streams.then_some(turn.streaming);
        let part = part(fetch, fetch.done..end, streaming);
        if is_near {
            // SAFETY: the operation is under way, so its owner vouches for the pieces.
            if let Err(error) = unsafe { fetch.sides.copy(&part) } {
                return Ok(copy_failed(error));
            }
            fetch.done = end;
            return Ok(if end == accepted { Step::Done } else { Step::Moved });
        }
        // SAFETY: the operation is under way, so its owner vouches for the pieces; it is not over before
        // the copy is.
        fetch.copying = Some(unsafe { Copying::new(&fetch.sides, part) });
        Ok(Step::Copy)
    }
}

/// A part of a message, for the receiver to copy.
fn part(fetch: &Fetch, range: Range<u64>, streaming: Option<Streaming>) -> Part {
    let populates = fetch.plan.populating.ends;
    Part { range, access: Access::Read, streaming, populates, tell: None }
}

/// The copy of all of a message whose memory may never come, for a thread of its own.
///
/// # Safety
/// As for [`Copying::new`].
pub(crate) unsafe fn start_slow(fetch: &Fetch, accepted: u64) -> Arc<Copying> {
    // SAFETY: passed on.
    unsafe { Copying::new(&fetch.sides, part(fetch, 0..accepted, None)) }
}
