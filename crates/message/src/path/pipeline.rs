//! `pipeline`: the payload goes through the bounce ring in fragments, after the receiver's reply.
//! It takes two copies, and needs no access to the peer's memory.

use super::{
    MessagePath, PipelineRequest, ReceiveStage, Receiving, SendStage, Sending, StepContext,
    StepResult, send_rts, stream,
};
use crate::control::{ControlMessage, RendezvousMode};
use crate::ring::cells::ProtocolError;

pub(super) struct Pipeline;

impl MessagePath for Pipeline {
    fn send(
        &self,
        sending: &mut Sending,
        context: &mut StepContext<'_>,
    ) -> Result<StepResult, ProtocolError> {
        match sending.stage {
            SendStage::Queued => send_rts(sending, context),
            SendStage::Streaming { .. } => {
                match stream::send_fragment(sending, context.connection)? {
                    // The receiver's FIN completes the message, after the receiver has copied the last
                    // byte.
                    StepResult::Done => Ok(StepResult::Idle),
                    step => Ok(step),
                }
            }
            _ => Ok(StepResult::Idle),
        }
    }

    fn begin(
        &self,
        receiving: &mut Receiving,
        context: &mut StepContext<'_>,
    ) -> Result<(), ProtocolError> {
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &receiving.stage else { return Ok(()) };
        let sender = fetch.sender;
        let mode = RendezvousMode::Pipeline;
        // The sender does not send the bytes that do not fit.
        context.connection.send_control(ControlMessage::Cts {
            sender,
            receiver: context.operation,
            length: accepted,
            mode,
        });
        // The sender sends the fragments next; a message of which no byte is accepted has none.
        if accepted > 0 {
            let prefaulted = fetch.plan.prefault.ends.target.then_some(0);
            let requested = Some(PipelineRequest { sender, prefaulted });
            receiving.stage = ReceiveStage::Arriving { arrived: 0, requested };
        }
        Ok(())
    }
}
