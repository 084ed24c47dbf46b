//! `offload`: one copy, by the copy engines of the receiver's process, for memory that is mapped
//! here. The receiver itself copies the first part through its cache, where the reader will look
//! first; engines write the rest around the caches.

use memferry_copy::{Ferry, Options, Request, Temperature};
use memferry_sys::shared_memory::Access;

use super::{Fetch, Path, ReceiveStage, Receiving, Step, Turn};
use crate::connection::Wire;
use crate::error::{Error, Who};
use crate::pieces::{Piece, Pieces};
use crate::plan::PathKind;
use crate::ring::cells::Nonsense;

pub(super) struct Offload;

impl Path for Offload {
    fn begin(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(()) };
        let started = match &receiving.pieces {
            Pieces::One(target) => start(fetch, *target, accepted, (turn.ferry)()),
            Pieces::Many(_) => false,
        };
        if !started {
            // Several pieces, or no engine to be had.
            fetch.plan.path = PathKind::Single;
        }
        Ok(())
    }

    fn receive(&self, receiving: &mut Receiving, _: &mut Turn<'_>) -> Result<Step, Nonsense> {
        let accepted = receiving.accepted();
        let pieces = receiving.pieces.as_slice();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return Ok(Step::Idle) };
        let Some(transfer) = &fetch.transfer else { return Ok(Step::Idle) };
        let warm = fetch.plan.warm_bytes.min(accepted);
        if fetch.done == warm {
            return Ok(match transfer.check() {
                None => Step::Idle,
                Some(Ok(_)) => Step::Done,
                Some(Err(_)) => Step::Failed(Error::BadMemory(Who::Ours)),
            });
        }
        fetch.done = warm;
        // SAFETY: the operation is under way, so its owner vouches for the pieces; engines have
        // only what comes behind this part.
        let copied = unsafe { fetch.source.copy(pieces, 0, warm, Access::Read, None) };
        Ok(match copied {
            Ok(()) => Step::Moved,
            Err(error) => Step::Failed(super::copy_failed(error)),
        })
    }

    fn is_held(&self, receiving: &mut Receiving, _: &mut Wire) -> bool {
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return false };
        // Engines of this process write: they end soon, whatever the peer does.
        if let Some(transfer) = &fetch.transfer {
            transfer.cancel();
            let _ = transfer.wait();
        }
        false
    }
}

/// Hands everything behind the warm part to the engines.
fn start(fetch: &mut Fetch, target: Piece, accepted: u64, ferry: Option<&Ferry>) -> bool {
    let (Some(source), Some(ferry)) = (fetch.source.near_address(), ferry) else {
        return false;
    };
    let warm = fetch.plan.warm_bytes.min(accepted) as usize;
    let length = accepted as usize - warm;
    let request =
        Request::copy(source.wrapping_add(warm), target.address.wrapping_add(warm), length)
            .with(Options::new().temperature(Temperature::Cold).spare_caller());
    // SAFETY: the operation is under way until the transfer is over: `receive` ends it only then,
    // and `is_held` waits. The source is kept mapped by the view in `fetch`.
    match unsafe { ferry.start(request) } {
        Ok(transfer) => fetch.transfer = Some(transfer),
        Err(_) => return false,
    }
    true
}
