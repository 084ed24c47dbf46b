//! Handles of transfers, one kind for each way of handing over memory.
//!
//! | way | handle | dropping the handle before the end |
//! |---|---|---|
//! | raw pointers | [`Transfer`] | detaches: the caller keeps vouching for the memory |
//! | owned buffers | [`OwnedTransfer`] | detaches: the buffers are freed when the transfer is over |
//! | scoped borrows | [`ScopedTransfer`] | detaches: the scope waits for it before it ends |
//!
//! In no case does an engine write into memory that has been given back.

mod lane;
mod owned;
mod scoped;

use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use memferry_engine::completion::Finish;
use memferry_engine::{Completion, ExecutionError, Sequence};
use memferry_sys::EventFd;

pub(crate) use lane::{Lane, Waiting};
pub use owned::{Buffer, Failed, OwnedSource, OwnedTarget, OwnedTransfer};
pub use scoped::{Scope, ScopedTransfer};

use crate::error::{Error, ValidationError};

/// Something that another transfer can be ordered after. Implemented by every handle.
pub trait Ordered: sealed::Sealed {
    #[doc(hidden)]
    fn predecessor(&self) -> Predecessor;
}

/// What a later transfer needs to know of an earlier one. Opaque: nobody outside may touch it.
pub struct Predecessor(pub(crate) Arc<Completion>);

impl std::fmt::Debug for Predecessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Predecessor").field("is_done", &self.0.is_done()).finish_non_exhaustive()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Transfer {}
    impl<S: super::OwnedSource, T: super::OwnedTarget> Sealed for super::OwnedTransfer<S, T> {}
    impl Sealed for super::ScopedTransfer<'_> {}
}

/// A running or finished transfer over memory for which the caller vouches.
///
/// It is also a future. Clones stand for the same transfer.
#[derive(Clone)]
#[must_use = "a transfer tells whether it succeeded"]
pub struct Transfer {
    state: State,
    length: u64,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Transfer");
        shown.field("length", &self.length);
        match self.check() {
            None => shown.field("state", &"in progress").finish(),
            Some(Ok(_)) => shown.field("state", &"complete").finish(),
            Some(Err(error)) => shown.field("state", &"failed").field("error", &error).finish(),
        }
    }
}

/// What is kept of a transfer: no more than its kind needs.
#[derive(Clone)]
enum State {
    /// Carried out at once, well.
    Over,
    /// One small descriptor that cannot fail: its number in its channel says it all.
    Numbered { lane: Arc<Lane>, sequence: Sequence },
    /// Everything else. `helps`: a waiting caller works along.
    Shared { completion: Arc<Completion>, helps: bool, waiting: Arc<Waiting> },
}

impl Ordered for Transfer {
    fn predecessor(&self) -> Predecessor {
        Predecessor(self.completion())
    }
}

impl Transfer {
    /// The completion of the transfer. A numbered one gets one now, from its channel, which tells it
    /// when it has come to the number.
    pub(crate) fn completion(&self) -> Arc<Completion> {
        match &self.state {
            State::Over => Arc::new(Completion::over()),
            State::Shared { completion, .. } => completion.clone(),
            State::Numbered { lane, sequence } => lane.completion_of(*sequence),
        }
    }
}

impl Transfer {
    pub(crate) fn over(length: u64) -> Self {
        Self { state: State::Over, length }
    }

    #[inline]
    pub(crate) fn numbered(lane: Arc<Lane>, sequence: Sequence, length: u64) -> Self {
        Self { state: State::Numbered { lane, sequence }, length }
    }

    pub(crate) fn shared(
        completion: Arc<Completion>,
        length: u64,
        helps: bool,
        waiting: Arc<Waiting>,
    ) -> Self {
        Self { state: State::Shared { completion, helps, waiting }, length }
    }

    /// How many bytes the transfer covers.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether it covers no byte.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether it is over, well or not. If so, all its data is visible.
    #[inline]
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Over => true,
            State::Numbered { lane, sequence } => lane.channel.completed() >= *sequence,
            State::Shared { completion, .. } => completion.is_done(),
        }
    }

    /// How it ended, or `None` while it goes on.
    pub fn check(&self) -> Option<Result<Finish, Error>> {
        let outcome = match &self.state {
            State::Shared { completion, .. } => {
                completion.outcome().map(|outcome| outcome.map_err(Error::from))
            }
            _ => self.is_done().then_some(Ok(Finish { difference: None })),
        };
        outcome.or_else(|| self.is_out_of_reach().then(|| Err(ExecutionError::Forked.into())))
    }

    /// Waits for the end: works along on what nobody has begun, then spins briefly, then sleeps.
    pub fn wait(&self) -> Result<Finish, Error> {
        self.wait_until(None).unwrap_or_else(|| unreachable!("there is no deadline"))
    }

    /// Waits at most `timeout`. `None`: it still goes on.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<Finish, Error>> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Option<Result<Finish, Error>> {
        match &self.state {
            // A child must not touch what its parent began, not even to help.
            _ if self.is_out_of_reach() => {}
            State::Over => {}
            State::Numbered { lane, sequence } => {
                if lane.wait(*sequence, deadline) {
                    return Some(Ok(Finish { difference: None }));
                }
            }
            State::Shared { completion, helps, waiting } => {
                while *helps && completion.help_from_back() {
                    waiting.helped_chunks.fetch_add(1, Ordering::Relaxed);
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return self.check();
                    }
                }
                completion.wait(waiting.spin_ns, deadline);
            }
        }
        self.check()
    }

    /// Begun before a fork, by a thread that this process does not have.
    fn is_out_of_reach(&self) -> bool {
        let waiting = match &self.state {
            State::Over => return false,
            State::Numbered { lane, .. } => &lane.waiting,
            State::Shared { waiting, .. } => waiting,
        };
        waiting.is_forked() && !self.is_done()
    }

    /// How many bytes from the start are done. They may be used while the rest still moves.
    pub fn ready(&self) -> u64 {
        match &self.state {
            State::Shared { completion, .. } => completion.ready_bytes(self.length),
            _ if self.is_done() => self.length,
            _ => 0,
        }
    }

    /// Waits until a range is done, which may be long before the rest is.
    pub fn wait_range(&self, range: Range<u64>) -> Result<(), Error> {
        const NAP: Duration = Duration::from_micros(50);
        let (from, to, length) = (range.start, range.end, self.length);
        if from > to || to > length {
            return Err(ValidationError::OutOfRange { from, to, length }.into());
        }
        let State::Shared { completion, helps, waiting } = &self.state else {
            return self.wait().map(|_| ());
        };
        while from < to && !completion.is_range_ready(from, to) {
            if let Some(outcome) = self.check() {
                return outcome.map(|_| ());
            }
            // From the front, where the range is likelier to be than at the back.
            if *helps && completion.help_from_front() {
                waiting.helped_chunks.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            completion.wait(waiting.spin_ns, Instant::now().checked_add(NAP));
        }
        Ok(())
    }

    /// Asks for an early end: what nobody has begun is not begun any more. The transfer then ends
    /// with [`ExecutionError::Cancelled`], unless everything was begun already or it is too small
    /// to be worth it, in which case it ends as if this had not been called. Does not wait.
    pub fn cancel(&self) {
        if let State::Shared { completion, waiting, .. } = &self.state
            && !waiting.is_forked()
        {
            completion.cancel();
        }
    }

    /// A descriptor that becomes readable when the transfer is over, for `poll` and `epoll`.
    pub fn event(&self) -> io::Result<Arc<EventFd>> {
        let event = Arc::new(EventFd::new()?);
        self.completion().signal_at_end(&event);
        Ok(event)
    }
}

impl Future for Transfer {
    type Output = Result<Finish, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.check() {
            return Poll::Ready(outcome);
        }
        let completion = self.completion();
        if completion.wake_at_end(context.waker()) {
            // Keep the completion of a numbered transfer for the next poll.
            if let State::Numbered { lane, .. } = &self.state {
                let waiting = lane.waiting.clone();
                self.state = State::Shared { completion, helps: false, waiting };
            }
            return Poll::Pending;
        }
        let outcome = completion.outcome().expect("it is over");
        Poll::Ready(outcome.map_err(Error::from))
    }
}
