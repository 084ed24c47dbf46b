//! Transfers that return a CRC-32C, with the calls that start them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytemuck::Pod;
use memferry_engine::completion::TransferOutput;

use super::buffers::BufferSpan;
use super::{
    Dependency, FailedTransfer, OwnedSource, OwnedTarget, OwnedTransfer, Predecessor,
    ScopedTransfer, Transfer, TransferScope,
};
use crate::error::Error;
use crate::ferry::{Ferry, check_lengths};
use crate::request::{Options, Request};

/// A transfer that returns the CRC-32C of its source: a handle `H` whose `wait` returns the CRC too.
/// Everything else is a method of that handle, such as [`OwnedTransfer::wait_range`].
///
/// ```
/// use memferry::Ferry;
///
/// let ferry = Ferry::new()?;
/// let transfer = ferry.icopy_crc(b"123456789".to_vec(), vec![0; 9])?;
/// assert_eq!(transfer.wait_range(..2)?, b"12");
/// let (source, target, crc) = transfer.wait()?; // or: transfer.await?
/// assert_eq!((source == target, crc), (true, 0xE306_9283));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the CRC comes from `wait`"]
pub struct CrcTransfer<H> {
    handle: H,
}

impl<H> std::ops::Deref for CrcTransfer<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.handle
    }
}

impl<H: Dependency> Dependency for CrcTransfer<H> {
    fn predecessor(&self) -> Predecessor {
        self.handle.predecessor()
    }
}

fn crc_of(output: TransferOutput) -> u32 {
    output.crc.expect("a transfer that computes a CRC has one at its end")
}

/// The result of a transfer over owned buffers, with its CRC.
type OwnedCrcOutcome<S, T> = Result<(S, T, u32), FailedTransfer<S, T>>;

impl<S: Send, T: Send> CrcTransfer<OwnedTransfer<S, T>> {
    /// Returns the CRC, or `None` while the transfer is in flight. [`CrcTransfer::wait`] returns the
    /// buffers too.
    pub fn check(&self) -> Option<Result<u32, Error>> {
        self.handle.transfer().check().map(|outcome| outcome.map(crc_of))
    }

    /// Waits for completion and returns the buffers and the CRC.
    pub fn wait(self) -> OwnedCrcOutcome<S, T> {
        let outcome = self.handle.transfer().wait();
        self.end(outcome)
    }

    /// Waits at most `timeout`; returns the handle itself if the transfer is still in flight then.
    pub fn wait_timeout(self, timeout: Duration) -> Result<OwnedCrcOutcome<S, T>, Self> {
        match self.handle.transfer().wait_timeout(timeout) {
            Some(outcome) => Ok(self.end(outcome)),
            None => Err(self),
        }
    }

    fn end(self, outcome: Result<TransferOutput, Error>) -> OwnedCrcOutcome<S, T> {
        // Complete, so this does not wait; a failure is the same one.
        let (source, target) = self.handle.wait()?;
        match outcome {
            Ok(output) => Ok((source, target, crc_of(output))),
            Err(error) => Err(FailedTransfer { error, source, target }),
        }
    }
}

impl<S: Send + Unpin, T: Send + Unpin> Future for CrcTransfer<OwnedTransfer<S, T>> {
    type Output = OwnedCrcOutcome<S, T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let transfer = self.handle.transfer().clone();
        match Pin::new(&mut self.handle).poll(context) {
            Poll::Ready(Ok((source, target))) => Poll::Ready(match transfer.wait() {
                Ok(output) => Ok((source, target, crc_of(output))),
                Err(error) => Err(FailedTransfer { error, source, target }),
            }),
            Poll::Ready(Err(failed)) => Poll::Ready(Err(failed)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Pod> CrcTransfer<ScopedTransfer<'_, T>> {
    /// Returns the CRC, or `None` while the transfer is in flight.
    pub fn check(&self) -> Option<Result<u32, Error>> {
        self.handle.transfer().check().map(|outcome| outcome.map(crc_of))
    }

    /// Waits for completion and returns the CRC.
    pub fn wait(&self) -> Result<u32, Error> {
        self.handle.transfer().wait().map(crc_of)
    }

    /// Waits at most `timeout`. Returns `None` if the transfer is still in flight then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<u32, Error>> {
        self.handle.transfer().wait_timeout(timeout).map(|outcome| outcome.map(crc_of))
    }
}

impl<T: Pod> Future for CrcTransfer<ScopedTransfer<'_, T>> {
    type Output = Result<u32, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.handle).poll(context) {
            // Complete, so this does not wait.
            Poll::Ready(outcome) => Poll::Ready(outcome.and_then(|()| self.wait())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl CrcTransfer<Transfer> {
    /// Returns the CRC, or `None` while the transfer is in flight.
    pub fn check(&self) -> Option<Result<u32, Error>> {
        self.handle.check().map(|outcome| outcome.map(crc_of))
    }

    /// Waits for completion and returns the CRC.
    pub fn wait(&self) -> Result<u32, Error> {
        self.handle.wait().map(crc_of)
    }

    /// Waits at most `timeout`. Returns `None` if the transfer is still in flight then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<u32, Error>> {
        self.handle.wait_timeout(timeout).map(|outcome| outcome.map(crc_of))
    }
}

impl Future for CrcTransfer<Transfer> {
    type Output = Result<u32, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.handle).poll(context).map(|outcome| outcome.map(crc_of))
    }
}

impl Ferry {
    /// Copies `source` to `target`, which must be of equal length, and returns the CRC-32C of the
    /// data when the copy is complete. Each byte is read from memory once.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let mut target = [0u8; 9];
    /// let crc = Ferry::new()?.copy_crc(b"123456789", &mut target)?;
    /// assert_eq!((crc, &target), (0xE306_9283, b"123456789"));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn copy_crc<T: Pod>(&self, source: &[T], target: &mut [T]) -> Result<u32, Error> {
        self.copy_crc_with(source, target, Options::new())
    }

    /// [`Ferry::copy_crc`] with options.
    pub fn copy_crc_with<T: Pod>(
        &self,
        source: &[T],
        target: &mut [T],
        options: Options<'_>,
    ) -> Result<u32, Error> {
        let length = check_lengths(size_of_val(source), size_of_val(target))?;
        let request = Request::copy_crc(source.as_ptr().cast(), target.as_mut_ptr().cast(), length);
        // SAFETY: both slices are borrowed until this call returns, after the transfer is complete;
        // any bytes are valid elements.
        unsafe { self.run_raw(request.with(options)) }.map(crc_of)
    }

    /// Returns the CRC-32C of the bytes of `source`, as iSCSI, ext4 and many formats have it. Large
    /// ranges are shared with channels, as copies are.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// assert_eq!(Ferry::new()?.crc(b"123456789")?, 0xE306_9283);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn crc<T: Pod>(&self, source: &[T]) -> Result<u32, Error> {
        let request = Request::crc(source.as_ptr().cast(), size_of_val(source));
        // SAFETY: the slice is borrowed until this call returns, after the transfer is complete;
        // plain elements have no uninitialised bytes.
        unsafe { self.run_raw(request) }.map(crc_of)
    }

    /// Starts to copy between owned buffers as [`Ferry::icopy`] does; the transfer returns the
    /// CRC-32C of the data with the buffers.
    pub fn icopy_crc<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
    ) -> Result<CrcTransfer<OwnedTransfer<S, T>>, FailedTransfer<S, T>> {
        self.icopy_crc_with(source, target, Options::new())
    }

    /// [`Ferry::icopy_crc`] with options.
    pub fn icopy_crc_with<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
        options: Options<'static>,
    ) -> Result<CrcTransfer<OwnedTransfer<S, T>>, FailedTransfer<S, T>> {
        let handle = OwnedTransfer::start(source, target, |from, to| {
            check_lengths(from.length, to.length)?;
            let request = Request::copy_crc(from.address, to.address, to.length);
            // SAFETY: the transfer owns both buffers and returns them only after completion.
            unsafe { self.start_raw(request.memory(from.memory, to.memory).with(options)) }
        })?;
        Ok(CrcTransfer { handle })
    }

    /// Starts to compute the CRC-32C of an owned buffer, which the transfer returns with it.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let transfer = Ferry::new()?.icrc(b"123456789".to_vec())?;
    /// let (source, (), crc) = transfer.wait()?; // or: transfer.await?
    /// assert_eq!((source.len(), crc), (9, 0xE306_9283));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn icrc<S: OwnedSource>(
        &self,
        source: S,
    ) -> Result<CrcTransfer<OwnedTransfer<S, ()>>, FailedTransfer<S, ()>> {
        self.icrc_with(source, Options::new())
    }

    /// [`Ferry::icrc`] with options.
    pub fn icrc_with<S: OwnedSource>(
        &self,
        source: S,
        options: Options<'static>,
    ) -> Result<CrcTransfer<OwnedTransfer<S, ()>>, FailedTransfer<S, ()>> {
        let handle = OwnedTransfer::start_with(source, (), |source, ()| {
            let from = BufferSpan::of_source(source);
            let request = Request::crc(from.address, from.length).memory(from.memory, from.memory);
            // SAFETY: the transfer owns the buffer and returns it only after completion.
            let transfer = unsafe { self.start_raw(request.with(options)) }?;
            Ok((transfer, std::ptr::null_mut()))
        })?;
        Ok(CrcTransfer { handle })
    }
}

impl<'scope> TransferScope<'scope, '_> {
    /// Starts to copy `source` to `target` as [`TransferScope::icopy`] does; the transfer returns the
    /// CRC-32C of the data.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let mut target = [0u8; 9];
    /// Ferry::new()?.scope(|scope| {
    ///     let transfer = scope.icopy_crc(b"123456789", &mut target)?;
    ///     // ... compute something else meanwhile ...
    ///     assert_eq!(transfer.wait()?, 0xE306_9283);
    ///     Ok::<_, memferry::Error>(())
    /// })?;
    /// assert_eq!(&target, b"123456789");
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn icopy_crc<T: Pod>(
        &'scope self,
        source: &'scope [T],
        target: &'scope mut [T],
    ) -> Result<CrcTransfer<ScopedTransfer<'scope, T>>, Error> {
        self.icopy_crc_with(source, target, Options::new())
    }

    /// [`TransferScope::icopy_crc`] with options.
    pub fn icopy_crc_with<T: Pod>(
        &'scope self,
        source: &'scope [T],
        target: &'scope mut [T],
        options: Options<'scope>,
    ) -> Result<CrcTransfer<ScopedTransfer<'scope, T>>, Error> {
        let length = check_lengths(size_of_val(source), size_of_val(target))?;
        let address = target.as_mut_ptr();
        let request = Request::copy_crc(source.as_ptr().cast(), address.cast(), length);
        // SAFETY: the slices are borrowed for `'scope`, that of the target exclusively.
        let handle = unsafe { self.start(request.with(options), address, target.len()) }?;
        Ok(CrcTransfer { handle })
    }

    /// Starts to compute the CRC-32C of the bytes of `source`.
    pub fn icrc<T: Pod>(&'scope self, source: &'scope [T]) -> Result<CrcTransfer<Transfer>, Error> {
        self.icrc_with(source, Options::new())
    }

    /// [`TransferScope::icrc`] with options.
    pub fn icrc_with<T: Pod>(
        &'scope self,
        source: &'scope [T],
        options: Options<'scope>,
    ) -> Result<CrcTransfer<Transfer>, Error> {
        let request = Request::crc(source.as_ptr().cast(), size_of_val(source));
        // SAFETY: source and notification variable are borrowed for `'scope`, which does not end
        // before `Ferry::scope` has waited for the transfer.
        let handle = unsafe { self.ferry.start_raw(request.with(options)) }?;
        self.wait_for(&handle);
        Ok(CrcTransfer { handle })
    }
}
