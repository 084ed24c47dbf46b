//! Operations that own their buffers, and return them on completion.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;

use super::Operation;
use crate::control::OperationId;
use crate::error::{Error, OperationName};
use crate::port::MessageStatus;

/// A buffer in flight. `MaybeUninit` keeps the compiler from assuming that no other code accesses the memory
/// that it points to.
pub(crate) struct InFlightBuffer<B>(MaybeUninit<B>);

impl<B> InFlightBuffer<B> {
    pub(crate) fn new(buffer: B) -> Self {
        Self(MaybeUninit::new(buffer))
    }

    /// The buffer at its final address. The address of a boxed buffer must be taken from here, because
    /// another move of the box would invalidate pointers that were taken before.
    pub(crate) fn get_mut(&mut self) -> &mut B {
        // SAFETY: initialised since construction.
        unsafe { self.0.assume_init_mut() }
    }

    pub(crate) fn into_inner(self) -> B {
        let this = ManuallyDrop::new(self);
        // SAFETY: initialised since construction, and read once: `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<B> Drop for InFlightBuffer<B> {
    fn drop(&mut self) {
        // SAFETY: initialised since construction, and `into_inner` does not run the destructor.
        unsafe { self.0.assume_init_drop() };
    }
}

/// The failure of an operation on an owned buffer, with the buffer if it can be returned.
///
/// ```
/// use memferry::message::{Endpoint, Error, TAG_ALL};
///
/// let endpoint = Endpoint::open("doc-failed")?;
/// let own = endpoint.self_peer()?;
/// let receive = endpoint.irecv(own, 1, TAG_ALL, vec![0u8; 3])?;
/// receive.cancel();
/// let failed = receive.wait().unwrap_err();
/// assert!(matches!(failed.error, Error::Cancelled(_)) && failed.buffer == Some(vec![0; 3]));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct FailedOperation<B> {
    /// The error.
    pub error: Error,
    /// The returned buffer. Its content after a failed receive is unspecified, except for a truncated
    /// message, which fills the buffer.
    ///
    /// `None` if the sender is alive, was stopped while it wrote to the buffer, and has not continued: it may
    /// still write. The buffer stays in quarantine until the sender cannot write to it any more, and is then
    /// freed ([`crate::quarantined_buffers`]).
    pub buffer: Option<B>,
}

impl<B> fmt::Debug for FailedOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailedOperation").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for FailedOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for FailedOperation<B> {
    /// The cause of the error. The text of this error is that of the error itself.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// A send or receive that owns its buffer and returns it on completion. Also a future.
///
/// If the handle is dropped before completion, a send continues and a receive is cancelled; the buffer is
/// freed on completion.
///
/// ```
/// use memferry::message::{Endpoint, TAG_ALL};
///
/// let endpoint = Endpoint::open("doc-owned")?;
/// let own = endpoint.self_peer()?;
/// let receive = endpoint.irecv(own, 1, TAG_ALL, vec![0u32; 3])?;
/// endpoint.isend(own, 1, vec![1u32, 2, 3])?.wait()?;
/// let (status, buffer) = receive.wait()?; // or: receive.await?
/// assert_eq!((status.length, buffer), (12, vec![1, 2, 3]));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the buffer comes back from `wait`"]
pub struct OwnedOperation<B: Send + 'static> {
    operation: Operation,
    /// The operation that uses the buffer, even if `operation` was swapped for another handle.
    number: Option<OperationId>,
    buffer: Option<InFlightBuffer<B>>,
    is_receive: bool,
}

impl<B: Send + 'static> fmt::Debug for OwnedOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedOperation").field("operation", &self.operation).finish_non_exhaustive()
    }
}

impl<B: Send + 'static> OwnedOperation<B> {
    /// Takes the buffer, then starts the operation on it with `begin`.
    pub(crate) fn begin(
        buffer: B,
        is_receive: bool,
        begin: impl FnOnce(&mut B) -> Result<Operation, Error>,
    ) -> Result<Self, FailedOperation<B>> {
        let mut held = InFlightBuffer::new(buffer);
        match begin(held.get_mut()) {
            Ok(operation) => {
                let number = operation.number();
                Ok(Self { operation, number, buffer: Some(held), is_receive })
            }
            Err(error) => Err(FailedOperation { error, buffer: Some(held.into_inner()) }),
        }
    }

    /// Cancels the operation, as [`Operation::cancel`] does.
    pub fn cancel(&self) {
        self.operation.cancel();
    }

    /// A descriptor that becomes readable on completion, as [`Operation::event`] returns it.
    pub fn event(&self) -> Result<Arc<EventFd>, Error> {
        self.operation.event()
    }

    /// The operation without the buffer, for [`Operation::test`] and [`Operation::wait_any`].
    pub fn operation(&mut self) -> &mut Operation {
        &mut self.operation
    }

    /// What the operation is, for a message to the user: its bytes, tag and peer.
    pub fn name(&self) -> OperationName {
        self.operation.name()
    }

    /// Makes progress, and returns whether the operation is complete.
    pub fn is_done(&mut self) -> bool {
        self.operation.test().is_some() || self.operation.quiesce_error().is_some()
    }

    /// Waits for the completion and returns the buffer.
    pub fn wait(mut self) -> Result<(MessageStatus, B), FailedOperation<B>> {
        let outcome = self
            .operation
            .wait_unless_quiescing(None)
            .expect("a wait without a deadline returns a result");
        self.return_buffer(outcome)
    }

    /// Waits for the completion, at most `timeout`; returns the handle if the operation is not complete then.
    pub fn wait_timeout(
        mut self,
        timeout: Duration,
    ) -> Result<Result<(MessageStatus, B), FailedOperation<B>>, Self> {
        match self.operation.wait_unless_quiescing(Instant::now().checked_add(timeout)) {
            Some(outcome) => Ok(self.return_buffer(outcome)),
            None => Err(self),
        }
    }

    fn return_buffer(
        &mut self,
        outcome: Result<MessageStatus, Error>,
    ) -> Result<(MessageStatus, B), FailedOperation<B>> {
        let held = self.buffer.take().expect("the buffer is returned once");
        // The handle may have been swapped for that of another operation: the buffer is returned only when
        // its own operation is complete.
        if let Some(number) = self.number
            && self.operation.port.check_fork().is_ok()
        {
            let port = &self.operation.port;
            let is_held = port.block(true, None, |state| {
                match state.protocol.operations.is_complete(number) {
                    true => Some(false),
                    false => state.protocol.quiesce_error(number).map(|_| true),
                }
            });
            if is_held == Some(true) {
                let kept: Box<dyn Any + Send> = Box::new(held);
                let left = port.lock().protocol.quarantine_buffer(number, kept);
                return match left {
                    Ok(error) => Err(FailedOperation { error, buffer: None }),
                    // The writer has finished in between.
                    Err(kept) => {
                        let held = kept
                            .downcast::<InFlightBuffer<B>>()
                            .expect("the type of the buffer above");
                        Self::outcome_with(outcome, held.into_inner())
                    }
                };
            }
        }
        Self::outcome_with(outcome, held.into_inner())
    }

    fn outcome_with(
        outcome: Result<MessageStatus, Error>,
        buffer: B,
    ) -> Result<(MessageStatus, B), FailedOperation<B>> {
        match outcome {
            Ok(received) => Ok((received, buffer)),
            Err(error) => Err(FailedOperation { error, buffer: Some(buffer) }),
        }
    }
}

impl<B: Send + 'static> Drop for OwnedOperation<B> {
    fn drop(&mut self) {
        let Some(held) = self.buffer.take() else { return };
        let port = &self.operation.port;
        match self.number {
            Some(number) if port.check_fork().is_ok() => {
                let mut state = port.lock();
                state.progress();
                if self.is_receive {
                    state.protocol.cancel(number);
                }
                // A buffer that a peer may still write to outlives even the endpoint.
                if let Err(held) = state.protocol.quarantine_buffer(number, Box::new(held)) {
                    state.protocol.operations.detach(number, held);
                }
            }
            _ => drop(held),
        }
    }
}

impl<B: Send + Unpin + 'static> Future for OwnedOperation<B> {
    type Output = Result<(MessageStatus, B), FailedOperation<B>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.operation).poll(context) {
            Poll::Ready(outcome) => Poll::Ready(self.return_buffer(outcome)),
            Poll::Pending => match self.operation.quiesce_error() {
                Some(error) => Poll::Ready(self.return_buffer(Err(error))),
                None => Poll::Pending,
            },
        }
    }
}
