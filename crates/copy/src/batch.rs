//! Batches: many copies and fills that are started by one call.
//!
//! A batch that is one transfer is a list of segments (see [`crate::list`]): whatever its length, a
//! channel gets one descriptor, and a sleeping one is woken once. A batch with a transfer for each
//! item is cut into runs, each of which is one submit (see [`crate::submit::EachBatch`]).

use memferry_engine::completion::WorkSegment;
use memferry_engine::{MemoryKind, Opcode};

use crate::cookie::Cookie;
use crate::error::{Error, ValidationError};
use crate::ferry::{Ferry, check_lengths};
use crate::list::{List, MAX_CHUNK};
use crate::request::{Options, Request, check_range, overlap};
use crate::submit::EachBatch;
use crate::transfer::{
    BufferPair, BufferSpan, FailedTransfer, OwnedSource, OwnedTarget, OwnedTransfer, Transfer,
};

/// A copy or fill of a batch, over host memory.
///
/// ```
/// use memferry::{BatchItem, Ferry, Options};
///
/// let ferry = Ferry::new()?;
/// let (source, mut copied, mut filled) = ([1u8; 64], [0u8; 64], [0u8; 8]);
/// let items = [
///     BatchItem::copy(source.as_ptr(), copied.as_mut_ptr(), 64),
///     BatchItem::fill(filled.as_mut_ptr(), 7, 8),
/// ];
/// // SAFETY: the arrays live until the wait returns, and nothing else uses them.
/// unsafe { ferry.start_many_raw(&items, Options::new()) }?.wait()?;
/// assert_eq!((copied, filled), (source, [7; 8]));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BatchItem {
    segment: WorkSegment,
    is_ordered: bool,
}

impl BatchItem {
    /// A copy of `length` bytes; the two ranges may overlap.
    #[inline]
    pub fn copy(source: *const u8, target: *mut u8, length: usize) -> Self {
        let (source, target, length) = (source as u64, target as u64, length as u64);
        let operation = match overlap(source, target, length) {
            true => Opcode::Move,
            false => Opcode::Copy,
        };
        Self::unordered(WorkSegment { operation, value: 0, source, target, length })
    }

    /// A fill of `length` bytes with `value`.
    #[inline]
    pub fn fill(target: *mut u8, value: u8, length: usize) -> Self {
        let (target, length) = (target as u64, length as u64);
        Self::unordered(WorkSegment {
            operation: Opcode::Fill,
            value,
            source: target,
            target,
            length,
        })
    }

    #[inline]
    fn unordered(segment: WorkSegment) -> Self {
        Self { segment, is_ordered: false }
    }

    /// Starts the item only when all items before it in its batch are complete. If one of them fails,
    /// this one is not started and fails too. For [`Ferry::start_each_raw`]: a device that keeps the
    /// order itself gets these items together with those before them.
    ///
    /// ```
    /// use memferry::{BatchItem, Ferry};
    ///
    /// let ferry = Ferry::new()?;
    /// let (first, mut second, mut third) = ([1u8; 64], [0u8; 64], [0u8; 64]);
    /// let items = [
    ///     BatchItem::copy(first.as_ptr(), second.as_mut_ptr(), 64),
    ///     BatchItem::copy(second.as_ptr(), third.as_mut_ptr(), 64).ordered(),
    /// ];
    /// // SAFETY: the arrays live until the waits return, and nothing else uses them.
    /// for transfer in unsafe { ferry.start_each_raw(&items) }? {
    ///     transfer.wait()?;
    /// }
    /// assert_eq!(third, [1; 64]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn ordered(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// The length in bytes.
    pub fn length(&self) -> u64 {
        self.segment.length
    }

    fn request(&self) -> Request<'static> {
        let WorkSegment { operation, value, source, target, length } = self.segment;
        match operation {
            Opcode::Fill => Request::fill(target as *mut u8, value, length as usize),
            // Ranges that overlap are moved.
            _ => Request {
                operation,
                ..Request::copy(source as *const u8, target as *mut u8, length as usize)
            },
        }
    }
}

/// A batch of copies that owns its buffers.
type OwnedBatch<S, T> = OwnedTransfer<Vec<S>, Vec<T>>;

/// A batch of fills that owns its buffers.
type OwnedFills<T> = OwnedTransfer<(), Vec<T>>;

/// What a list of items consists of.
#[derive(Default)]
struct BatchSummary {
    length: u64,
    fills: bool,
    moves: Option<u64>,
    /// Whether an item is ordered.
    has_order: bool,
}

impl BatchSummary {
    /// Checks all items.
    fn of(items: &[BatchItem]) -> Result<Self, ValidationError> {
        let mut summary = Self::default();
        for BatchItem { segment: item, is_ordered } in items {
            summary.has_order |= is_ordered;
            if item.length == 0 {
                continue;
            }
            check_range("target", item.target, item.length)?;
            check_range("source", item.source, item.length)?;
            let (address, length) = (item.target, item.length);
            let wraps = ValidationError::Wraps { side: "target", address, length };
            summary.length = summary.length.checked_add(length).ok_or(wraps)?;
            match item.operation {
                Opcode::Fill => summary.fills = true,
                Opcode::Move => summary.moves = Some(item.source),
                _ => {}
            }
        }
        Ok(summary)
    }

    /// Checks that the items can be one transfer.
    fn check_list(self) -> Result<Self, ValidationError> {
        if self.has_order {
            return Err(ValidationError::OrderedItem);
        }
        match self.moves {
            Some(address) if self.length > MAX_CHUNK => Err(ValidationError::Overlap { address }),
            _ => Ok(self),
        }
    }

    /// The operation that an engine must know.
    fn operation(&self) -> Opcode {
        match self {
            Self { moves: Some(_), .. } => Opcode::Move,
            Self { fills: true, .. } => Opcode::Fill,
            _ => Opcode::Copy,
        }
    }
}

/// Rejects memory of a device in a batch of buffers.
fn check_memory(
    side: &'static str,
    item: usize,
    memory: MemoryKind,
) -> Result<(), ValidationError> {
    match memory {
        MemoryKind::Host => Ok(()),
        MemoryKind::Device => Err(ValidationError::BatchMemory { side, item }),
    }
}

impl Ferry {
    /// Starts many copies between owned buffers as one transfer, which is complete when all of them
    /// are, and returns the buffers then. There must be as many targets as sources, each of the
    /// length of its source, in host memory.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let (sources, targets) = (vec![vec![1u8; 100], vec![2; 50]], vec![vec![0; 100], vec![0; 50]]);
    /// let (sources, targets) = Ferry::new()?.icopy_many(sources, targets)?.wait()?;
    /// assert_eq!(sources, targets);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn icopy_many<S: OwnedSource, T: OwnedTarget>(
        &self,
        sources: Vec<S>,
        targets: Vec<T>,
    ) -> Result<OwnedBatch<S, T>, FailedTransfer<Vec<S>, Vec<T>>> {
        let counts = (sources.len(), targets.len());
        OwnedTransfer::start_many(sources, targets, |pairs| {
            if counts.0 != counts.1 {
                return Err(ValidationError::CountMismatch {
                    sources: counts.0,
                    targets: counts.1,
                }
                .into());
            }
            let item = |(item, (from, to)): (usize, &BufferPair)| {
                let length = check_lengths(from.length, to.length)?;
                check_memory("source", item, from.memory)?;
                check_memory("target", item, to.memory)?;
                Ok(BatchItem::copy(from.address, to.address, length))
            };
            let items = pairs.iter().enumerate().map(item).collect::<Result<Vec<_>, Error>>()?;
            // SAFETY: the transfer owns all buffers and returns them only after completion; no two
            // of them share memory that is written.
            unsafe { self.start_many_raw(&items, Options::new()) }
        })
    }

    /// Starts to set every byte of many owned buffers to `value`, as one transfer, which is complete
    /// when all of them are filled, and returns the buffers then. They must be in host memory.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let targets = vec![vec![0u8; 100], vec![0; 50]];
    /// let ((), targets) = Ferry::new()?.ifill_many(targets, 7)?.wait()?;
    /// assert_eq!(targets, [vec![7; 100], vec![7; 50]]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn ifill_many<T: OwnedTarget>(
        &self,
        targets: Vec<T>,
        value: u8,
    ) -> Result<OwnedFills<T>, FailedTransfer<(), Vec<T>>> {
        OwnedTransfer::start_fills(targets, |spans| {
            let item = |(item, to): (usize, &BufferSpan<*mut u8>)| {
                check_memory("target", item, to.memory)?;
                Ok(BatchItem::fill(to.address, value, to.length))
            };
            let items = spans.iter().enumerate().map(item).collect::<Result<Vec<_>, Error>>()?;
            // SAFETY: the transfer owns all buffers and returns them only after completion; no two
            // of them share memory.
            unsafe { self.start_many_raw(&items, Options::new()) }
        })
    }

    /// Starts many copies and fills as one transfer, which is complete when all of them are. They
    /// are not ordered: none may read or write what another one writes. The list of items may be
    /// freed when this call returns.
    ///
    /// # Errors
    /// As for [`Ferry::start_raw`]; if source and target of a copy overlap in a batch of more than
    /// 1 GiB; and if an item is [ordered](BatchItem::ordered). Nothing was started then.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`], for every item.
    pub unsafe fn start_many_raw(
        &self,
        items: &[BatchItem],
        options: Options<'_>,
    ) -> Result<Transfer, Error> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.start_list(items, options, false) }
    }

    /// [`Ferry::start_many_raw`] that returns a cookie, for [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::start_many_raw`].
    pub unsafe fn start_many_cookie_raw(
        &self,
        items: &[BatchItem],
        options: Options<'_>,
    ) -> Result<Cookie, Error> {
        // SAFETY: the caller upholds the contract.
        self.cookie_for(unsafe { self.start_many_raw(items, options) }?)
    }

    /// # Safety
    /// As for [`Ferry::start_many_raw`].
    pub(crate) unsafe fn start_list(
        &self,
        items: &[BatchItem],
        options: Options<'_>,
        blocking: bool,
    ) -> Result<Transfer, Error> {
        let summary = BatchSummary::of(items)?.check_list()?;
        let plan = self.core.plan_list(summary.operation(), summary.length, &options, blocking)?;
        let list = List {
            name: "batch",
            segments: items.iter().map(|item| item.segment),
            count: items.len(),
            length: summary.length,
            target: None,
            is_moved: summary.moves.is_some(),
            plan,
            options,
        };
        // SAFETY: the caller upholds the contract.
        Ok(unsafe { list.start(&self.core, blocking) })
    }

    /// Starts many copies and fills, each with a transfer of its own, in the order of the items.
    /// Small ones are submitted together. None may read or write what another one writes, except that
    /// an [ordered](BatchItem::ordered) one may use the memory of all items before it.
    ///
    /// # Errors
    /// As for [`Ferry::start_raw`]. Nothing was started then.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`], for every item.
    pub unsafe fn start_each_raw(&self, items: &[BatchItem]) -> Result<Vec<Transfer>, Error> {
        BatchSummary::of(items)?;
        let mut batch = EachBatch::new(&self.core, self.inline_bytes, items.len());
        for item in items {
            // SAFETY: the caller upholds the contract; all items were checked above.
            unsafe { batch.add(item.request(), item.is_ordered) };
        }
        Ok(batch.finish())
    }

    /// [`Ferry::start_each_raw`] that returns cookies, for [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::start_each_raw`].
    pub unsafe fn start_each_cookie_raw(&self, items: &[BatchItem]) -> Result<Vec<Cookie>, Error> {
        // SAFETY: the caller upholds the contract.
        let transfers = unsafe { self.start_each_raw(items) }?;
        let wait_for_all = |transfers: &[Transfer]| {
            // Without a cookie, the caller could not wait for the others later.
            transfers.iter().for_each(|transfer| drop(transfer.wait()));
        };
        let table = &self.core.cookies;
        let numbers = table.reserve(transfers.len()).inspect_err(|_| wait_for_all(&transfers))?;
        let mut cookies = Vec::with_capacity(transfers.len());
        let mut left = transfers.into_iter();
        for (number, transfer) in numbers.zip(&mut left) {
            match table.insert(number, transfer) {
                Ok(cookie) => cookies.push(cookie),
                Err((error, transfer)) => {
                    cookies.into_iter().for_each(|cookie| drop(self.wait(cookie)));
                    wait_for_all(&[transfer]);
                    wait_for_all(left.as_slice());
                    return Err(error.into());
                }
            }
        }
        Ok(cookies)
    }
}
