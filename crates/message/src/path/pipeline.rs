//! `pipeline`: through the shared space, in fragments, when the receiver has a place for them. Two
//! copies, but it works where nobody may look into anybody's memory.

use super::{Path, ReceiveStage, Receiving, SendStage, Sending, Step, Tools, announce, stream};
use crate::connection::Wire;
use crate::ring::cells::Nonsense;
use crate::wire::{Manner, Note, Number};

pub(super) struct Pipeline;

impl Path for Pipeline {
    fn send(
        &self,
        sending: &mut Sending,
        number: Number,
        wire: &mut Wire,
    ) -> Result<Step, Nonsense> {
        match sending.stage {
            SendStage::Queued => announce(sending, number, wire),
            SendStage::Streaming { .. } => match stream::send_fragment(sending, wire)? {
                // The receiver's word ends it, when it has copied the last byte.
                Step::Done => Ok(Step::Idle),
                step => Ok(step),
            },
            _ => Ok(Step::Idle),
        }
    }

    fn begin(
        &self,
        receiving: &mut Receiving,
        number: Number,
        wire: &mut Wire,
        _: &Tools<'_>,
    ) -> Result<(), Nonsense> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &receiving.stage else { return Ok(()) };
        let sender = fetch.sender;
        let manner = Manner::Pipeline;
        // What does not fit is not sent at all.
        wire.post(Note::Accept { sender, receiver: number, length: accepted, manner });
        if accepted > 0 {
            receiving.stage = ReceiveStage::Arriving { arrived: 0, requested: Some(sender) };
        }
        Ok(())
    }

    fn receive(
        &self,
        _: &mut Receiving,
        _: Number,
        _: &mut Wire,
        _: &Tools<'_>,
    ) -> Result<Step, Nonsense> {
        // Fragments come by themselves; a message of which nothing is wanted has none.
        Ok(Step::Done)
    }
}
