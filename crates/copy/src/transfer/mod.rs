//! Handles of transfers, one kind for each way of handing over memory.
//!
//! | way | handle | dropping the handle before the end |
//! |---|---|---|
//! | raw pointers | [`Transfer`] | detaches: the caller keeps vouching for the memory |
//! | owned buffers | [`OwnedTransfer`] | detaches: the buffers are freed when the transfer is over |
//! | scoped borrows | [`ScopedTransfer`] | detaches: the scope waits for it before it ends |
//!
//! In no case does an engine write into memory that has been given back.

mod owned;
mod scoped;

use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use memferry_engine::completion::Finish;
use memferry_engine::{Completion, ExecutionError};
use memferry_sys::{EventFd, fork};

pub use owned::{Buffer, Failed, OwnedSource, OwnedTarget, OwnedTransfer};
pub use scoped::{Scope, ScopedTransfer};

use crate::error::{Error, ValidationError};

/// Something that another transfer can be ordered after. Implemented by every handle.
pub trait Ordered: sealed::Sealed {
    #[doc(hidden)]
    fn completion(&self) -> &Arc<Completion>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Transfer {}
    impl<S: super::OwnedSource, T: super::OwnedTarget> Sealed for super::OwnedTransfer<S, T> {}
    impl Sealed for super::ScopedTransfer<'_> {}
}

/// How waiting is done: the same for all transfers of a ferry.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// How long to spin before sleeping.
    pub(crate) spin_ns: u64,
    /// The channels' threads exist only in the process that started them.
    pub(crate) fork_generation: u64,
    /// Chunks carried out by waiting callers.
    pub(crate) helped_chunks: AtomicU64,
}

/// A running or finished transfer over memory for which the caller vouches.
///
/// It is also a future. Clones stand for the same transfer.
#[derive(Debug, Clone)]
#[must_use = "a transfer tells whether it succeeded"]
pub struct Transfer {
    completion: Arc<Completion>,
    length: u64,
    /// Whether a waiting caller works along.
    helps: bool,
    waiting: Arc<Waiting>,
}

impl Ordered for Transfer {
    fn completion(&self) -> &Arc<Completion> {
        &self.completion
    }
}

impl Transfer {
    pub(crate) fn new(
        completion: Arc<Completion>,
        length: u64,
        helps: bool,
        waiting: Arc<Waiting>,
    ) -> Self {
        Self { completion, length, helps, waiting }
    }

    pub(crate) fn completion(&self) -> &Arc<Completion> {
        &self.completion
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
        self.completion.is_done()
    }

    /// How it ended, or `None` while it goes on.
    pub fn check(&self) -> Option<Result<Finish, Error>> {
        self.completion.outcome().map(|outcome| outcome.map_err(Error::from))
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
        if self.helps {
            while self.completion.help_from_back() {
                self.waiting.helped_chunks.fetch_add(1, Ordering::Relaxed);
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return self.check();
                }
            }
        }
        if self.is_out_of_reach() {
            return Some(Err(ExecutionError::Forked.into()));
        }
        self.completion.wait(self.waiting.spin_ns, deadline);
        self.check()
    }

    /// Begun before a fork, by a thread that this process does not have.
    fn is_out_of_reach(&self) -> bool {
        !self.is_done() && fork::generation() != self.waiting.fork_generation
    }

    /// How many bytes from the start are done. They may be used while the rest still moves.
    pub fn ready(&self) -> u64 {
        self.completion.ready_bytes(self.length)
    }

    /// Waits until a range is done, which may be long before the rest is.
    pub fn wait_range(&self, range: Range<u64>) -> Result<(), Error> {
        let (from, to, length) = (range.start, range.end, self.length);
        if from > to || to > length {
            return Err(ValidationError::OutOfRange { from, to, length }.into());
        }
        const NAP: Duration = Duration::from_micros(50);
        while from < to && !self.completion.is_range_ready(from, to) {
            if let Some(outcome) = self.check() {
                return outcome.map(|_| ());
            }
            if self.is_out_of_reach() {
                return Err(ExecutionError::Forked.into());
            }
            // From the front, where the range is likelier to be than at the back.
            if self.helps && self.completion.help_from_front() {
                self.waiting.helped_chunks.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            self.completion.wait(self.waiting.spin_ns, Instant::now().checked_add(NAP));
        }
        Ok(())
    }

    /// Asks for an early end: what nobody has begun is not begun any more. The transfer then ends
    /// with [`ExecutionError::Cancelled`], unless everything was begun already, in which case it
    /// ends as if this had not been called. Does not wait.
    pub fn cancel(&self) {
        self.completion.cancel();
    }

    /// A descriptor that becomes readable when the transfer is over, for `poll` and `epoll`.
    pub fn event(&self) -> io::Result<Arc<EventFd>> {
        let event = Arc::new(EventFd::new()?);
        self.completion.signal_at_end(&event);
        Ok(event)
    }
}

impl Future for Transfer {
    type Output = Result<Finish, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.is_done() && self.completion.wake_at_end(context.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(self.check().expect("it is done"))
    }
}
