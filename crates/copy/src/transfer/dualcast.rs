//! Copies of one source to two targets.

use bytemuck::Pod;
use memferry_engine::MemoryKind;

use super::buffers::BufferSpan;
use super::{FailedTransfer, OwnedSource, OwnedTarget, OwnedTransfer, Transfer, TransferScope};
use crate::error::Error;
use crate::ferry::{Ferry, check_lengths};
use crate::request::{Options, Request};

/// A dualcast over owned buffers, or the error with the buffers.
type StartedDualcast<S, A, B> = Result<OwnedTransfer<S, (A, B)>, FailedTransfer<S, (A, B)>>;

/// Returns the common length of a source and two targets, or an error if they differ.
fn check_three(source: usize, first: usize, second: usize) -> Result<usize, Error> {
    check_lengths(source, first)?;
    Ok(check_lengths(source, second)?)
}

impl Ferry {
    /// Copies `source` to two targets of the same length, and returns when both copies are complete.
    /// Each byte is read from memory once.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let (mut first, mut second) = ([0u8; 64], [0u8; 64]);
    /// Ferry::new()?.dualcast(&[7; 64], &mut first, &mut second)?;
    /// assert_eq!((first, second), ([7; 64], [7; 64]));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn dualcast<T: Pod>(
        &self,
        source: &[T],
        first: &mut [T],
        second: &mut [T],
    ) -> Result<(), Error> {
        self.dualcast_with(source, first, second, Options::new())
    }

    /// [`Ferry::dualcast`] with options.
    pub fn dualcast_with<T: Pod>(
        &self,
        source: &[T],
        first: &mut [T],
        second: &mut [T],
        options: Options<'_>,
    ) -> Result<(), Error> {
        let request = request_of(source, first, second)?;
        // SAFETY: the slices are borrowed until this call returns, after the transfer is complete;
        // any bytes are valid elements.
        unsafe { self.run_raw(request.with(options)) }.map(drop)
    }

    /// Starts to copy an owned buffer to two others of the same length; the transfer returns all
    /// three at completion.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let ferry = Ferry::new()?;
    /// let transfer = ferry.idualcast(vec![7u8; 64], vec![0u8; 64], vec![0u8; 64])?;
    /// let (source, (first, second)) = transfer.wait()?; // or: transfer.await?
    /// assert_eq!((&first, &second), (&source, &source));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn idualcast<S: OwnedSource, A: OwnedTarget, B: OwnedTarget>(
        &self,
        source: S,
        first: A,
        second: B,
    ) -> StartedDualcast<S, A, B> {
        self.idualcast_with(source, first, second, Options::new())
    }

    /// [`Ferry::idualcast`] with options.
    pub fn idualcast_with<S: OwnedSource, A: OwnedTarget, B: OwnedTarget>(
        &self,
        source: S,
        first: A,
        second: B,
        options: Options<'static>,
    ) -> StartedDualcast<S, A, B> {
        OwnedTransfer::start_with(source, (first, second), |source, (first, second)| {
            let from = BufferSpan::of_source(source);
            let [a, b] = [BufferSpan::of_target(first), BufferSpan::of_target(second)];
            let length = check_three(from.length, a.length, b.length)?;
            let request = Request::dualcast(from.address, a.address, b.address, length);
            // No engine writes to both kinds of memory at once.
            let is_host = [a.memory, b.memory] == [MemoryKind::Host; 2];
            let memory = if is_host { MemoryKind::Host } else { MemoryKind::Device };
            // SAFETY: the transfer owns the buffers and returns them only after completion.
            let transfer =
                unsafe { self.start_raw(request.memory(from.memory, memory).with(options)) }?;
            Ok((transfer, a.address))
        })
    }
}

impl<'scope> TransferScope<'scope, '_> {
    /// Starts to copy `source` to two targets of the same length. The targets can be used after the
    /// scope.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let (mut first, mut second) = ([0u8; 64], [0u8; 64]);
    /// Ferry::new()?.scope(|scope| {
    ///     scope.idualcast(&[7; 64], &mut first, &mut second)?.wait()
    /// })?;
    /// assert_eq!((first, second), ([7; 64], [7; 64]));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn idualcast<T: Pod>(
        &'scope self,
        source: &'scope [T],
        first: &'scope mut [T],
        second: &'scope mut [T],
    ) -> Result<Transfer, Error> {
        self.idualcast_with(source, first, second, Options::new())
    }

    /// [`TransferScope::idualcast`] with options.
    pub fn idualcast_with<T: Pod>(
        &'scope self,
        source: &'scope [T],
        first: &'scope mut [T],
        second: &'scope mut [T],
        options: Options<'scope>,
    ) -> Result<Transfer, Error> {
        let request = request_of(source, first, second)?;
        // SAFETY: slices and notification variable are borrowed for `'scope`, the targets
        // exclusively; the scope does not end before `Ferry::scope` has waited for the transfer.
        let transfer = unsafe { self.ferry.start_raw(request.with(options)) }?;
        self.wait_for(&transfer);
        Ok(transfer)
    }
}

fn request_of<'a, T: Pod>(
    source: &[T],
    first: &mut [T],
    second: &mut [T],
) -> Result<Request<'a>, Error> {
    let length = check_three(size_of_val(source), size_of_val(first), size_of_val(second))?;
    let (first, second) = (first.as_mut_ptr().cast(), second.as_mut_ptr().cast());
    Ok(Request::dualcast(source.as_ptr().cast(), first, second, length))
}
