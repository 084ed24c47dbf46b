//! Messages whose buffers are moved in and handed back at the end.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Operation;
use crate::error::Error;
use crate::port::Received;
use crate::wire::Number;

/// A buffer in flight. `MaybeUninit` keeps the compiler from assuming that nobody else touches
/// what it points to.
pub(crate) struct Held<B>(MaybeUninit<B>);

impl<B> Held<B> {
    pub(crate) fn new(buffer: B) -> Self {
        Self(MaybeUninit::new(buffer))
    }

    /// The buffer, where it stays: the address of a boxed one is taken from here, because moving a
    /// box again would end the right to use what was taken before.
    pub(crate) fn get_mut(&mut self) -> &mut B {
        // SAFETY: initialised from construction on.
        unsafe { self.0.assume_init_mut() }
    }

    pub(crate) fn into_inner(self) -> B {
        let this = ManuallyDrop::new(self);
        // SAFETY: initialised from construction on, and read once: `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<B> Drop for Held<B> {
    fn drop(&mut self) {
        // SAFETY: initialised from construction on, and `into_inner` does not come here.
        unsafe { self.0.assume_init_drop() };
    }
}

/// A message over an owned buffer that failed, with the buffer if it can be given back.
pub struct Failed<B> {
    /// What went wrong.
    pub error: Error,
    /// The buffer, given back. What a receive has left in it is unspecified, except for a message
    /// that was cut off: then it is full.
    ///
    /// `None` if the sender is alive, was stopped while it wrote to the buffer, and has not gone on:
    /// it may still write. The buffer is then kept until it does not, or ends, and is freed
    /// ([`crate::kept_buffers`]).
    pub buffer: Option<B>,
}

impl<B> fmt::Debug for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for Failed<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// A send or receive that owns its buffer and hands it back at the end. Also a future.
///
/// Dropped before the end, a send goes on and a receive is cancelled; the buffer is freed when it
/// is over.
#[must_use = "the buffer comes back from `wait`"]
pub struct OwnedOperation<B: Send + 'static> {
    operation: Operation,
    /// The message that uses the buffer, whatever handle `operation` has been exchanged for.
    number: Option<Number>,
    held: Option<Held<B>>,
    is_receive: bool,
}

impl<B: Send + 'static> fmt::Debug for OwnedOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedOperation").field("operation", &self.operation).finish_non_exhaustive()
    }
}

impl<B: Send + 'static> OwnedOperation<B> {
    /// Takes the buffer, then begins the operation on it with `begin`.
    pub(crate) fn begin(
        buffer: B,
        is_receive: bool,
        begin: impl FnOnce(&mut B) -> Result<Operation, Error>,
    ) -> Result<Self, Failed<B>> {
        let mut held = Held::new(buffer);
        match begin(held.get_mut()) {
            Ok(operation) => {
                let number = operation.number();
                Ok(Self { operation, number, held: Some(held), is_receive })
            }
            Err(error) => Err(Failed { error, buffer: Some(held.into_inner()) }),
        }
    }

    /// The operation without the buffer: to test, to cancel, for an eventfd.
    pub fn operation(&mut self) -> &mut Operation {
        &mut self.operation
    }

    /// Whether it is over; moves messages on.
    pub fn is_done(&mut self) -> bool {
        self.operation.test().is_some() || self.operation.held_error().is_some()
    }

    /// Waits for the end and hands the buffer back.
    pub fn wait(mut self) -> Result<(Received, B), Failed<B>> {
        let outcome = self.operation.wait_unless_held(None).expect("without a deadline it ends");
        self.hand_back(outcome)
    }

    /// Waits for the end at most so long; hands itself back if it is not over then.
    pub fn wait_timeout(
        mut self,
        timeout: Duration,
    ) -> Result<Result<(Received, B), Failed<B>>, Self> {
        match self.operation.wait_unless_held(Instant::now().checked_add(timeout)) {
            Some(outcome) => Ok(self.hand_back(outcome)),
            None => Err(self),
        }
    }

    fn hand_back(&mut self, outcome: Result<Received, Error>) -> Result<(Received, B), Failed<B>> {
        let held = self.held.take().expect("the buffer is handed back once");
        // The handle may have been swapped for that of another message: the buffer comes back only
        // when its own is over.
        if let Some(number) = self.number
            && self.operation.port.check_fork().is_ok()
        {
            let port = &self.operation.port;
            let is_held = port.block(true, None, |state| match state.operations.is_over(number) {
                true => Some(false),
                false => state.held_error(number).map(|_| true),
            });
            if is_held == Some(true) {
                let kept: Box<dyn Any + Send> = Box::new(held);
                let left = port.enter().leave_held(number, kept);
                return match left {
                    Ok(error) => Err(Failed { error, buffer: None }),
                    // The writer was done in between.
                    Err(kept) => {
                        let held = kept.downcast::<Held<B>>().expect("what was just made");
                        Self::outcome_with(outcome, held.into_inner())
                    }
                };
            }
        }
        Self::outcome_with(outcome, held.into_inner())
    }

    fn outcome_with(
        outcome: Result<Received, Error>,
        buffer: B,
    ) -> Result<(Received, B), Failed<B>> {
        match outcome {
            Ok(received) => Ok((received, buffer)),
            Err(error) => Err(Failed { error, buffer: Some(buffer) }),
        }
    }
}

impl<B: Send + 'static> Drop for OwnedOperation<B> {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let port = &self.operation.port;
        match self.number {
            Some(number) if port.check_fork().is_ok() => {
                let mut state = port.enter();
                state.progress();
                if self.is_receive {
                    state.cancel(number);
                }
                // A buffer that a peer may still write outlives even the endpoint.
                if let Err(held) = state.leave_held(number, Box::new(held)) {
                    state.operations.detach(number, held);
                }
            }
            _ => drop(held),
        }
    }
}

impl<B: Send + Unpin + 'static> Future for OwnedOperation<B> {
    type Output = Result<(Received, B), Failed<B>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.operation).poll(context) {
            Poll::Ready(outcome) => Poll::Ready(self.hand_back(outcome)),
            Poll::Pending => match self.operation.held_error() {
                Some(error) => Poll::Ready(self.hand_back(Err(error))),
                None => Poll::Pending,
            },
        }
    }
}
