//! `single`: one copy, by the receiver alone, while the sender does what it likes.

use memferry_sys::shared_memory::Access;

use super::{Path, ReceiveStage, Receiving, Slow, Step, Turn, copy_failed, pinning};
use crate::ring::cells::Nonsense;

pub(super) struct Single;

impl Path for Single {
    fn receive(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let accepted = receiving.accepted();
        let pieces = receiving.pieces.as_slice();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        match &fetch.slow {
            None => {}
            Some(Slow::Waiting) => return Ok(Step::Idle),
            Some(Slow::Copying(copy)) => {
                return Ok(match copy.outcome() {
                    None => Step::Idle,
                    Some(Ok(())) => Step::Done,
                    Some(Err(error)) => copy_failed(error),
                });
            }
        }
        let length = (accepted - fetch.done).min(fetch.plan.chunk_bytes.into());
        if length > 0 {
            let streaming = fetch.plan.streams.then_some(turn.streaming);
            // SAFETY: the operation is under way, so its owner vouches for the pieces.
            let copied = unsafe {
                let part = fetch.done..fetch.done + length;
                let populates = fetch.plan.populating.ends;
                pinning::copy(&fetch.source, pieces, part, Access::Read, streaming, populates)
            };
            if let Err(error) = copied {
                return Ok(copy_failed(error));
            }
            fetch.done += length;
        }
        if fetch.done < accepted {
            return Ok(Step::Moved);
        }
        Ok(Step::Done)
    }
}
