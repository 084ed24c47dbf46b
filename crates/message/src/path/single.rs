//! `single`: the receiver makes the only copy.

use std::ops::Range;
use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::shared_memory::Protection;

use super::active_copy::{CopySpec, CopyStatus};
use super::{
    ActiveCopy, MessagePath, ReceiveStage, Receiving, RendezvousFetch, StepContext, StepResult,
    copy_failed,
};
use crate::ring::cells::ProtocolError;

pub(super) struct Single;

impl MessagePath for Single {
    fn receive(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else {
            return Ok(StepResult::Idle);
        };
        match ActiveCopy::poll_status(&mut fetch.active_copy, &mut fetch.done) {
            CopyStatus::InFlight => return Ok(StepResult::Idle),
            CopyStatus::Done(Err(error)) => return Ok(copy_failed(error)),
            CopyStatus::Done(Ok(())) | CopyStatus::NotStarted => {}
        }
        if fetch.done == accepted {
            return Ok(StepResult::Done);
        }
        let is_mapped = fetch.buffers.is_mapped();
        if !context.may_copy && !is_mapped {
            return Ok(StepResult::CopyPending);
        }
        let end = accepted.min(fetch.done + u64::from(fetch.plan.chunk_bytes));
        let streaming = fetch.plan.streams.then_some(context.streaming);
        let part = copy_spec(fetch, fetch.done..end, streaming);
        if is_mapped {
            // SAFETY: the operation is in flight, so its owner guarantees that the segments are
            // valid.
            if let Err(error) = unsafe { fetch.buffers.copy(&part) } {
                return Ok(copy_failed(error));
            }
            fetch.done = end;
            return Ok(if end == accepted { StepResult::Done } else { StepResult::Progressed });
        }
        // SAFETY: the operation is in flight, so its owner guarantees that the segments are valid;
        // the operation does not complete before the copy.
        fetch.active_copy = Some(unsafe { ActiveCopy::new(&fetch.buffers, part) });
        Ok(StepResult::CopyPending)
    }
}

/// Describes a part of a message for the receiver to copy.
fn copy_spec(fetch: &RendezvousFetch, range: Range<u64>, streaming: Option<Streaming>) -> CopySpec {
    let prefault = fetch.plan.prefault.ends;
    CopySpec { range, access: Protection::ReadOnly, streaming, prefault, report: None }
}

/// Creates the copy of a whole message whose source may block for any time, for a thread of its
/// own.
///
/// # Safety
/// As for [`ActiveCopy::new`].
pub(crate) unsafe fn start_blocking_copy(
    fetch: &RendezvousFetch,
    accepted: u64,
) -> Arc<ActiveCopy> {
    // SAFETY: the caller guarantees it.
    unsafe { ActiveCopy::new(&fetch.buffers, copy_spec(fetch, 0..accepted, None)) }
}
