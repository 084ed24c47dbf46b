//! Transfers over borrowed memory, inside a scope that cannot be left before they are over.

use std::future::Future;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll};

use memferry_sys::sync::lock;

use super::{Ordered, Predecessor, Transfer};
use crate::deliver::Piece;
use crate::error::Error;
use crate::ferry::{Ferry, check_lengths};
use crate::request::{Options, Request};

/// Starts transfers over memory that lives at least as long as `'scope`.
pub struct Scope<'scope, 'env: 'scope> {
    ferry: &'scope Ferry,
    started: Mutex<Vec<Transfer>>,
    /// Invariant, so that `'scope` can neither shrink nor grow.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("ferry", self.ferry).finish_non_exhaustive()
    }
}

impl Ferry {
    /// Runs `f` with a scope in which borrowed memory can be handed over. Returns when `f` has
    /// returned (or panicked) and every transfer of the scope is over.
    ///
    /// ```
    /// # use memferry_copy::Ferry;
    /// let ferry = Ferry::new()?;
    /// let source = vec![7u8; 1 << 20];
    /// let mut target = vec![0u8; 1 << 20];
    /// ferry.scope(|scope| {
    ///     let transfer = scope.icopy(&source, &mut target)?;
    ///     // ... compute something else meanwhile ...
    ///     let target = transfer.wait()?;
    ///     assert_eq!(target[0], 7);
    ///     Ok::<_, memferry_copy::Error>(())
    /// })?;
    /// assert_eq!(source, target);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
    ) -> R {
        let scope =
            Scope { ferry: self, started: Mutex::default(), scope: PhantomData, env: PhantomData };
        let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
        // In a forked child nothing is in flight, and another thread may have held the lock.
        if !self.inner.waiting.is_forked() {
            for transfer in lock(&scope.started).drain(..) {
                // A failure was or could have been seen through the handle; here only the end counts.
                let _ = transfer.wait();
            }
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl<'scope> Scope<'scope, '_> {
    /// Starts copying `source` to `target`, which must be of equal length.
    pub fn icopy(
        &'scope self,
        source: &'scope [u8],
        target: &'scope mut [u8],
    ) -> Result<ScopedTransfer<'scope>, Error> {
        self.icopy_with(source, target, Options::new())
    }

    /// As [`Scope::icopy`], with wishes.
    pub fn icopy_with(
        &'scope self,
        source: &'scope [u8],
        target: &'scope mut [u8],
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        check_lengths(source.len(), target.len())?;
        let (address, length) = (target.as_mut_ptr(), target.len());
        self.start(Request::copy(source.as_ptr(), address, length).with(options), address)
    }

    /// Starts setting every byte of `target` to `value`.
    pub fn ifill(
        &'scope self,
        target: &'scope mut [u8],
        value: u8,
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        let (address, length) = (target.as_mut_ptr(), target.len());
        self.start(Request::fill(address, value, length).with(options), address)
    }

    /// Starts copying pieces one behind the other into `target`, which must be as long as all of them:
    /// one transfer, with one notification. All bytes become ready together, at the end.
    ///
    /// ```
    /// # use memferry_copy::{Ferry, Notification, Options};
    /// let ferry = Ferry::new()?;
    /// let packets = vec![[7u8; 1460]; 100];
    /// let pieces: Vec<_> = packets.iter().map(|packet| &packet[..]).collect();
    /// let mut message = vec![0; 100 * 1460];
    /// let arrived = Notification::new(0);
    /// ferry.scope(|scope| {
    ///     let options = Options::new().notify(&arrived, 1);
    ///     let delivery = scope.ideliver(&pieces, &mut message, options)?;
    ///     // ... compute something else meanwhile ...
    ///     delivery.wait().map(|_| ())
    /// })?;
    /// assert_eq!((arrived.load(), message), (1, packets.concat()));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn ideliver(
        &'scope self,
        pieces: &[&'scope [u8]],
        target: &'scope mut [u8],
        options: Options<'scope>,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        let pieces = Piece::all(pieces, target.len())?;
        let address = target.as_mut_ptr();
        // SAFETY: as in `start`, for every piece.
        let transfer = unsafe { self.ferry.ideliver(&pieces, address, options) }?;
        Ok(self.watch(transfer, address))
    }

    fn start(
        &'scope self,
        request: Request<'scope>,
        target: *mut u8,
    ) -> Result<ScopedTransfer<'scope>, Error> {
        // SAFETY: source, target and notification variable are borrowed for `'scope`, which does
        // not end before `Ferry::scope` has waited for the transfer; the borrow of the target is
        // exclusive, and only the handle gives it back, when the bytes are done.
        let transfer = unsafe { self.ferry.start(request) }?;
        Ok(self.watch(transfer, target))
    }

    /// Sees to it that the scope waits for a transfer.
    fn watch(&'scope self, transfer: Transfer, target: *mut u8) -> ScopedTransfer<'scope> {
        if !transfer.is_done() && !self.ferry.inner.waiting.is_forked() {
            let mut started = lock(&self.started);
            // A scope that lives long should not gather what is over.
            if started.len() == started.capacity() {
                started.retain(|transfer| !transfer.is_done());
            }
            started.push(transfer.clone());
        }
        ScopedTransfer { transfer, target, scope: PhantomData }
    }
}

/// A transfer over borrowed memory. The target comes back from [`ScopedTransfer::wait`], and parts
/// of it can be used before that.
#[derive(Debug)]
#[must_use = "the target comes back from `wait`"]
pub struct ScopedTransfer<'scope> {
    transfer: Transfer,
    target: *mut u8,
    scope: PhantomData<&'scope mut [u8]>,
}

// SAFETY: the handle stands for an exclusive borrow of plain bytes, which may cross threads.
unsafe impl Send for ScopedTransfer<'_> {}
// SAFETY: through a shared handle only finished bytes can be read.
unsafe impl Sync for ScopedTransfer<'_> {}

impl<'scope> ScopedTransfer<'scope> {
    /// The transfer without the memory: to check, to cancel, for an eventfd.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Whether it is over.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// The bytes from the start that are done, to be used while the rest still moves.
    pub fn ready(&self) -> &[u8] {
        self.part(0..self.transfer.ready())
    }

    /// Waits until a range is done and lends it, which may be long before the rest is.
    pub fn wait_range(&self, range: Range<usize>) -> Result<&[u8], Error> {
        let range = range.start as u64..range.end as u64;
        self.transfer.wait_range(range.clone())?;
        Ok(self.part(range))
    }

    fn part(&self, range: Range<u64>) -> &[u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: the range lies inside the target and is done, so no engine writes there any
        // more; the borrow of the target outlives `self`.
        unsafe { std::slice::from_raw_parts(self.target.add(range.start as usize), length) }
    }

    /// Waits for the end and gives the target back.
    pub fn wait(self) -> Result<&'scope mut [u8], Error> {
        self.transfer.wait()?;
        Ok(self.into_target())
    }

    fn into_target(self) -> &'scope mut [u8] {
        // SAFETY: the transfer ended well, so no engine touches the target any more; the exclusive
        // borrow for `'scope` that the handle stood for is given back, and the handle is consumed.
        unsafe { std::slice::from_raw_parts_mut(self.target, self.transfer.len() as usize) }
    }
}

impl Ordered for ScopedTransfer<'_> {
    fn predecessor(&self) -> Predecessor {
        self.transfer.predecessor()
    }
}

impl Future for ScopedTransfer<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.transfer).poll(context).map(|outcome| outcome.map(|_| ()))
    }
}
