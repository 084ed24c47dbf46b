//! Delivery: a gather copy of many segments into one contiguous target, as for a message that
//! arrives in packets.
//!
//! All segments are one transfer, with one notification: see [`crate::list`].

use std::time::Instant;

use bytemuck::Pod;
use memferry_engine::Opcode;
use memferry_engine::completion::WorkSegment;
use memferry_sys::copy::{self, ahead::CopyRange};
use memferry_sys::stats::{self, kinds::CopyPath};

use crate::cookie::Cookie;
use crate::error::{Error, ValidationError};
use crate::ferry::{Ferry, check_lengths};
use crate::list::List;
use crate::plan::{CopyPlan, CopyStrategy};
use crate::request::{Options, Request, check_range};
use crate::submit::{DeliveryBy, DeliveryChoice};
use crate::transfer::Transfer;

/// A range of memory to read: one element of a gather list.
///
/// ```
/// use memferry::Segment;
///
/// let segment = Segment::from(&[1u32, 2][..]);
/// assert_eq!(segment.length, 8); // bytes
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// The start address.
    pub address: *const u8,
    /// The length in bytes.
    pub length: usize,
}

impl Segment {
    /// Returns the segments of the slices. Their total length must be `length` bytes, the length of
    /// the target.
    pub(crate) fn from_slices<T: Pod>(
        slices: &[&[T]],
        length: usize,
    ) -> Result<Vec<Self>, ValidationError> {
        let pieces: Vec<_> = slices.iter().map(|slice| Self::from(*slice)).collect();
        check_lengths(total(&pieces), length).map(|_| pieces)
    }
}

impl<T: Pod> From<&[T]> for Segment {
    fn from(elements: &[T]) -> Self {
        Self { address: elements.as_ptr().cast(), length: size_of_val(elements) }
    }
}

impl Ferry {
    /// Copies segments contiguously into `target`, whose length must be their total length, and
    /// returns when the copy is complete.
    ///
    /// The caller waits, so it copies short deliveries inline, whatever engines the ferry has. With
    /// [`Options::no_caller_assist`] a channel copies them;
    /// [`TransferScope::ideliver`](crate::TransferScope::ideliver) does not wait.
    ///
    /// ```
    /// use memferry::Ferry;
    ///
    /// let ferry = Ferry::new()?;
    /// let packets = [[1u8; 1460], [2; 1460], [3; 1460]];
    /// let mut message = vec![0; 3 * 1460];
    /// ferry.deliver(&[&packets[0], &packets[1], &packets[2]], &mut message)?;
    /// assert_eq!(message, packets.concat());
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn deliver<T: Pod>(&self, pieces: &[&[T]], target: &mut [T]) -> Result<(), Error> {
        self.deliver_with(pieces, target, Options::new())
    }

    /// [`Ferry::deliver`] with options.
    pub fn deliver_with<T: Pod>(
        &self,
        pieces: &[&[T]],
        target: &mut [T],
        options: Options<'_>,
    ) -> Result<(), Error> {
        let pieces = Segment::from_slices(pieces, size_of_val(target))?;
        let target = target.as_mut_ptr().cast();
        // SAFETY: all slices are borrowed until this call returns, after the transfer is complete;
        // any bytes are valid elements.
        let delivery = unsafe { self.start_delivery(&pieces, target, options, true) }?;
        delivery.wait().map(|_| ())
    }

    /// Starts to copy segments contiguously to `target`. No segment may overlap the target. The list of segments may be freed when this call
    /// returns; the memory of the segments may not.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`], for every segment and for their total length in bytes at the
    /// target.
    pub unsafe fn ideliver_raw(
        &self,
        pieces: &[Segment],
        target: *mut u8,
        options: Options<'_>,
    ) -> Result<Transfer, Error> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.start_delivery(pieces, target, options, false) }
    }

    /// [`Ferry::ideliver_raw`] that returns a cookie, for [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::ideliver_raw`].
    pub unsafe fn ideliver_cookie_raw(
        &self,
        pieces: &[Segment],
        target: *mut u8,
        options: Options<'_>,
    ) -> Result<Cookie, Error> {
        // SAFETY: the caller upholds the contract.
        self.cookie_for(unsafe { self.ideliver_raw(pieces, target, options) }?)
    }

    /// # Safety
    /// As for [`Ferry::ideliver_raw`].
    unsafe fn start_delivery(
        &self,
        pieces: &[Segment],
        target: *mut u8,
        options: Options<'_>,
        blocking: bool,
    ) -> Result<Transfer, Error> {
        let length = check(pieces, target)?;
        // The request describes only the target; the source is a placeholder.
        let mut request = Request::copy(target, target, length).with(options);
        let choice = self.core.choose_delivery(pieces.len(), &request, blocking);
        let Some(DeliveryChoice { by, is_measured }) = choice else {
            let plan = self.core.plan(&request, blocking)?;
            // SAFETY: the caller upholds the contract; `check` ensures that no segment overlaps the
            // target.
            return Ok(unsafe { self.deliver_planned(pieces, request, plan, blocking) });
        };
        let start = is_measured.then(Instant::now);
        let transfer = match by {
            // SAFETY: as above.
            DeliveryBy::Caller => unsafe {
                deliver_inline(pieces, target, length, &mut request.options)
            },
            DeliveryBy::Channel => {
                let mut plan = self.core.plan(&request, blocking)?;
                if plan.strategy == CopyStrategy::Inline {
                    plan.strategy = CopyStrategy::SingleDescriptor { engine: 0 };
                }
                // SAFETY: as above.
                unsafe { self.deliver_planned(pieces, request, plan, blocking) }
            }
        };
        if let Some(start) = start {
            self.core.delivery_rates.record(by, length as u64, start);
        }
        Ok(transfer)
    }

    /// Delivers according to a plan.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver_raw`], with segments that were checked; the request must describe the
    /// target.
    unsafe fn deliver_planned(
        &self,
        pieces: &[Segment],
        request: Request<'_>,
        plan: CopyPlan,
        blocking: bool,
    ) -> Transfer {
        let Request { target, length, .. } = request;
        let mut next = target;
        let segments = pieces.iter().map(move |piece| {
            let (source, target, length) = (piece.address as u64, next, piece.length as u64);
            next += length;
            WorkSegment { operation: Opcode::Copy, value: 0, source, target, length }
        });
        let list = List {
            name: "delivery",
            segments,
            count: pieces.len(),
            length,
            target: Some(target),
            is_moved: false,
            plan,
            options: request.options,
        };
        // SAFETY: the caller upholds the contract.
        unsafe { list.start(&self.core, blocking) }
    }
}

/// Delivers on the calling thread.
///
/// # Safety
/// As for [`Ferry::ideliver_raw`], with segments that were checked.
unsafe fn deliver_inline(
    pieces: &[Segment],
    target: *mut u8,
    length: usize,
    options: &mut Options<'_>,
) -> Transfer {
    stats::thread(|counters| counters.count_copy(CopyPath::Inline, length as u64));
    let mut next = target;
    let ranges = pieces.iter().map(|piece| {
        let (source, target, length) = (piece.address, next, piece.length);
        next = next.wrapping_add(length);
        CopyRange { source, target, length }
    });
    // SAFETY: the caller upholds the contract.
    unsafe { copy::ahead::copy_each(ranges) };
    if let Some(notify) = options.take_extras().notify {
        notify.deliver();
    }
    Transfer::done(length as u64)
}

/// Checks all ranges, and that no segment overlaps the target. Returns the total length in bytes.
fn check(pieces: &[Segment], target: *mut u8) -> Result<usize, ValidationError> {
    // One pass over all segments at once: the ranges between the lowest and the highest address are
    // looked at one by one only if that is not enough.
    let (mut total, mut lowest, mut highest) = (0usize, u64::MAX, 0);
    let mut overflows = false;
    for piece in pieces {
        let (address, bytes) = (piece.address as u64, piece.length as u64);
        let (sum, sum_overflows) = total.overflowing_add(piece.length);
        let (end, end_overflows) = address.overflowing_add(bytes);
        (total, lowest, highest) = (sum, lowest.min(address), highest.max(end));
        overflows |= sum_overflows | end_overflows;
    }
    let target = target as u64;
    if total > 0 {
        check_range("target", target, total as u64)?;
    }
    let is_apart = highest <= target || target.wrapping_add(total as u64) <= lowest;
    if is_apart && lowest > 0 && !overflows {
        return Ok(total);
    }
    check_each(pieces, target)
}

#[cold]
fn check_each(pieces: &[Segment], target: u64) -> Result<usize, ValidationError> {
    let total = total(pieces);
    let length = total as u64;
    if length > 0 {
        check_range("target", target, length)?;
    }
    for piece in pieces.iter().filter(|piece| piece.length > 0) {
        let (address, bytes) = (piece.address as u64, piece.length as u64);
        check_range("source", address, bytes)?;
        if address < target + length && target < address + bytes {
            return Err(ValidationError::Overlap { address });
        }
    }
    Ok(total)
}

/// Returns the total length in bytes, saturating at `usize::MAX`, which no target has.
fn total(pieces: &[Segment]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length))
}
