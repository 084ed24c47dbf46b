//! `pipeline`: through the shared space, in fragments, when the receiver has a place for them. Two
//! copies, but it works where nobody may look into anybody's memory.

use super::{
    Path, ReceiveStage, Receiving, Requested, SendStage, Sending, Step, Turn, announce, stream,
};
use crate::ring::cells::Nonsense;
use crate::wire::{Manner, Note};

pub(super) struct Pipeline;

impl Path for Pipeline {
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        match sending.stage {
            SendStage::Queued => announce(sending, turn),
            SendStage::Streaming { .. } => match stream::send_fragment(sending, turn.wire)? {
                // The receiver's word ends it, when it has copied the last byte.
                Step::Done => Ok(Step::Idle),
                step => Ok(step),
            },
            _ => Ok(Step::Idle),
        }
    }

    fn begin(&self, receiving: &mut Receiving, turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &receiving.stage else { return Ok(()) };
        let sender = fetch.sender;
        let manner = Manner::Pipeline;
        // What does not fit is not sent at all.
        turn.wire.post(Note::Accept { sender, receiver: turn.number, length: accepted, manner });
        // Fragments come by themselves; a message of which nothing is wanted has none.
        if accepted > 0 {
            let populated = fetch.plan.populating.ends.target.then_some(0);
            let requested = Some(Requested { sender, populated });
            receiving.stage = ReceiveStage::Arriving { arrived: 0, requested };
        }
        Ok(())
    }
}
