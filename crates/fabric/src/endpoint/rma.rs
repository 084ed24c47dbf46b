//! The calls that read and write the memory of peers.

use std::ffi::c_void;

use memferry_message::{
    CompletionEntry, CompletionKind, CompletionOptions, RemoteRma, RemoteRmaOp, Segment,
};

use super::Endpoint;
use super::core::{CompletionBinding, EndpointCore};
use super::order::OrderedOp;
use super::send::{IovList, gather_copy};
use super::service::WriteNotification;
use super::tracked::{TrackedOp, TrackedRole, is_tracked};
use super::windows::RmaRoute;
use crate::abi::*;
use crate::guard::{FiError, Result, transfer};
use crate::object;

pub(super) static OPS: OpsRma = OpsRma {
    size: size_of::<OpsRma>(),
    read,
    readv,
    readmsg,
    write,
    writev,
    writemsg,
    inject,
    writedata,
    injectdata,
};

/// A range of a peer's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct RmaTarget {
    pub(super) peer: u64,
    pub(super) address: u64,
    pub(super) key: u64,
}

/// The direction of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RmaKind {
    Read,
    Write,
}

impl Endpoint {
    /// Starts an access.
    ///
    /// # Safety
    /// The segments must be valid until completion, unless the flags request a copy of them.
    unsafe fn rma(
        &self,
        kind: RmaKind,
        target: RmaTarget,
        segments: &[Segment],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        let core = self.core()?;
        self.check_order(core, core.peer(target.peer)?, OrderedOp::Rma, flags)?;
        let is_silent = core.binding_of(kind).is_silent(flags);
        let tracked = TrackedOp::new(context as u64, is_silent);
        if flags & FI_INJECT != 0 {
            // SAFETY: the caller guarantees it.
            let bytes = unsafe { gather_copy(segments) }?;
            let copy = [Segment::source(bytes.as_ptr(), bytes.len())];
            let tracked = TrackedOp { bytes: Some(bytes), ..tracked };
            // SAFETY: the tracked operation owns the copy until completion.
            return unsafe { self.rma_tracked(core, kind, target, &copy, tracked) };
        }
        let is_counted = is_silent && core.binding_of(kind).counter.is_some();
        if segments.len() != 1 || is_tracked(tracked.context) || is_counted {
            // SAFETY: the caller guarantees it.
            return unsafe { self.rma_tracked(core, kind, target, segments, tracked) };
        }
        let options = CompletionOptions {
            context: tracked.context,
            silent_on_success: is_silent,
            delivery_complete: true,
        };
        // SAFETY: the caller guarantees it.
        let report = unsafe { self.start_rma(core, kind, target, segments[0], options) }?;
        report.iter().for_each(|report| core.deliver(report));
        Ok(())
    }

    /// Starts a write whose target gets an entry with data when the bytes have arrived.
    ///
    /// # Safety
    /// As for [`Endpoint::rma`].
    unsafe fn write_with_data(
        &self,
        target: RmaTarget,
        segments: &[Segment],
        context: *mut c_void,
        flags: u64,
        data: u64,
    ) -> Result {
        let is_silent = self.core()?.writes.is_silent(flags);
        let tracked = TrackedOp::new(context as u64, is_silent);
        // SAFETY: the caller guarantees it.
        unsafe { self.notified_write(target, segments, tracked, flags, data) }
    }

    /// As [`Endpoint::write_with_data`], of bytes that may change as soon as this returns. Makes no
    /// entry on success.
    ///
    /// # Safety
    /// The segments must be valid.
    unsafe fn inject_with_data(
        &self,
        target: RmaTarget,
        segments: &[Segment],
        data: u64,
    ) -> Result {
        // SAFETY: the bytes are copied.
        unsafe { self.notified_write(target, segments, TrackedOp::new(0, true), FI_INJECT, data) }
    }

    /// # Safety
    /// As for [`Endpoint::rma`].
    unsafe fn notified_write(
        &self,
        target: RmaTarget,
        segments: &[Segment],
        tracked: TrackedOp,
        flags: u64,
        data: u64,
    ) -> Result {
        let core = self.core()?;
        let peer = core.peer(target.peer)?;
        // Notifications are sent to connected peers only.
        core.check_connected(peer)?;
        self.check_order(core, peer, OrderedOp::Rma, flags)?;
        let length = segments.iter().map(|segment| segment.length as u64).sum();
        let connection = core.messages.connection_number(peer)?;
        let notification = WriteNotification { peer, connection, data, length };
        let role = TrackedRole::NotifiedWrite(notification);
        let mut tracked = TrackedOp { role, ..tracked };
        let mut segments = segments;
        let copy;
        if flags & FI_INJECT != 0 {
            // SAFETY: the caller guarantees it.
            let bytes = unsafe { gather_copy(segments) }?;
            copy = [Segment::source(bytes.as_ptr(), bytes.len())];
            (segments, tracked.bytes) = (&copy, Some(bytes));
        }
        core.take_notification_credit(&notification)?;
        // A write of nothing goes the same way: its notification must not overtake earlier writes.
        // SAFETY: the caller guarantees the segments, or the tracked operation owns them.
        let started = unsafe { self.rma_tracked(core, RmaKind::Write, target, segments, tracked) };
        if started.is_err() {
            core.give_back_notification_credit(peer, connection, 1);
        }
        started
    }

    /// Starts a tracked access, segment by segment.
    ///
    /// # Safety
    /// As for [`Endpoint::rma`]; or the memory must be owned by the tracked operation.
    unsafe fn rma_tracked(
        &self,
        core: &EndpointCore,
        kind: RmaKind,
        mut target: RmaTarget,
        segments: &[Segment],
        tracked: TrackedOp,
    ) -> Result {
        let nothing = [Segment::source(std::ptr::null(), 0)];
        let segments = if segments.is_empty() { &nothing } else { segments };
        let mark = core.tracked.add(TrackedOp { parts: segments.len(), ..tracked });
        let options =
            CompletionOptions { context: mark, silent_on_success: false, delivery_complete: true };
        for (index, segment) in segments.iter().enumerate() {
            // SAFETY: the caller guarantees it.
            match unsafe { self.start_rma(core, kind, target, *segment, options) } {
                Ok(report) => report.iter().for_each(|report| core.deliver(report)),
                // No part was started.
                Err(code) if index == 0 => {
                    core.tracked.remove(mark);
                    return Err(code);
                }
                // The started parts continue, and the last completion reports this error.
                Err(FiError(code)) => {
                    (index..segments.len())
                        .for_each(|_| core.finish_part(kind.completion_kind(), mark, code));
                    break;
                }
            }
            target.address = target.address.wrapping_add(segment.length as u64);
        }
        Ok(())
    }

    /// # Safety
    /// The segment must be valid until completion.
    unsafe fn start_rma(
        &self,
        core: &EndpointCore,
        kind: RmaKind,
        target: RmaTarget,
        segment: Segment,
        options: CompletionOptions,
    ) -> Result<Option<CompletionEntry>> {
        let peer = core.peer(target.peer)?;
        let is_virtual = self.shared.domain.has_virtual_addresses();
        let window = match core.rma_route(peer, target.key)? {
            RmaRoute::Window(window) => window,
            RmaRoute::Remote => {
                let RmaTarget { key, address, .. } = target;
                let access = RemoteRma { op: kind.remote_op(), key, address, local: segment };
                // SAFETY: the caller guarantees it.
                unsafe { core.messages.post_remote_rma(peer, &access, options) }?;
                return Ok(None);
            }
        };
        let start = if is_virtual { window.address() } else { 0 };
        let offset = target.address.wrapping_sub(start);
        // SAFETY: the caller guarantees it.
        Ok(unsafe {
            match kind {
                RmaKind::Read => window.post_get(offset, segment.address, segment.length, options),
                RmaKind::Write => window.post_put(offset, segment.address, segment.length, options),
            }
        }?)
    }
}

impl RmaKind {
    fn remote_op(self) -> RemoteRmaOp {
        match self {
            Self::Read => RemoteRmaOp::Get,
            Self::Write => RemoteRmaOp::Put,
        }
    }

    fn completion_kind(self) -> CompletionKind {
        match self {
            Self::Read => CompletionKind::Get,
            Self::Write => CompletionKind::Put,
        }
    }
}

impl EndpointCore {
    fn binding_of(&self, kind: RmaKind) -> &CompletionBinding {
        match kind {
            RmaKind::Read => &self.reads,
            RmaKind::Write => &self.writes,
        }
    }
}

unsafe extern "C" fn read(
    ep: *mut FidEp,
    buffer: *mut c_void,
    length: usize,
    _desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (target, segments) =
            (RmaTarget { peer, address, key }, [Segment::target(buffer.cast(), length)]);
        endpoint.rma(RmaKind::Read, target, &segments, context, endpoint.send_flags())
    })
}

unsafe extern "C" fn readv(
    ep: *mut FidEp,
    vectors: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `count` vectors, memory that stays valid
    // until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (target, segments) = (RmaTarget { peer, address, key }, IovList::new(vectors, count)?);
        let flags = endpoint.send_flags() & !FI_INJECT;
        endpoint.rma(RmaKind::Read, target, segments.as_slice(), context, flags)
    })
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: the caller guarantees it.
    transfer(|| unsafe { rma_message(ep, message, RmaKind::Read, flags & !FI_INJECT) })
}

unsafe extern "C" fn write(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    _desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (target, segments) =
            (RmaTarget { peer, address, key }, [Segment::source(buffer.cast(), length)]);
        endpoint.rma(RmaKind::Write, target, &segments, context, endpoint.send_flags())
    })
}

unsafe extern "C" fn writev(
    ep: *mut FidEp,
    vectors: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `count` vectors, memory that stays valid
    // until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (target, segments) = (RmaTarget { peer, address, key }, IovList::new(vectors, count)?);
        endpoint.rma(RmaKind::Write, target, segments.as_slice(), context, endpoint.send_flags())
    })
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: the caller guarantees it.
    transfer(|| unsafe { rma_message(ep, message, RmaKind::Write, flags) })
}

/// # Safety
/// libfabric's contract: an open endpoint, a description, memory that stays valid until completion.
unsafe fn rma_message(ep: *mut FidEp, message: *const MsgRma, kind: RmaKind, flags: u64) -> Result {
    // SAFETY: the caller guarantees it.
    unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let message = message.as_ref().ok_or(FiError(FI_EINVAL))?;
        let segments = IovList::new(message.msg_iov, message.iov_count)?;
        let remote = message.rma_iov.as_ref().filter(|_| message.rma_iov_count == 1);
        let remote = remote.ok_or(FiError(FI_EINVAL))?;
        let length: usize = segments.as_slice().iter().map(|segment| segment.length).sum();
        if length > remote.len {
            return Err(FiError(FI_EINVAL));
        }
        let target = RmaTarget { peer: message.addr, address: remote.addr, key: remote.key };
        if flags & FI_REMOTE_CQ_DATA != 0 {
            if kind == RmaKind::Read {
                return Err(FiError(FI_EINVAL));
            }
            let (segments, data) = (segments.as_slice(), message.data);
            return endpoint.write_with_data(target, segments, message.context, flags, data);
        }
        endpoint.rma(kind, target, segments.as_slice(), message.context, flags)
    }
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    peer: u64,
    address: u64,
    key: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (target, segment) =
            (RmaTarget { peer, address, key }, Segment::source(buffer.cast(), length));
        let core = endpoint.core()?;
        endpoint.check_order(core, core.peer(peer)?, OrderedOp::Rma, 0)?;
        let bytes = gather_copy(&[segment])?;
        let copy = [Segment::source(bytes.as_ptr(), bytes.len())];
        let tracked = TrackedOp { bytes: Some(bytes), ..TrackedOp::new(0, true) };
        // Not requested: an injected write that succeeds makes no completion entry.
        endpoint.rma_tracked(core, RmaKind::Write, target, &copy, tracked)
    })
}

unsafe extern "C" fn writedata(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    _desc: *mut c_void,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let target = RmaTarget { peer, address, key };
        let segments = [Segment::source(buffer.cast(), length)];
        endpoint.write_with_data(target, &segments, context, endpoint.send_flags(), data)
    })
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let target = RmaTarget { peer, address, key };
        let segments = [Segment::source(buffer.cast(), length)];
        endpoint.inject_with_data(target, &segments, data)
    })
}
