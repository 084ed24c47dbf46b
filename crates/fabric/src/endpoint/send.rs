//! Sends of tagged and untagged messages.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memferry_message::{CompletionOptions, Envelope, Segment};

use super::Endpoint;
use super::core::EndpointCore;
use super::order::OrderedOp;
use super::tracked::{TrackedOp, is_tracked};
use crate::abi::*;
use crate::guard::{FiError, Result};
use crate::info::{INJECT_BYTES, IOV_LIMIT};
use crate::queue::{QueuedCompletion, space_flag};

const _: () = assert!(IOV_LIMIT <= memferry_message::MAX_SEGMENTS);

/// Flags with which a send completes only when its message is received.
const DELIVERY_FLAGS: u64 = FI_DELIVERY_COMPLETE | FI_COMMIT_COMPLETE | FI_MATCH_COMPLETE;

/// The segments of a message, from iovecs.
pub(super) struct IovList {
    segments: [Segment; IOV_LIMIT],
    count: usize,
}

impl IovList {
    /// # Safety
    /// There must be `count` vectors.
    pub(super) unsafe fn new(vectors: *const libc::iovec, count: usize) -> Result<Self> {
        if count > IOV_LIMIT || (count > 0 && vectors.is_null()) {
            return Err(FiError(FI_EINVAL));
        }
        let mut segments = [Segment::target(std::ptr::null_mut(), 0); IOV_LIMIT];
        for (index, segment) in segments[..count].iter_mut().enumerate() {
            // SAFETY: the caller guarantees it.
            let vector = unsafe { *vectors.add(index) };
            *segment = Segment::target(vector.iov_base.cast(), vector.iov_len);
        }
        Ok(Self { segments, count })
    }

    /// The segments of `count` vectors of elements of `size` bytes.
    ///
    /// # Safety
    /// There must be `count` vectors.
    pub(super) unsafe fn of_elements(
        vectors: *const Ioc,
        count: usize,
        size: usize,
    ) -> Result<Self> {
        if count > IOV_LIMIT || (count > 0 && vectors.is_null()) {
            return Err(FiError(FI_EINVAL));
        }
        let mut segments = [Segment::target(std::ptr::null_mut(), 0); IOV_LIMIT];
        for (index, segment) in segments[..count].iter_mut().enumerate() {
            // SAFETY: the caller guarantees it.
            let vector = unsafe { *vectors.add(index) };
            let length = vector.count.checked_mul(size).ok_or(FiError(FI_EINVAL))?;
            *segment = Segment::target(vector.addr.cast(), length);
        }
        Ok(Self { segments, count })
    }

    pub(super) fn as_slice(&self) -> &[Segment] {
        &self.segments[..self.count]
    }
}

impl Endpoint {
    #[inline]
    pub(super) fn send_flags(&self) -> u64 {
        self.send_flags.load(Ordering::Relaxed)
    }

    /// Starts a send.
    ///
    /// # Safety
    /// The segments must be valid and unchanged until the send completes.
    #[inline]
    pub(super) unsafe fn send(
        &self,
        to: u64,
        envelope: Envelope,
        segments: &[Segment],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        let core = self.core()?;
        let peer = core.peer(to)?;
        if self.orders_sends || flags & FI_FENCE != 0 {
            self.check_order(core, peer, OrderedOp::Send, flags)?;
        }
        let is_silent = core.sends.is_silent(flags);
        let delivered = flags & DELIVERY_FLAGS != 0;
        let options = CompletionOptions {
            context: context as u64,
            silent_on_success: is_silent,
            delivery_complete: delivered,
        };
        if flags & FI_INJECT != 0 {
            // SAFETY: the caller guarantees it.
            return unsafe { send_copy(core, to, envelope, segments, options) };
        }
        // A silent send makes no completion entry that could be counted.
        if is_tracked(options.context) || (is_silent && core.sends.counter.is_some()) {
            // SAFETY: the caller guarantees it.
            return unsafe { send_tracked(core, to, envelope, segments, options, None) };
        }
        // SAFETY: the caller guarantees it.
        if let Some(report) = unsafe { core.messages.post_send(peer, envelope, segments, options)? }
        {
            core.deliver(&report);
        }
        Ok(())
    }

    /// Sends bytes that may change as soon as this returns. Makes no completion entry.
    ///
    /// # Safety
    /// There must be `length` bytes.
    #[inline]
    pub(super) unsafe fn inject(
        &self,
        to: u64,
        envelope: Envelope,
        address: *const c_void,
        length: usize,
    ) -> Result {
        let core = self.core()?;
        if length > INJECT_BYTES {
            return Err(FiError(FI_EINVAL));
        }
        let bytes = match length {
            0 => &[][..],
            // SAFETY: the caller guarantees it.
            _ => unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) },
        };
        let peer = core.peer(to)?;
        if self.orders_sends {
            self.check_order(core, peer, OrderedOp::Send, 0)?;
        }
        core.messages.inject(peer, envelope, bytes)?;
        core.sends.count(true);
        Ok(())
    }
}

/// Copies memory that may be injected.
///
/// # Safety
/// The segments must be valid.
pub(super) unsafe fn gather_copy(segments: &[Segment]) -> Result<Box<[u8]>> {
    let total = segments.iter().fold(0, |sum: usize, segment| sum.saturating_add(segment.length));
    if total > INJECT_BYTES {
        return Err(FiError(FI_EINVAL));
    }
    let mut bytes = Vec::with_capacity(total);
    for segment in segments.iter().filter(|segment| segment.length > 0) {
        let address = segment.address.cast_const();
        // SAFETY: the caller guarantees it.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, segment.length) });
    }
    Ok(bytes.into_boxed_slice())
}

/// Sends a copy. Makes a completion entry, unless the send is silent.
///
/// # Safety
/// The segments must be valid.
unsafe fn send_copy(
    core: &EndpointCore,
    to: u64,
    envelope: Envelope,
    segments: &[Segment],
    options: CompletionOptions,
) -> Result {
    // SAFETY: the caller guarantees it.
    let bytes = unsafe { gather_copy(segments) }?;
    if options.delivery_complete {
        let copy = Segment::source(bytes.as_ptr(), bytes.len());
        // SAFETY: the tracked operation owns the bytes until completion.
        return unsafe { send_tracked(core, to, envelope, &[copy], options, Some(bytes)) };
    }
    core.messages.inject(core.peer(to)?, envelope, &bytes)?;
    core.sends.count(true);
    if !options.silent_on_success {
        core.sends
            .deliver(QueuedCompletion::new(options.context, space_flag(envelope.space) | FI_SEND));
    }
    Ok(())
}

/// Starts a tracked send.
///
/// # Safety
/// The segments must be valid and unchanged until the send completes, or be those of `bytes`.
#[cold]
unsafe fn send_tracked(
    core: &EndpointCore,
    to: u64,
    envelope: Envelope,
    segments: &[Segment],
    options: CompletionOptions,
    bytes: Option<Box<[u8]>>,
) -> Result {
    let CompletionOptions { context, silent_on_success: is_silent, delivery_complete: delivered } =
        options;
    let peer = core.peer(to)?;
    let mark = core.tracked.add(TrackedOp { bytes, ..TrackedOp::new(context, is_silent) });
    let options =
        CompletionOptions { context: mark, silent_on_success: false, delivery_complete: delivered };
    // SAFETY: the caller guarantees it.
    match unsafe { core.messages.post_send(peer, envelope, segments, options) } {
        Ok(report) => report.iter().for_each(|report| core.deliver(report)),
        Err(error) => {
            core.tracked.remove(mark);
            return Err(error.into());
        }
    }
    Ok(())
}
