//! Transfers that own their buffers while they are in flight.

use std::fmt;
use std::future::Future;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::RangeBounds;
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use memferry_sys::EventFd;

use super::buffers::{BufferPair, BufferSpan, OwnedSlice, OwnedSource, OwnedTarget};
use super::{Dependency, Predecessor, Transfer, ready_slice, wait_slice};
use crate::error::Error;

/// The buffers of a transfer in flight. `MaybeUninit` prevents the compiler from assuming that no
/// other code accesses the memory that they point to.
struct InFlightBuffers<S, T>(MaybeUninit<(S, T)>);

impl<S, T> InFlightBuffers<S, T> {
    fn into_inner(self) -> (S, T) {
        let this = ManuallyDrop::new(self);
        // SAFETY: the value is initialised on construction, and read once: `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<S, T> Drop for InFlightBuffers<S, T> {
    fn drop(&mut self) {
        // SAFETY: the value is initialised on construction, and `into_inner` prevents this drop.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<S, T> fmt::Debug for InFlightBuffers<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlightBuffers")
    }
}

/// A failed request over owned buffers, with the buffers.
///
/// ```
/// use memferry::Ferry;
///
/// let failed = Ferry::new()?.icopy(vec![1u8; 3], vec![0u8; 4]).unwrap_err();
/// println!("{}", failed.error);
/// let (source, target) = (failed.source, failed.target); // the buffers are back
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct FailedTransfer<S, T> {
    /// The error.
    pub error: Error,
    /// The returned source.
    pub source: S,
    /// The returned target. Its contents are unspecified if the transfer had started.
    pub target: T,
}

/// The buffers of a complete transfer, with the error if there is one.
type OwnedOutcome<S, T> = Result<(S, T), FailedTransfer<S, T>>;

impl<S, T> fmt::Debug for FailedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailedTransfer").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<S, T> fmt::Display for FailedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S, T> std::error::Error for FailedTransfer<S, T> {
    /// Returns the cause of the error; the text of the error itself is that of this type.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// A transfer that owns its buffers and returns them at completion.
///
/// Dropping it before completion detaches it: the transfer continues, and the buffers are freed
/// when it is complete. The handle is also a future.
///
/// ```
/// use memferry::Ferry;
///
/// let transfer = Ferry::new()?.icopy(vec![5u32; 1000], vec![0u32; 1000])?;
/// assert_eq!(transfer.wait_range(10..12)?, [5, 5]);
/// let (source, target) = transfer.wait()?; // or: transfer.await?
/// assert_eq!(source, target);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the buffers come back from `wait`"]
pub struct OwnedTransfer<S: Send + 'static, T: Send + 'static> {
    transfer: Transfer,
    /// The address of the target's bytes; null for a batch, which has many targets.
    target: *mut u8,
    buffers: Option<InFlightBuffers<S, T>>,
}

// SAFETY: the pointer is that of the target, which the handle owns and which may be sent to other
// threads.
unsafe impl<S: Send, T: Send> Send for OwnedTransfer<S, T> {}
// SAFETY: a shared handle gives read access only to ready elements of the target, which are plain.
unsafe impl<S: Send + Sync, T: Send + Sync> Sync for OwnedTransfer<S, T> {}

impl<S: Send, T: Send> fmt::Debug for OwnedTransfer<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedTransfer").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}

impl<S: OwnedSource, T: OwnedTarget> OwnedTransfer<S, T> {
    /// Takes the buffers, then calls `start` with their addresses, lengths and kinds of memory to
    /// start the transfer.
    pub(crate) fn start(
        source: S,
        target: T,
        start: impl FnOnce(BufferSpan<*const u8>, BufferSpan<*mut u8>) -> Result<Transfer, Error>,
    ) -> Result<Self, FailedTransfer<S, T>> {
        Self::start_with(source, target, |source, target| {
            let to = BufferSpan::of_target(target);
            Ok((start(BufferSpan::of_source(source), to)?, to.address))
        })
    }
}

impl<S: OwnedSource, T: OwnedTarget> OwnedTransfer<Vec<S>, Vec<T>> {
    /// Takes the buffers of a batch, then calls `start` with the addresses, lengths and kinds of
    /// memory of each pair to start the transfer.
    pub(crate) fn start_many(
        sources: Vec<S>,
        targets: Vec<T>,
        start: impl FnOnce(Vec<BufferPair>) -> Result<Transfer, Error>,
    ) -> Result<Self, FailedTransfer<Vec<S>, Vec<T>>> {
        Self::start_with(sources, targets, |sources, targets| {
            let pairs = sources.iter().zip(targets).map(|(source, target)| {
                (BufferSpan::of_source(source), BufferSpan::of_target(target))
            });
            Ok((start(pairs.collect())?, ptr::null_mut()))
        })
    }
}

impl<T: OwnedTarget> OwnedTransfer<(), Vec<T>> {
    /// Takes the targets of a batch of fills, then calls `start` with the address, length and kind
    /// of memory of each to start the transfer.
    pub(crate) fn start_fills(
        targets: Vec<T>,
        start: impl FnOnce(Vec<BufferSpan<*mut u8>>) -> Result<Transfer, Error>,
    ) -> Result<Self, FailedTransfer<(), Vec<T>>> {
        Self::start_with((), targets, |(), targets| {
            let spans = targets.iter_mut().map(BufferSpan::of_target);
            Ok((start(spans.collect())?, ptr::null_mut()))
        })
    }
}

impl<S: Send, T: Send> OwnedTransfer<S, T> {
    /// Takes the buffers, then calls `start` with them to start the transfer. It returns the address
    /// of the target's bytes too, null if it has many.
    pub(super) fn start_with(
        source: S,
        target: T,
        start: impl FnOnce(&S, &mut T) -> Result<(Transfer, *mut u8), Error>,
    ) -> Result<Self, FailedTransfer<S, T>> {
        let mut held = InFlightBuffers(MaybeUninit::new((source, target)));
        // SAFETY: the buffers are initialised in the line above. The addresses are taken at the
        // final location of the buffers, because moving a box again would invalidate pointers
        // derived before.
        let (source, target) = unsafe { held.0.assume_init_mut() };
        match start(source, target) {
            Ok((transfer, target)) => Ok(Self { transfer, target, buffers: Some(held) }),
            Err(error) => {
                let (source, target) = held.into_inner();
                Err(FailedTransfer { error, source, target })
            }
        }
    }

    /// Returns the transfer without the buffers, to order other transfers after it or to keep a
    /// clone.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Returns whether the transfer is complete, successfully or not.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// Returns the result, or `None` while the transfer is in flight. [`OwnedTransfer::wait`]
    /// returns the buffers.
    pub fn check(&self) -> Option<Result<(), Error>> {
        self.transfer.check().map(|outcome| outcome.map(drop))
    }

    /// Cancels the transfer as [`Transfer::cancel`] does.
    pub fn cancel(&self) {
        self.transfer.cancel();
    }

    /// Returns an eventfd as [`Transfer::event`] does.
    pub fn event(&self) -> io::Result<Arc<EventFd>> {
        self.transfer.event()
    }

    /// Waits for completion and returns the buffers.
    pub fn wait(mut self) -> Result<(S, T), FailedTransfer<S, T>> {
        let outcome = self.transfer.wait();
        self.return_buffers(outcome.map(|_| ()))
    }

    /// Waits at most `timeout`; returns the handle itself if the transfer is still in flight then.
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<OwnedOutcome<S, T>, Self> {
        match self.transfer.wait_timeout(timeout) {
            Some(outcome) => Ok(self.return_buffers(outcome.map(|_| ()))),
            None => Err(self),
        }
    }

    fn return_buffers(
        &mut self,
        outcome: Result<(), Error>,
    ) -> Result<(S, T), FailedTransfer<S, T>> {
        if !self.transfer.is_finished() {
            // Only a forked child gets here: no engine accesses its copy of the memory.
            debug_assert!(outcome.is_err());
        }
        let held = self.buffers.take().expect("the buffers are handed back once");
        let (source, target) = held.into_inner();
        match outcome {
            Ok(()) => Ok((source, target)),
            Err(error) => Err(FailedTransfer { error, source, target }),
        }
    }
}

impl<S: OwnedSource, T: OwnedSlice> OwnedTransfer<S, T> {
    /// Returns the ready elements from the start, for use while the rest is in flight.
    ///
    /// # Panics
    /// If the buffers were returned already, by awaiting a borrow of the handle; and for a batch.
    pub fn ready(&self) -> &[T::Element] {
        // SAFETY: the handle owns the target, and the slice lives no longer than the borrow of the
        // handle.
        unsafe { ready_slice(&self.transfer, self.elements()) }
    }

    /// Waits until a range of elements is ready and returns it, possibly before the rest is ready.
    ///
    /// # Panics
    /// As [`OwnedTransfer::ready`].
    pub fn wait_range(&self, range: impl RangeBounds<usize>) -> Result<&[T::Element], Error> {
        // SAFETY: as above.
        unsafe { wait_slice(&self.transfer, self.elements(), &range) }
    }

    /// Returns the address of the target's elements while the handle owns them.
    fn elements(&self) -> *const T::Element {
        assert!(self.buffers.is_some(), "the buffers were handed back");
        assert!(!self.target.is_null(), "a batch has many targets");
        self.target.cast_const().cast()
    }
}

impl<S: Send, T: Send> Dependency for OwnedTransfer<S, T> {
    fn predecessor(&self) -> Predecessor {
        self.transfer.predecessor()
    }
}

impl<S: Send + 'static, T: Send + 'static> Drop for OwnedTransfer<S, T> {
    fn drop(&mut self) {
        if let Some(held) = self.buffers.take() {
            // If the transfer is complete, `keep_alive` returns the buffers and they are dropped
            // here.
            let _ = self.transfer.completion().keep_alive(held);
        }
    }
}

impl<S: Send + Unpin, T: Send + Unpin> Future for OwnedTransfer<S, T> {
    type Output = Result<(S, T), FailedTransfer<S, T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.transfer).poll(context) {
            Poll::Ready(outcome) => Poll::Ready(self.return_buffers(outcome.map(|_| ()))),
            Poll::Pending => Poll::Pending,
        }
    }
}
