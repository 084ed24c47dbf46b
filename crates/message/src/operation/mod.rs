//! Handles of operations in flight, one for each kind of memory ownership.
//!
//! [`Operation`] is an operation on raw memory, [`OwnedOperation`] owns the buffer of one, and
//! [`OperationScope`] borrows memory. All of them can be tested, waited for, cancelled, awaited, and
//! signalled by an eventfd, by the same calls: `is_done`, `wait`, `wait_timeout`, `cancel`, `event`, and
//! `.await`, which returns what `wait` returns. A message is received as a whole: there is no `ready` and no
//! `wait_range` as copies have them.

mod owned;
mod scoped;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;

use crate::control::OperationId;
use crate::error::{Error, OperationName};
use crate::port::{MessageStatus, Port, Started};
pub(crate) use owned::InFlightBuffer;
pub use owned::{FailedOperation, OwnedOperation};
pub(crate) use scoped::scope;
pub use scoped::{OperationScope, ScopedOperation};

/// A send or receive, complete or in flight.
///
/// Dropping the handle does not end the operation: it makes progress in other calls of its endpoint or link,
/// and its memory must stay valid until it completes.
///
/// ```
/// use memferry::message::Endpoint;
///
/// let endpoint = Endpoint::open("doc-operation")?;
/// let own = endpoint.self_peer()?;
/// let (message, mut buffer) = (b"hello", [0; 5]);
/// // SAFETY: both arrays live until both waits are over, and nothing else touches them.
/// let (mut send, mut receive) = unsafe {
///     let receive = endpoint.irecv_raw(own, 1, u64::MAX, buffer.as_mut_ptr(), 5)?;
///     (endpoint.isend_raw(own, 1, message.as_ptr(), 5)?, receive)
/// };
/// receive.wait()?;
/// send.wait()?;
/// assert_eq!(&buffer, message);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Operation {
    port: Arc<Port>,
    state: HandleState,
}

enum HandleState {
    Completed(Result<MessageStatus, Error>),
    Pending(OperationId),
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Operation");
        match &self.state {
            HandleState::Completed(Ok(MessageStatus { source, tag, length })) => {
                shown.field("peer", &source.index).field("tag", tag).field("length", length);
                shown.field("state", &"complete");
            }
            HandleState::Completed(Err(error)) => {
                shown.field("state", &"failed").field("error", error);
            }
            HandleState::Pending(number) => {
                let Some(found) = self.port.operation_info(*number) else {
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
    pub(crate) fn new(port: &Arc<Port>, begun: Started) -> Self {
        let state = match begun {
            Started::Completed(outcome) => HandleState::Completed(outcome),
            Started::Pending(number) => HandleState::Pending(number),
        };
        Self { port: port.clone(), state }
    }

    /// The number of the operation, while it is in flight.
    fn number(&self) -> Option<OperationId> {
        match self.state {
            HandleState::Completed(_) => None,
            HandleState::Pending(number) => Some(number),
        }
    }

    /// Makes progress, and returns the result if the operation is complete. Another call returns the same
    /// result.
    pub fn test(&mut self) -> Option<Result<MessageStatus, Error>> {
        let HandleState::Pending(number) = self.state else { return self.outcome() };
        if let Err(error) = self.port.check_fork() {
            return Some(Err(error));
        }
        let mut state = self.port.lock();
        state.progress();
        state.check_peers(false);
        let outcome = state.protocol.operations.take_outcome(number)?;
        drop(state);
        self.state = HandleState::Completed(outcome);
        self.outcome()
    }

    /// Makes progress, and returns whether the operation is complete, failed ones included.
    pub fn is_done(&mut self) -> bool {
        self.test().is_some()
    }

    /// The result, if this handle has seen the completion. Makes no progress.
    pub fn outcome(&self) -> Option<Result<MessageStatus, Error>> {
        match &self.state {
            HandleState::Completed(outcome) => Some(outcome.clone()),
            HandleState::Pending(_) => None,
        }
    }

    /// Waits for the completion. Another call returns the same result.
    ///
    /// A receive that ends early, because its endpoint closes or its peer violates the protocol, is not
    /// complete while the peer may still write to its memory. A stopped process may write until it continues
    /// or exits.
    pub fn wait(&mut self) -> Result<MessageStatus, Error> {
        self.wait_until(None).expect("a wait without a deadline returns a result")
    }

    /// Waits for the completion, at most `timeout`; `None` if the operation is not complete then.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<MessageStatus, Error>> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&mut self, deadline: Option<Instant>) -> Option<Result<MessageStatus, Error>> {
        self.wait_for(deadline, |_, _| None)
    }

    /// As [`Operation::wait`] with a deadline, for a caller that can leave the memory in quarantine: the call
    /// does not wait for a stopped peer that may still write to the memory, and the operation stays in
    /// flight.
    fn wait_unless_quiescing(
        &mut self,
        deadline: Option<Instant>,
    ) -> Option<Result<MessageStatus, Error>> {
        self.wait_for(deadline, |state, number| state.protocol.quiesce_error(number))
    }

    fn wait_for(
        &mut self,
        deadline: Option<Instant>,
        left: impl Fn(&mut crate::port::PortState, OperationId) -> Option<Error>,
    ) -> Option<Result<MessageStatus, Error>> {
        if let HandleState::Pending(number) = self.state {
            if let Err(error) = self.port.check_fork() {
                return Some(Err(error));
            }
            // A progress step may take longer than the deadline permits.
            if deadline.is_none() {
                self.port.help_rma(number);
            }
            let found = self.port.block(true, deadline, |state| {
                let over = state.protocol.operations.take_outcome(number).map(Ok);
                over.or_else(|| left(state, number).map(Err))
            });
            match found? {
                Ok(outcome) => self.state = HandleState::Completed(outcome),
                Err(error) => return Some(Err(error)),
            }
        }
        self.outcome()
    }

    /// The error of the operation, if it only waits for a stopped peer that may still write to its memory.
    fn quiesce_error(&self) -> Option<Error> {
        let HandleState::Pending(number) = self.state else { return None };
        self.port.check_fork().ok()?;
        self.port.lock().protocol.quiesce_error(number)
    }

    /// Waits until one of several operations is complete, and returns its index. All must belong to one
    /// endpoint or link.
    ///
    /// # Panics
    /// When there are none, or they belong to several endpoints.
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
            operations[0].state = HandleState::Completed(Err(error));
            return 0;
        }
        let found = port.block(true, None, |state| {
            operations.iter().enumerate().find_map(|(index, operation)| match operation.state {
                HandleState::Completed(_) => Some((index, None)),
                HandleState::Pending(number) => state
                    .protocol
                    .operations
                    .take_outcome(number)
                    .map(|outcome| (index, Some(outcome))),
            })
        });
        let (index, outcome) = found.expect("a wait without a deadline returns a result");
        if let Some(outcome) = outcome {
            operations[index].state = HandleState::Completed(outcome);
        }
        index
    }

    /// What the operation is, for a message to the user: its bytes, tag and peer. Once it is complete, its
    /// status says more.
    pub fn name(&self) -> OperationName {
        match self.state {
            HandleState::Pending(number) if self.port.check_fork().is_ok() => {
                self.port.lock().protocol.operation_name(number)
            }
            _ => "operation".into(),
        }
    }

    /// Cancels the operation. A receive that no message has matched, and a send that no receive has matched,
    /// end with [`Error::Cancelled`]; other operations continue. Does not wait.
    pub fn cancel(&self) {
        if let HandleState::Pending(number) = self.state
            && self.port.check_fork().is_ok()
        {
            let mut state = self.port.lock();
            state.progress();
            state.protocol.cancel(number);
        }
    }

    /// A descriptor that becomes readable on completion, for `poll` and `epoll`. This call starts a progress
    /// thread for the endpoint.
    pub fn event(&self) -> Result<Arc<EventFd>, Error> {
        let system = crate::error::ConnectError::system("making an eventfd");
        let event = Arc::new(EventFd::new().map_err(system)?);
        match self.state {
            HandleState::Completed(_) => event.signal(),
            HandleState::Pending(number) => {
                self.port.check_fork()?;
                self.port.start_progress_thread()?;
                self.port.lock().protocol.operations.signal_on_completion(number, &event);
            }
        }
        Ok(event)
    }

    /// Detaches the operation from this handle, and keeps `buffer` until completion.
    fn detach(&mut self, buffer: Box<dyn std::any::Any + Send>) {
        if let HandleState::Pending(number) = self.state {
            self.port.lock().protocol.operations.detach(number, buffer);
            // No call finds this: the handle is being dropped.
            self.state = HandleState::Completed(Err(Error::Closed));
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
    type Output = Result<MessageStatus, Error>;

    /// Starts a progress thread for the endpoint if the operation is not complete.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.test() {
            return Poll::Ready(outcome);
        }
        let HandleState::Pending(number) = self.state else {
            unreachable!("the operation is pending")
        };
        let is_told = if self.quiesce_error().is_some() {
            // The endpoint's progress thread may have exited with it.
            crate::quarantine::watch(&Arc::downgrade(&self.port))
        } else {
            // A copy that is about to end is waited for by polling.
            !self.port.lock().protocol.is_quiescing(number)
                && self.port.start_progress_thread().is_ok()
        };
        if !is_told {
            // Without a thread the future is woken repeatedly: it is not complete, and must not
            // return a result.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let waker = context.waker().clone();
        if self.port.lock().protocol.operations.wake_on_completion(number, waker) {
            return Poll::Pending;
        }
        Poll::Ready(self.test().unwrap_or(Err(Error::Closed)))
    }
}
