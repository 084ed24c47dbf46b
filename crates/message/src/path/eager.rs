//! `eager`: through the shared space at once, without asking the receiver.

use super::{Path, Receiving, SendStage, Sending, Step, Tools, stream};
use crate::connection::Wire;
use crate::ring::cells::Nonsense;
use crate::wire::Number;

pub(super) struct Eager;

impl Path for Eager {
    fn send(&self, sending: &mut Sending, _: Number, wire: &mut Wire) -> Result<Step, Nonsense> {
        if let SendStage::Queued = sending.stage {
            let until = sending.length;
            sending.stage = SendStage::Streaming { sent: 0, receiver: None, until };
        }
        stream::send_fragment(sending, wire)
    }

    fn receive(
        &self,
        _: &mut Receiving,
        _: Number,
        _: &mut Wire,
        _: &Tools<'_>,
    ) -> Result<Step, Nonsense> {
        // Fragments come by themselves.
        Ok(Step::Idle)
    }
}
