//! Receives that are given up while their sender may still write to their memory: they end when it
//! cannot any more. Who handed over memory that can wait (an owned buffer) is told at once.

use std::any::Any;
use std::sync::Arc;

use super::operations::Deed;
use super::{Port, State};
use crate::connection::Wire;
use crate::error::Error;
use crate::path::{self, Held, ReceiveStage, Slow, SlowCopy};
use crate::quarantine::{self, Claim};
use crate::wire::Number;

impl Port {
    /// Ends receives whose memory nobody writes any more. Returns whether any is still held.
    pub(crate) fn release_held(&self) -> bool {
        if self.check_fork().is_err() {
            return false;
        }
        let mut state = self.enter();
        state.release_held();
        !state.held.is_empty()
    }
}

impl State {
    /// Ends an operation whose connection is gone. A receive that has all its bytes ends well; one to
    /// which a live peer may still write ends when that is over.
    pub(super) fn abandon(&mut self, number: Number, wire: &mut Wire, error: &Error) {
        if let Some(receiving) = self.operations.receiving(number) {
            let mut claims = Vec::new();
            match &receiving.stage {
                ReceiveStage::Arrived { .. } => return self.complete_receive(number),
                ReceiveStage::Held(_) => return,
                ReceiveStage::Fetching(fetch) => {
                    if let Some(Slow::Copying(copy)) = &fetch.slow {
                        copy.cancel();
                        let copy = copy.clone();
                        claims.push(Claim::Copy { copy, _writer: wire.writer() });
                    }
                    let claimed = path::of(fetch.plan.path).give_up(receiving, wire);
                    claims.extend(claimed.map(|claimed| Claim::new(wire.writer(), claimed)));
                }
                _ => {}
            }
            claims.retain(Claim::is_held);
            if !claims.is_empty() {
                tracing::debug!("somebody holds on to the memory of a message that has ended");
                // Whoever dropped an owned buffer has left it to this library.
                if let Some(buffer) = self.operations.take_detached(number) {
                    quarantine::keep(claims.clone(), buffer);
                }
                let held = Box::new(Held { claims, error: error.clone() });
                if let Some(receiving) = self.operations.receiving(number) {
                    receiving.stage = ReceiveStage::Held(held);
                    self.held.push(number);
                    // Whoever sleeps for it must look again now and then: the peer does not ring.
                    self.has_news = true;
                    // Nor does it wake whoever awaits it, or has a descriptor.
                    quarantine::watch(&self.me);
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
            if held.claims.iter().any(Claim::is_held) {
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
        let (claims, error) = (held.claims.clone(), held.error.clone());
        quarantine::keep(claims, buffer);
        self.held.retain(|held| *held != number);
        self.operations.finish(number, Err(error.clone()));
        Ok(error)
    }

    /// Begins to copy a message whose sender's memory may never come, unless another one of the same
    /// peer is being copied so: one peer has one thread. Returns `false` if no thread can be started.
    pub(super) fn begin_slow(&mut self, peer: usize, number: Number) -> bool {
        let Self { operations, peers, me, .. } = self;
        let Some(connection) = peers[peer].connection.as_mut() else { return true };
        let is_busy = |copy: &Arc<SlowCopy>| copy.outcome().is_none();
        if connection.slow.as_ref().is_some_and(is_busy) {
            return true;
        }
        let Some(receiving) = operations.receiving(number) else { return true };
        let length = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return true };
        if !matches!(fetch.slow, Some(Slow::Waiting)) {
            return true;
        }
        // SAFETY: the operation is under way, so its owner vouches for the pieces, and it is not over
        // before the copy is: `abandon` makes a claim of it.
        let started =
            unsafe { SlowCopy::start(&fetch.source, &receiving.pieces, length, me.clone()) };
        connection.slow = started.clone();
        fetch.slow = started.map(Slow::Copying);
        fetch.slow.is_some()
    }

    /// Whether anything is under way, though the port may be closed: its memory is in use.
    pub(crate) fn is_any_underway(&self) -> bool {
        !self.operations.numbers(|_| true).is_empty()
    }

    /// Whether an operation is a receive that waits for its writer.
    pub(super) fn is_held(deed: &Deed) -> bool {
        matches!(deed, Deed::Receive(receiving) if matches!(receiving.stage, ReceiveStage::Held(_)))
    }
}
