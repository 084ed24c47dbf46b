//! Transfers over borrowed memory, in a scope that waits for them before it ends.

use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytemuck::Pod;
use memferry_sys::EventFd;
use memferry_sys::sync::lock;

use super::{Dependency, Predecessor, Transfer, ready_slice, wait_slice};
use crate::batch::BatchItem;
use crate::deliver::Segment;
use crate::error::Error;
use crate::ferry::{Ferry, check_lengths};
use crate::request::{Options, Request};

/// Starts transfers over memory that lives at least as long as `'scope`.
///
/// ```
/// use memferry::{Error, Ferry, TransferScope};
///
/// fn start<'s>(scope: &'s TransferScope<'s, '_>, target: &'s mut [u8]) -> Result<(), Error> {
///     scope.ifill(target, 7)?.wait()
/// }
///
/// let mut target = [0; 64];
/// Ferry::new()?.scope(|scope| start(scope, &mut target))?;
/// assert_eq!(target, [7; 64]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct TransferScope<'scope, 'env: 'scope> {
    pub(super) ferry: &'scope Ferry,
    started: Mutex<Vec<Transfer>>,
    /// Invariant, so that `'scope` can neither shrink nor grow.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl std::fmt::Debug for TransferScope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransferScope").field("ferry", self.ferry).finish_non_exhaustive()
    }
}

impl Ferry {
    /// Runs `f` with a scope that starts transfers over borrowed memory. Returns when `f` has
    /// returned or panicked and every transfer of the scope is complete.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let ferry = Ferry::new()?;
    /// let source = vec![7u32; 1 << 18];
    /// let mut target = vec![0u32; 1 << 18];
    /// ferry.scope(|scope| {
    ///     let transfer = scope.icopy(&source, &mut target)?;
    ///     // ... compute something else meanwhile ...
    ///     assert_eq!(transfer.wait_range(..1)?, [7]);
    ///     transfer.wait()
    /// })?;
    /// assert_eq!(source, target);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # In async code
    ///
    /// A scope blocks its thread: it must not end before its transfers are complete, and only a
    /// function that has not returned yet can ensure that. A scope that suspends would be a future,
    /// and a future can be dropped or leaked at any `.await` while engines still access memory
    /// whose borrow has ended. Async code therefore uses owned buffers ([`Ferry::icopy`]), which
    /// stay alive regardless of the future, or runs a whole scope on a thread that may block.
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope TransferScope<'scope, 'env>) -> R,
    ) -> R {
        let scope = TransferScope {
            ferry: self,
            started: Mutex::default(),
            scope: PhantomData,
            env: PhantomData,
        };
        let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
        // In a forked child no transfer is in flight, and another thread of the parent may have
        // held the lock.
        if !self.core.wait_config.is_forked() {
            let waiting = AbortOnUnwind;
            for transfer in lock(&scope.started).drain(..) {
                // The handle reports a failure to the caller; the scope only needs completion.
                let _ = transfer.wait();
            }
            std::mem::forget(waiting);
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl<'scope> TransferScope<'scope, '_> {
    /// Starts to copy `source` to `target`, which must be of equal length. The elements are bytes
    /// or any other plain type.
    pub fn icopy<T: Pod>(
        &'scope self,
        source: &'scope [T],
        target: &'scope mut [T],
    ) -> Result<ScopedTransfer<'scope, T>, Error> {
        self.icopy_with(source, target, Options::new())
    }

    /// [`TransferScope::icopy`] with options.
    pub fn icopy_with<T: Pod>(
        &'scope self,
        source: &'scope [T],
        target: &'scope mut [T],
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope, T>, Error> {
        let length = check_lengths(size_of_val(source), size_of_val(target))?;
        let address = target.as_mut_ptr();
        let request = Request::copy(source.as_ptr().cast(), address.cast(), length);
        // SAFETY: the slices are borrowed for `'scope`, that of the target exclusively.
        unsafe { self.start(request.with(options), address, target.len()) }
    }

    /// Starts to set every byte of `target` to `value`.
    pub fn ifill(
        &'scope self,
        target: &'scope mut [u8],
        value: u8,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        self.ifill_with(target, value, Options::new())
    }

    /// [`TransferScope::ifill`] with options.
    pub fn ifill_with(
        &'scope self,
        target: &'scope mut [u8],
        value: u8,
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        let (address, length) = (target.as_mut_ptr(), target.len());
        let request = Request::fill(address, value, length);
        // SAFETY: the slice is borrowed exclusively for `'scope`.
        unsafe { self.start(request.with(options), address, length) }
    }

    /// Starts to copy segments contiguously into `target`, whose length must be their total length:
    /// one transfer with one notification.
    ///
    /// ```
    /// use memferry::{Ferry, Notification, Options};
    ///
    /// let ferry = Ferry::new()?;
    /// let packets = vec![[7u8; 1460]; 100];
    /// let pieces: Vec<_> = packets.iter().map(|packet| &packet[..]).collect();
    /// let mut message = vec![0; 100 * 1460];
    /// let arrived = Notification::new(0);
    /// ferry.scope(|scope| {
    ///     let options = Options::new().notify(&arrived, 1);
    ///     let delivery = scope.ideliver_with(&pieces, &mut message, options)?;
    ///     // ... compute something else meanwhile ...
    ///     delivery.wait()
    /// })?;
    /// assert_eq!((arrived.load(), message), (1, packets.concat()));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn ideliver<T: Pod>(
        &'scope self,
        pieces: &[&'scope [T]],
        target: &'scope mut [T],
    ) -> Result<ScopedTransfer<'scope, T>, Error> {
        self.ideliver_with(pieces, target, Options::new())
    }

    /// [`TransferScope::ideliver`] with options.
    pub fn ideliver_with<T: Pod>(
        &'scope self,
        pieces: &[&'scope [T]],
        target: &'scope mut [T],
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope, T>, Error> {
        let pieces = Segment::from_slices(pieces, size_of_val(target))?;
        let (address, length) = (target.as_mut_ptr(), target.len());
        // SAFETY: as in `start`, for every segment.
        let transfer = unsafe { self.ferry.ideliver_raw(&pieces, address.cast(), options) }?;
        Ok(self.track(transfer, address, length))
    }

    /// Starts many copies as one transfer, which is complete when all of them are. Source and target
    /// of each must be of equal length. They are submitted together, so each costs a fraction of an
    /// [`TransferScope::icopy`]. The targets can be used after the scope.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let ferry = Ferry::new()?;
    /// let source = [[1u8; 100], [2; 100], [3; 100]];
    /// let mut target = [[0u8; 100]; 3];
    /// ferry.scope(|scope| {
    ///     let pairs = source.iter().zip(&mut target).map(|(s, t)| (&s[..], &mut t[..]));
    ///     scope.icopy_many(pairs)?.wait()
    /// })?;
    /// assert_eq!(source, target);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn icopy_many<T: Pod>(
        &'scope self,
        pairs: impl IntoIterator<Item = (&'scope [T], &'scope mut [T])>,
    ) -> Result<Transfer, Error> {
        let item = |(source, target): (&[T], &mut [T])| {
            let length = check_lengths(size_of_val(source), size_of_val(target))?;
            Ok(BatchItem::copy(source.as_ptr().cast(), target.as_mut_ptr().cast(), length))
        };
        let items: Vec<_> = pairs.into_iter().map(item).collect::<Result<_, Error>>()?;
        // SAFETY: the slices are borrowed for `'scope`, those of the targets exclusively.
        unsafe { self.start_many(&items) }
    }

    /// Starts to set every byte of many targets to `value`, as one transfer.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let mut targets = [[0u8; 100]; 3];
    /// Ferry::new()?.scope(|scope| {
    ///     scope.ifill_many(targets.iter_mut().map(|target| &mut target[..]), 7)?.wait()
    /// })?;
    /// assert_eq!(targets, [[7; 100]; 3]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn ifill_many(
        &'scope self,
        targets: impl IntoIterator<Item = &'scope mut [u8]>,
        value: u8,
    ) -> Result<Transfer, Error> {
        let item = |target: &mut [u8]| BatchItem::fill(target.as_mut_ptr(), value, target.len());
        let items: Vec<_> = targets.into_iter().map(item).collect();
        // SAFETY: the slices are borrowed exclusively for `'scope`.
        unsafe { self.start_many(&items) }
    }

    /// Starts a batch. Its handle lends no memory: the targets return with the end of the scope.
    ///
    /// # Safety
    /// Sources and targets are borrowed for `'scope`, the targets exclusively.
    unsafe fn start_many(&'scope self, items: &[BatchItem]) -> Result<Transfer, Error> {
        // SAFETY: as in `start`, for every item.
        let transfer = unsafe { self.ferry.start_many_raw(items, Options::new()) }?;
        self.wait_for(&transfer);
        Ok(transfer)
    }

    /// Starts a request with the target at `address`. The engine and the handle share this pointer: taking a
    /// second one from the slice would end the right to write through the first.
    ///
    /// # Safety
    /// Source and target of the request are borrowed for `'scope`, the target exclusively; the target is `length`
    /// elements at `address`.
    pub(super) unsafe fn start<T: Pod>(
        &'scope self,
        request: Request<'scope>,
        address: *mut T,
        length: usize,
    ) -> Result<ScopedTransfer<'scope, T>, Error> {
        // SAFETY: source, target and notification variable are borrowed for `'scope`, which does
        // not end before `Ferry::scope` has waited for the transfer; the borrow of the target is
        // exclusive, and only the handle returns it, when the bytes are ready. Any bytes are valid
        // elements.
        let transfer = unsafe { self.ferry.start_raw(request) }?;
        Ok(self.track(transfer, address, length))
    }

    /// Adds a transfer to those that the scope waits for.
    fn track<T: Pod>(
        &'scope self,
        transfer: Transfer,
        target: *mut T,
        length: usize,
    ) -> ScopedTransfer<'scope, T> {
        self.wait_for(&transfer);
        ScopedTransfer { transfer, target, length, scope: PhantomData }
    }

    /// Makes the scope wait for a transfer before it ends.
    pub(super) fn wait_for(&'scope self, transfer: &Transfer) {
        if !transfer.is_finished() && !self.ferry.core.wait_config.is_forked() {
            // An engine that panics here must not leave a transfer that nobody waits for.
            let tracking = AbortOnUnwind;
            let mut started = lock(&self.started);
            // A long-lived scope drops complete transfers instead of accumulating them.
            if started.len() == started.capacity() {
                started.retain(|transfer| !transfer.is_finished());
            }
            started.push(transfer.clone());
            std::mem::forget(tracking);
        }
    }
}

/// Ends the process if it is dropped: a scope that unwinds while transfers are in flight would free memory that
/// engines still write.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        // A subscriber that panics changes nothing.
        let _ = catch_unwind(|| {
            tracing::error!("an engine panicked while a scope waited for its transfers");
        });
        std::process::abort();
    }
}

/// A transfer over borrowed memory. Ready parts of the target can be used before completion; after
/// it, [`ScopedTransfer::into_target`] or the end of the scope returns the target.
///
/// ```
/// use memferry::Ferry;
///
/// let (source, mut target) = ([1u32, 2, 3], [0; 3]);
/// Ferry::new()?.scope(|scope| {
///     let transfer = scope.icopy(&source, &mut target)?;
///     assert_eq!(transfer.wait_range(1..)?, [2, 3]);
///     transfer.into_target()?[0] = 9;
///     Ok::<_, memferry::Error>(())
/// })?;
/// assert_eq!(target, [9, 2, 3]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a transfer tells whether it succeeded"]
pub struct ScopedTransfer<'scope, T: Pod = u8> {
    transfer: Transfer,
    target: *mut T,
    /// The number of elements of the target.
    length: usize,
    scope: PhantomData<&'scope mut [T]>,
}

impl<T: Pod> std::fmt::Debug for ScopedTransfer<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScopedTransfer").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}

// SAFETY: the handle represents an exclusive borrow of elements that may be sent to other threads.
unsafe impl<T: Pod + Send> Send for ScopedTransfer<'_, T> {}
// SAFETY: a shared handle gives read access only to ready elements.
unsafe impl<T: Pod + Sync> Sync for ScopedTransfer<'_, T> {}

impl<'scope, T: Pod> ScopedTransfer<'scope, T> {
    /// Returns the transfer without the memory, to order other transfers after it or to keep a
    /// clone.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Returns whether the transfer is complete, successfully or not.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// Returns the result, or `None` while the transfer is in flight.
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

    /// Returns the ready elements from the start, for use while the rest is in flight.
    pub fn ready(&self) -> &[T] {
        // SAFETY: the target is borrowed for longer than `self`.
        unsafe { ready_slice(&self.transfer, self.target) }
    }

    /// Waits until a range of elements is ready and returns it, possibly before the rest is ready.
    pub fn wait_range(&self, range: impl RangeBounds<usize>) -> Result<&[T], Error> {
        // SAFETY: as above.
        unsafe { wait_slice(&self.transfer, self.target, &range) }
    }

    /// Waits for completion. Afterwards [`ScopedTransfer::ready`] returns the whole target.
    pub fn wait(&self) -> Result<(), Error> {
        self.transfer.wait().map(drop)
    }

    /// Waits at most `timeout`. Returns `None` if the transfer is still in flight then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<(), Error>> {
        self.transfer.wait_timeout(timeout).map(|outcome| outcome.map(drop))
    }

    /// Waits for completion and returns the target, for writing in the same scope.
    pub fn into_target(self) -> Result<&'scope mut [T], Error> {
        self.wait()?;
        // SAFETY: the transfer succeeded, so no engine accesses the target any more; the exclusive
        // borrow for `'scope` that the handle represented is returned, and the handle is consumed.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.target, self.length) })
    }
}

impl<T: Pod> Dependency for ScopedTransfer<'_, T> {
    fn predecessor(&self) -> Predecessor {
        self.transfer.predecessor()
    }
}

impl<T: Pod> Future for ScopedTransfer<'_, T> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.transfer).poll(context).map(|outcome| outcome.map(|_| ()))
    }
}
