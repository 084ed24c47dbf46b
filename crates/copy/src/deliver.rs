//! Delivery: a gather copy of many segments into one contiguous target, as for a message that
//! arrives in packets.
//!
//! All segments are parts of one transfer on one channel, in order: they complete together, with
//! one notification. An engine that gathers, such as a network card, copies many segments at once.
//!
//! The notification variable is set after the last byte, no matter which thread or engine copies
//! which segment. The dispatching thread copies segments that the channel does not accept or that
//! cannot be pinned. Every part decrements the same count of remaining bytes, and the thread that
//! decrements it to zero sets the variable. An engine that writes the variable itself does so after
//! the last part, and only if all remaining bytes belong to parts that precede it in the same
//! channel.

use std::sync::Arc;

use bytemuck::Pod;
use memferry_engine::completion::{ChannelBatch, ChunkedWork, Completion, Dispatch};
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::{Descriptor, Opcode};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::Access;

use crate::cookie::Cookie;
use crate::error::{Error, ValidationError};
use crate::ferry::{Ferry, check_lengths};
use crate::plan::{CopyPlan, CopyStrategy};
use crate::policy::Choice;
use crate::request::{Options, Request, RequestExtras, check_range};
use crate::submit::{ActiveEngine, FerryCore};
use crate::transfer::Transfer;

/// Maximum chunk size in bytes of a delivery.
const MAX_CHUNK: u64 = 1 << 30;

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

    /// Starts to copy segments contiguously to `target`. No segment may overlap the target. All
    /// bytes become ready together, at completion. The list of segments may be freed when this call
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
        let length = total(pieces);
        check(pieces, target, length)?;
        // The request describes only the target; the source is a placeholder.
        let mut request = Request::copy(target, target, length).with(options);
        let (plan, is_simple) = (self.core.plan(&request, blocking)?, request.is_simple());
        let extras = request.options.take_extras();
        let helps = !request.options.no_caller_assist;
        let route = DeliveryRoute::of(&self.core, &plan, request.length);
        let delivery = Delivery { segments: pieces, request: &request, plan: &plan, route };
        if is_simple && delivery.route.is_none() {
            // SAFETY: the caller upholds the contract.
            unsafe { delivery.run() };
            return Ok(Transfer::done(length as u64));
        }
        // SAFETY: the caller upholds the contract.
        let completion = unsafe { delivery.dispatch(extras) };
        Ok(Transfer::with_completion(
            completion,
            length as u64,
            helps,
            self.core.wait_config.clone(),
        ))
    }
}

/// Checks all ranges, and that no segment overlaps the target.
fn check(pieces: &[Segment], target: *mut u8, length: usize) -> Result<(), ValidationError> {
    let (target, length) = (target as u64, length as u64);
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
    Ok(())
}

/// Returns the total length in bytes, saturating at `usize::MAX`, which no target has.
fn total(pieces: &[Segment]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length))
}

/// The channel that receives all segments.
#[derive(Clone, Copy)]
struct DeliveryRoute<'a> {
    open: &'a ActiveEngine,
    channel: &'a Arc<dyn Channel>,
}

impl<'a> DeliveryRoute<'a> {
    /// Returns `None` if the caller executes the delivery.
    fn of(inner: &'a FerryCore, plan: &CopyPlan, length: u64) -> Option<Self> {
        let (CopyStrategy::SingleDescriptor { engine }
        | CopyStrategy::WorkSharing { engine, .. }
        | CopyStrategy::HybridWorkSharing { processors: engine, .. }
        | CopyStrategy::FixedParts { engine, .. }) = plan.strategy
        else {
            return None;
        };
        let open = &inner.engines[engine];
        let index = match inner.policy.choose(&open.channels, length) {
            Choice::Channel { index, .. } => index,
            Choice::Caller if matches!(plan.strategy, CopyStrategy::FixedParts { .. }) => 0,
            Choice::Caller => return None,
        };
        Some(Self { open, channel: &open.channels[index] })
    }

    /// Returns the collected descriptors as a batch, or `None` if there are none.
    fn take_batch(self, batch: &mut Vec<Descriptor>) -> Option<ChannelBatch> {
        if batch.is_empty() {
            return None;
        }
        let self_driving = self.open.engine.capabilities().auto_progress;
        Some(ChannelBatch::many(self.channel.clone(), self_driving, batch.drain(..)))
    }
}

/// A delivery before it is submitted. The request describes the target and has no source.
struct Delivery<'a> {
    segments: &'a [Segment],
    request: &'a Request<'a>,
    plan: &'a CopyPlan,
    route: Option<DeliveryRoute<'a>>,
}

impl Delivery<'_> {
    /// Returns the non-empty segments, each with its offset in the target.
    fn segments_with_offsets(&self) -> impl Iterator<Item = (Segment, u64)> {
        let mut next = 0;
        self.segments.iter().filter(|piece| piece.length > 0).map(move |piece| {
            let offset = next;
            next += piece.length as u64;
            (*piece, offset)
        })
    }

    /// Copies all segments on the calling thread.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver_raw`].
    unsafe fn run(&self) {
        for (piece, offset) in self.segments_with_offsets() {
            // SAFETY: the caller upholds the contract.
            unsafe { self.descriptor(piece.address as u64, offset, piece.length as u64) }.run();
        }
    }

    /// # Safety
    /// As for [`Ferry::ideliver_raw`].
    unsafe fn dispatch(&self, extras: RequestExtras) -> Arc<Completion> {
        let RequestExtras { after, notify, keep_alive: kept } = extras;
        let span = tracing::trace_span!(
            "delivery",
            pieces = self.segments.len(),
            bytes = self.request.length,
            path = ?self.plan.strategy,
            kernel = self.plan.kernel.name(),
        );
        // SAFETY: the caller upholds the contract.
        let completion = unsafe { self.completion() };
        let completion = Arc::new(completion.notifying(notify).traced(span));
        if let Some(variable) = kept {
            let _ = completion.keep_alive(variable);
        }
        let registration = self.route.and_then(|route| route.open.registrations.as_ref());
        let variable = registration.and_then(|pin| pin.notification_lease(notify.as_ref()));
        // SAFETY: the caller upholds the contract.
        let orders = unsafe { self.batches(&completion, variable) };
        // SAFETY: the completion belongs to this delivery, and the batches contain all its parts.
        unsafe {
            if after.is_empty() {
                Dispatch::now(&completion, orders);
            } else {
                Dispatch::after(&after, completion.clone(), orders);
            }
        }
        completion
    }

    /// # Safety
    /// As for [`Ferry::ideliver_raw`].
    unsafe fn completion(&self) -> Completion {
        let Request { target, length, .. } = *self.request;
        if length == 0 {
            return Completion::whole();
        }
        let (kernel, chunk) = (self.plan.kernel, length.min(MAX_CHUNK));
        // SAFETY: the caller guarantees that the target stays valid until the transfer is complete.
        // The source address is a placeholder that no thread reads: all chunks are claimed here
        // before another thread has access to the work, and every part has its own source.
        let work =
            unsafe { ChunkedWork::new(Opcode::Copy, kernel, target, target, length, 0, chunk) };
        while work.claim_front().is_some() {}
        Completion::chunked(work)
    }

    /// # Safety
    /// As for [`Ferry::ideliver_raw`]; the completion must belong to this delivery.
    unsafe fn batches(
        &self,
        completion: &Arc<Completion>,
        variable: Option<Arc<Lease>>,
    ) -> Vec<ChannelBatch> {
        let Request { target, length, .. } = *self.request;
        let mut orders = Vec::new();
        let Some(route) = self.route else {
            for (piece, offset) in self.segments_with_offsets() {
                let mut push = |part| orders.push(ChannelBatch::inline(part));
                // SAFETY: the caller upholds the contract.
                unsafe { self.split_segment(piece, offset, completion, &mut push) };
            }
            return orders;
        };
        let registration = route.open.registrations.as_ref().filter(|_| length > 0);
        let target = registration.map(|pin| pin.lease(target, length, Access::Write));
        let mut batch = Vec::with_capacity(self.segments.len());
        for (piece, offset) in self.segments_with_offsets() {
            let Some((registration, target)) = registration.zip(target.clone()) else {
                // SAFETY: the caller upholds the contract.
                unsafe { self.split_segment(piece, offset, completion, |part| batch.push(part)) };
                continue;
            };
            let pins = target.and_then(|target| {
                let (address, length) = (piece.address as u64, piece.length as u64);
                let source = registration.lease(address, length, Access::Read)?;
                let (source, target) = (Some(source), Some(target));
                Ok(Arc::new(DescriptorLeases { source, target, variable: variable.clone() }))
            });
            match pins {
                Ok(pins) => {
                    let mut push = |part: Descriptor| batch.push(part.pinned_by(pins.clone()));
                    // SAFETY: the caller upholds the contract.
                    unsafe { self.split_segment(piece, offset, completion, &mut push) };
                }
                Err(unpinned) => {
                    orders.extend(route.take_batch(&mut batch));
                    let mut push = |part| orders.push(registration.unpinned_batch(part, unpinned));
                    // SAFETY: the caller upholds the contract.
                    unsafe { self.split_segment(piece, offset, completion, &mut push) };
                }
            }
        }
        orders.extend(route.take_batch(&mut batch));
        orders
    }

    /// Splits a segment at the limits of the engine and at chunk boundaries, and creates a part for
    /// each range.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver_raw`]; the completion must belong to this delivery, and no segment is
    /// split twice.
    unsafe fn split_segment(
        &self,
        piece: Segment,
        mut offset: u64,
        completion: &Arc<Completion>,
        mut push: impl FnMut(Descriptor),
    ) {
        let work = completion.work().expect("what has bytes is chunked work");
        let capabilities = self.route.map(|route| route.open.engine.capabilities());
        let (mut source, end) = (piece.address as u64, offset + piece.length as u64);
        while offset < end {
            let left = end.min(work.chunk_end(offset)) - offset;
            let length = capabilities.map_or(left, |capabilities| {
                capabilities.max_part(source, self.request.target + offset, left)
            });
            // SAFETY: the caller upholds the contract; the range is part of the segment, and the
            // offset is its position in the target.
            let part = unsafe { self.descriptor(source, offset, length) };
            // SAFETY: all chunks were claimed when the completion was created, and no segment is
            // split twice.
            push(unsafe { part.part_of(completion.clone(), offset) });
            (source, offset) = (source + length, offset + length);
        }
    }

    /// # Safety
    /// As for [`Ferry::ideliver_raw`], for these bytes.
    unsafe fn descriptor(&self, source: u64, offset: u64, length: u64) -> Descriptor {
        let target = self.request.target + offset;
        // SAFETY: the caller upholds the contract; `check` ensures that no segment overlaps the
        // target.
        unsafe { Descriptor::new(Opcode::Copy, source, target, length) }.kernel(self.plan.kernel)
    }
}
