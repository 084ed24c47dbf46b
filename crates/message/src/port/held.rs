//! Receives that are given up while their sender may still write to their memory: they end when it
//! cannot any more. Who handed over memory that can wait (an owned buffer) is told at once.

use std::any::Any;

use super::State;
use super::operations::Deed;
use crate::connection::Wire;
use crate::error::Error;
use crate::path::{self, Held, ReceiveStage};
use crate::quarantine::{self, Claim};
use crate::wire::Number;

impl State {
    /// Ends an operation whose connection is gone. A receive that has all its bytes ends well; one to
    /// which a live peer may still write ends when that is over.
    pub(super) fn abandon(&mut self, number: Number, wire: &mut Wire, error: &Error) {
        if let Some(receiving) = self.operations.receiving(number) {
            let claimed = match &receiving.stage {
                ReceiveStage::Arrived { .. } => return self.complete_receive(number),
                ReceiveStage::Held(_) => return,
                ReceiveStage::Fetching(fetch) => path::of(fetch.plan.path).give_up(receiving, wire),
                _ => None,
            };
            let claim = claimed.map(|claimed| Claim::new(wire.writer(), claimed));
            if let Some(claim) = claim.filter(Claim::is_held) {
                tracing::debug!("a peer holds on to the memory of a message that has ended");
                // Whoever dropped an owned buffer has left it to this library.
                if let Some(buffer) = self.operations.take_detached(number) {
                    quarantine::keep(vec![claim.clone()], buffer);
                }
                let held = Box::new(Held { claim, error: error.clone() });
                if let Some(receiving) = self.operations.receiving(number) {
                    receiving.stage = ReceiveStage::Held(held);
                    self.held.push(number);
                    // Whoever sleeps for it must look again now and then: the peer does not ring.
                    self.has_news = true;
                }
                return;
            }
        }
        self.operations.finish(number, Err(error.clone()));
    }

    /// Ends those receives whose memory nobody writes any more. Returns whether there were any.
    #[cold]
    pub(super) fn release_held(&mut self) -> bool {
        let mut held = std::mem::take(&mut self.held);
        let before = held.len();
        held.retain(|&number| {
            let Some(receiving) = self.operations.receiving(number) else { return false };
            let ReceiveStage::Held(held) = &receiving.stage else { return false };
            if held.claim.is_held() {
                return true;
            }
            let error = held.error.clone();
            self.operations.finish(number, Err(error));
            false
        });
        self.held = held;
        self.held.len() < before
    }

    /// How a receive ended whose memory a peer may still write.
    pub(crate) fn held_error(&mut self, number: Number) -> Option<Error> {
        if self.held.is_empty() {
            return None;
        }
        match &self.operations.receiving(number)?.stage {
            ReceiveStage::Held(held) => Some(held.error.clone()),
            _ => None,
        }
    }

    /// Leaves the buffer of a held receive to this library, and ends the receive. Gives the buffer
    /// back if the receive is not held.
    pub(crate) fn leave_held(
        &mut self,
        number: Number,
        buffer: Box<dyn Any + Send>,
    ) -> Result<Error, Box<dyn Any + Send>> {
        let Some(receiving) = self.operations.receiving(number) else { return Err(buffer) };
        let ReceiveStage::Held(held) = &receiving.stage else { return Err(buffer) };
        let (claim, error) = (held.claim.clone(), held.error.clone());
        quarantine::keep(vec![claim], buffer);
        self.held.retain(|held| *held != number);
        self.operations.finish(number, Err(error.clone()));
        Ok(error)
    }

    /// Whether anything is under way, though the port may be closed: its memory is in use.
    pub(crate) fn is_any_underway(&mut self) -> bool {
        !self.operations.numbers(|_| true).is_empty()
    }

    /// Whether an operation is a receive that waits for its writer.
    pub(super) fn is_held(deed: &Deed) -> bool {
        matches!(deed, Deed::Receive(receiving) if matches!(receiving.stage, ReceiveStage::Held(_)))
    }
}
