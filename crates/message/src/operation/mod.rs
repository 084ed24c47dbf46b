//! Handles of messages under way, for each way of handing over memory.
//!
//! [`Operation`] names a message over raw memory, [`OwnedOperation`] holds the buffer of one, and
//! [`Scope`] lends memory for a while. All of them can be tested, waited for, cancelled, awaited,
//! and signalled by an eventfd.

mod owned;
mod scoped;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;

use crate::error::Error;
use crate::port::{Begun, Port, Received};
use crate::wire::Number;
pub(crate) use owned::Held;
pub use owned::{Failed, OwnedOperation};
pub(crate) use scoped::scope;
pub use scoped::{Scope, ScopedOperation};

/// A send or receive, over or under way.
///
/// Dropping it changes nothing: the message goes on in other calls to its endpoint or link, and its
/// memory must stay valid until it is over.
pub struct Operation {
    port: Arc<Port>,
    state: State,
}

enum State {
    Over(Result<Received, Error>),
    Underway(Number),
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Operation");
        match &self.state {
            State::Over(Ok(Received { source, tag, length })) => {
                shown.field("peer", &source.index).field("tag", tag).field("length", length);
                shown.field("state", &"complete");
            }
            State::Over(Err(error)) => {
                shown.field("state", &"failed").field("error", error);
            }
            State::Underway(number) => {
                let Some(found) = self.port.show(*number) else {
                    return shown.field("state", &"in progress").finish_non_exhaustive();
                };
                shown.field("kind", &found.kind);
                if let Some(peer) = found.peer {
                    shown.field("peer", &peer);
                }
                if let Some((tag, length)) = found.message {
                    shown.field("tag", &tag).field("length", &length);
                }
                shown.field("state", &found.state);
            }
        }
        shown.finish()
    }
}

impl Operation {
    pub(crate) fn new(port: &Arc<Port>, begun: Begun) -> Self {
        let state = match begun {
            Begun::Over(outcome) => State::Over(outcome),
            Begun::Underway(number) => State::Underway(number),
        };
        Self { port: port.clone(), state }
    }

    /// Its number, while it is under way.
    fn number(&self) -> Option<Number> {
        match self.state {
            State::Over(_) => None,
            State::Underway(number) => Some(number),
        }
    }

    /// Whether it is over, and how it ended; moves messages on. Asking again gives the same answer.
    pub fn test(&mut self) -> Option<Result<Received, Error>> {
        let State::Underway(number) = self.state else { return self.outcome() };
        if let Err(error) = self.port.check_fork() {
            return Some(Err(error));
        }
        let mut state = self.port.enter();
        state.progress();
        state.check_peers(false);
        let outcome = state.operations.take_outcome(number)?;
        drop(state);
        self.state = State::Over(outcome);
        self.outcome()
    }

    /// How it ended, if this handle has seen the end; moves nothing.
    pub fn outcome(&self) -> Option<Result<Received, Error>> {
        match &self.state {
            State::Over(outcome) => Some(outcome.clone()),
            State::Underway(_) => None,
        }
    }

    /// Waits for the end. Waiting again gives the same answer.
    ///
    /// A receive that ends early, because its endpoint closes or its peer misbehaves, is not over
    /// while the peer may still write to its memory: that of a stopped process, until it goes on or
    /// is ended.
    pub fn wait(&mut self) -> Result<Received, Error> {
        self.wait_until(None).expect("without a deadline it ends")
    }

    /// Waits for the end at most so long; `None` if it is not over then.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<Received, Error>> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&mut self, deadline: Option<Instant>) -> Option<Result<Received, Error>> {
        self.wait_for(deadline, |_, _| None)
    }

    /// The same for whoever can leave the memory behind: a receive whose memory a stopped peer may
    /// still write is not waited for, but stays under way.
    fn wait_unless_held(&mut self, deadline: Option<Instant>) -> Option<Result<Received, Error>> {
        self.wait_for(deadline, crate::port::State::held_error)
    }

    fn wait_for(
        &mut self,
        deadline: Option<Instant>,
        left: impl Fn(&mut crate::port::State, Number) -> Option<Error>,
    ) -> Option<Result<Received, Error>> {
        if let State::Underway(number) = self.state {
            if let Err(error) = self.port.check_fork() {
                return Some(Err(error));
            }
            // Helping may take longer than whoever has a deadline would wait.
            if deadline.is_none() {
                self.port.help_accesses(number);
            }
            let found = self.port.block(true, deadline, |state| {
                let over = state.operations.take_outcome(number).map(Ok);
                over.or_else(|| left(state, number).map(Err))
            });
            match found? {
                Ok(outcome) => self.state = State::Over(outcome),
                Err(error) => return Some(Err(error)),
            }
        }
        self.outcome()
    }

    /// How it ended, if nothing is left of it but a stopped peer that may still write to its memory.
    fn held_error(&self) -> Option<Error> {
        let State::Underway(number) = self.state else { return None };
        self.port.check_fork().ok()?;
        self.port.enter().held_error(number)
    }

    /// Waits until one of several is over; returns which. All must be of one endpoint or link.
    ///
    /// # Panics
    /// When there are none, or they are of several endpoints.
    pub fn wait_any(operations: &mut [&mut Self]) -> usize {
        let port = operations.first().expect("something to wait for").port.clone();
        assert!(
            operations.iter().all(|operation| Arc::ptr_eq(&operation.port, &port)),
            "operations of several endpoints cannot be waited for together"
        );
        if let Some(index) = operations.iter_mut().position(|o| o.outcome().is_some()) {
            return index;
        }
        if let Err(error) = port.check_fork() {
            operations[0].state = State::Over(Err(error));
            return 0;
        }
        let found = port.block(true, None, |state| {
            operations.iter().enumerate().find_map(|(index, operation)| match operation.state {
                State::Over(_) => Some((index, None)),
                State::Underway(number) => {
                    state.operations.take_outcome(number).map(|outcome| (index, Some(outcome)))
                }
            })
        });
        let (index, outcome) = found.expect("without a deadline something is found");
        if let Some(outcome) = outcome {
            operations[index].state = State::Over(outcome);
        }
        index
    }

    /// Asks for an early end. A receive that no message has met, and a send that no receive has
    /// met, end as [`Error::Cancelled`]; others end as if this had not been called. Does not wait.
    pub fn cancel(&self) {
        if let State::Underway(number) = self.state
            && self.port.check_fork().is_ok()
        {
            let mut state = self.port.enter();
            state.progress();
            state.cancel(number);
        }
    }

    /// A descriptor that becomes readable when it is over, for `poll` and `epoll`. The endpoint
    /// then moves messages in the background.
    pub fn event(&self) -> Result<Arc<EventFd>, Error> {
        let system = crate::error::ConnectError::system("making an eventfd");
        let event = Arc::new(EventFd::new().map_err(system)?);
        match self.state {
            State::Over(_) => event.signal(),
            State::Underway(number) => {
                self.port.check_fork()?;
                self.port.run_in_background()?;
                self.port.enter().operations.signal_at_end(number, &event);
            }
        }
        Ok(event)
    }

    /// Nobody will ask any more: keeps `buffer` until the end.
    fn detach(&mut self, buffer: Box<dyn std::any::Any + Send>) {
        if let State::Underway(number) = self.state {
            self.port.enter().operations.detach(number, buffer);
            self.state = State::Over(Err(Error::Cancelled));
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.port.check_fork().is_ok() {
            self.detach(Box::new(()));
        }
    }
}

impl Future for Operation {
    type Output = Result<Received, Error>;

    /// An endpoint whose operations are awaited moves messages in the background.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.test() {
            return Poll::Ready(outcome);
        }
        let State::Underway(number) = self.state else { unreachable!("it is not over") };
        let is_told = if self.held_error().is_some() {
            // The thread of the endpoint may have ended with it.
            crate::quarantine::watch(&Arc::downgrade(&self.port))
        } else {
            // A copy that is about to end is waited for a moment.
            !self.port.enter().awaits_memory(number) && self.port.run_in_background().is_ok()
        };
        if !is_told {
            // Without a thread it is asked again and again: it is not over, and must not say so.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let waker = context.waker().clone();
        if self.port.enter().operations.wake_at_end(number, waker) {
            return Poll::Pending;
        }
        Poll::Ready(self.test().unwrap_or(Err(Error::Closed)))
    }
}
