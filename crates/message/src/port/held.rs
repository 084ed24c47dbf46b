//! Messages that have ended while somebody may still be at their memory: a peer that writes there, or a
//! thread of this process that copies. They are over when nobody is there any more. Who handed over
//! memory that can wait (an owned buffer) is told at once.

use std::any::Any;
use std::sync::Arc;

use memferry_sys::clock;

use super::operations::Deed;
use super::{Port, Received, State, Turn, turn};
use crate::connection::Wire;
use crate::error::Error;
use crate::path::{self, Copying, Held, ReceiveStage, SendStage, Step};
use crate::quarantine::{self, Claim};
use crate::wire::Number;

/// Copies of this process are given so long to come to their end before a buffer is given up for them.
const MOMENT_NS: u64 = 10_000_000;

impl Port {
    /// Ends messages whose memory is free. Returns whether any is still held.
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
    /// Ends an operation whose connection is gone. A receive that has all its bytes ends well; one whose
    /// memory is in use ends when that is over.
    pub(super) fn abandon(&mut self, number: Number, wire: &mut Wire, error: &Error) {
        if let Some(sending) = self.operations.sending(number) {
            if let SendStage::Held(_) = sending.stage {
                return;
            }
            let copying = sending.copying.take();
            let claims = copying.into_iter().map(|copying| claim(copying, wire)).collect();
            return self.end_when_free(number, claims, Err(error.clone()));
        }
        let Some(receiving) = self.operations.receiving(number) else {
            return self.operations.finish(number, Err(error.clone()));
        };
        let mut claims = Vec::new();
        match &mut receiving.stage {
            ReceiveStage::Arrived { .. } => return self.complete_receive(number),
            ReceiveStage::Held(_) => return,
            ReceiveStage::Fetching(fetch) => {
                if let Some(copying) = fetch.copying.take() {
                    claims.push(claim(copying, wire));
                }
                let path = path::of(fetch.plan.path);
                let claimed = path.give_up(receiving, wire);
                claims.extend(claimed.map(|claimed| Claim::new(wire.writer(), claimed)));
            }
            _ => {}
        }
        self.end_when_free(number, claims, Err(error.clone()));
    }

    /// Ends a send, unless a thread of this process still reads its memory: then it ends after that.
    pub(super) fn finish_send(&mut self, number: Number, outcome: Result<Received, Error>) {
        let Self { operations, peers, .. } = self;
        let Some(sending) = operations.sending(number) else { return };
        match sending.copying.take().filter(|copying| copying.is_under_way()) {
            None => operations.finish(number, outcome),
            Some(copying) => {
                let connection = peers[sending.peer].connection.as_mut();
                let wire =
                    &mut connection.expect("the end of a connection makes a claim of a copy").wire;
                let claims = vec![claim(copying, wire)];
                self.end_when_free(number, claims, outcome);
            }
        }
    }

    /// Ends an operation when nobody has a claim on its memory any more.
    fn end_when_free(
        &mut self,
        number: Number,
        mut claims: Vec<Claim>,
        outcome: Result<Received, Error>,
    ) {
        claims.retain(Claim::is_held);
        if claims.is_empty() {
            return self.operations.finish(number, outcome);
        }
        tracing::debug!("somebody holds on to the memory of a message that has ended");
        // Whoever dropped an owned buffer has left it to this library.
        if let Some(buffer) = self.operations.take_detached(number) {
            quarantine::keep(claims.clone(), buffer);
        }
        let is_peers = !claims.iter().all(Claim::is_local);
        let held = Box::new(Held { claims, outcome, since_ns: clock::now_ns() });
        match self.operations.get(number).map(|operation| &mut operation.deed) {
            Some(Deed::Receive(receiving)) => receiving.stage = ReceiveStage::Held(held),
            Some(Deed::Send(sending)) => sending.stage = SendStage::Held(held),
            _ => return,
        }
        self.held.push(number);
        // An awaited one is asked again: its buffer may be left behind.
        self.operations.wake_now(number);
        // Whoever sleeps for it must look again now and then: the peer does not ring.
        self.has_news = true;
        // Nor does it wake whoever awaits it, or has a descriptor. A thread of this process does.
        if is_peers {
            quarantine::watch(&self.me);
        }
    }

    /// What a message waits for that has ended.
    fn held(&mut self, number: Number) -> Option<&Held> {
        let operation = self.operations.get(number).filter(|found| found.outcome.is_none())?;
        match &operation.deed {
            Deed::Receive(receiving) => match &receiving.stage {
                ReceiveStage::Held(held) => Some(held),
                _ => None,
            },
            Deed::Send(sending) => match &sending.stage {
                SendStage::Held(held) => Some(held),
                _ => None,
            },
            _ => None,
        }
    }

    /// Ends those messages whose memory is free. Returns whether there were any.
    #[cold]
    pub(super) fn release_held(&mut self) -> bool {
        let mut numbers = std::mem::take(&mut self.held);
        let before = numbers.len();
        numbers.retain(|&number| {
            let Some(held) = self.held(number) else { return false };
            if held.claims.iter().any(Claim::is_held) {
                return true;
            }
            let outcome = held.outcome.clone();
            self.operations.finish(number, outcome);
            false
        });
        self.held = numbers;
        self.held.len() < before
    }

    /// Whether a message has ended and waits for its memory.
    pub(crate) fn awaits_memory(&mut self, number: Number) -> bool {
        !self.held.is_empty() && self.held(number).is_some()
    }

    /// How a message failed whose memory stays in use. A thread of this process is most likely out of it
    /// in a moment, so that is waited for.
    pub(crate) fn held_error(&mut self, number: Number) -> Option<Error> {
        if self.held.is_empty() {
            return None;
        }
        let held = self.held(number)?;
        let is_soon_free = held.claims.iter().all(Claim::is_local)
            && clock::now_ns().saturating_sub(held.since_ns) < MOMENT_NS;
        held.outcome.as_ref().err().filter(|_| !is_soon_free).cloned()
    }

    /// Leaves the buffer of a message that has failed to this library, and ends the message. Gives the
    /// buffer back if nobody is at its memory.
    pub(crate) fn leave_held(
        &mut self,
        number: Number,
        buffer: Box<dyn Any + Send>,
    ) -> Result<Error, Box<dyn Any + Send>> {
        let Some(held) = self.held(number) else { return Err(buffer) };
        let Err(error) = held.outcome.clone() else { return Err(buffer) };
        quarantine::keep(held.claims.clone(), buffer);
        self.held.retain(|held| *held != number);
        self.operations.finish(number, Err(error.clone()));
        Ok(error)
    }

    /// Begins to copy a message whose sender's memory may never come, unless another one of the same
    /// peer is being copied so: one peer has one thread. Returns `false` if no thread can be started.
    pub(super) fn begin_slow(&mut self, peer: usize, number: Number) -> bool {
        let Self { operations, peers, me, .. } = self;
        let Some(connection) = peers[peer].connection.as_mut() else { return true };
        if connection.slow.as_ref().is_some_and(|copying| copying.is_under_way()) {
            return true;
        }
        let Some(receiving) = operations.receiving(number) else { return true };
        let accepted = receiving.accepted();
        let ReceiveStage::Fetching(fetch) = &mut receiving.stage else { return true };
        // SAFETY: the operation is under way, so its owner vouches for the pieces, and it is not over
        // before the copy is: `abandon` makes a claim of it.
        let copying = unsafe { path::start_slow(fetch, accepted) };
        let is_started = copying.run_by_thread(me.clone());
        if is_started {
            connection.slow = Some(copying.clone());
            fetch.copying = Some(copying);
        }
        is_started
    }

    /// Lets a thread of its own help a receiver whose memory may never come, unless one does so already
    /// for another message to the same peer: then the receiver copies alone.
    pub(super) fn begin_slow_help(&mut self, peer: usize, number: Number) {
        let generation = self.peers[peer].generation;
        let Some(connection) = self.peers[peer].connection.as_mut() else { return };
        if connection.slow_help.is_some() {
            return;
        }
        let port = self.me.clone();
        let help = move || {
            // The port stays while this thread copies: the buffer of a message may be kept there.
            while let Some(port) = port.upgrade() {
                let next = port.enter().next_slow_help((peer, generation), number);
                let Some(copying) = next else { break };
                copying.run();
            }
            if let Some(port) = port.upgrade() {
                port.enter().step_all();
            }
        };
        let thread = memferry_sys::thread::spawn("memferry-slow", help);
        connection.slow_help = thread.is_ok().then_some(number);
    }

    /// The next chunk that a thread of its own copies for the sender. `None` if there is none.
    fn next_slow_help(
        &mut self,
        (peer, generation): (usize, u32),
        number: Number,
    ) -> Option<Arc<Copying>> {
        let Self { operations, peers, .. } = self;
        let slot = peers.get_mut(peer).filter(|slot| slot.generation == generation)?;
        let connection = slot.connection.as_mut()?;
        if connection.slow_help != Some(number) {
            return None;
        }
        let is_alive = connection.wire.is_surely_alive();
        let sending = operations.sending(number).filter(|sending| sending.helps_slowly());
        let copying = sending.filter(|_| is_alive).and_then(|sending| {
            let mut turn = Turn { may_copy: true, ..turn(number, &mut connection.wire) };
            // What makes no sense is found by whoever reads the claims next.
            let step = path::of(sending.path).send(sending, &mut turn).ok()?;
            sending.copying.clone().filter(|_| step == Step::Copy)
        });
        connection.wire.announce();
        if copying.is_none() {
            connection.slow_help = None;
        }
        copying
    }

    /// Whether anything is under way, though the port may be closed: its memory is in use.
    pub(crate) fn is_any_underway(&self) -> bool {
        !self.operations.numbers(|_| true).is_empty()
    }

    /// Whether an operation has ended and waits for its memory.
    pub(super) fn is_held(deed: &Deed) -> bool {
        match deed {
            Deed::Receive(receiving) => matches!(receiving.stage, ReceiveStage::Held(_)),
            Deed::Send(sending) => matches!(sending.stage, SendStage::Held(_)),
            _ => false,
        }
    }
}

/// The claim of a thread that copies, which is to stop.
fn claim(copying: Arc<Copying>, wire: &mut Wire) -> Claim {
    copying.cancel();
    Claim::Copy { copying, _writer: wire.writer() }
}
