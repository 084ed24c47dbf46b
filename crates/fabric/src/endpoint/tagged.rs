//! The calls for tagged messages.

use std::ffi::c_void;

use memferry_message::{Envelope, MatchSpace, Segment};

use super::Endpoint;
use super::receive::RecvMatch;
use super::send::IovList;
use crate::abi::*;
use crate::guard::{FiError, transfer};
use crate::object;

pub(super) static OPS: OpsTagged = OpsTagged {
    size: size_of::<OpsTagged>(),
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
};

#[inline]
fn envelope(tag: u64, data: Option<u64>) -> Envelope {
    Envelope { space: MatchSpace::Tagged, tag, data }
}

#[inline]
fn recv_match(from: u64, tag: u64, ignored: u64) -> RecvMatch {
    RecvMatch { space: MatchSpace::Tagged, from, tag, ignored }
}

unsafe extern "C" fn recv(
    ep: *mut FidEp,
    buffer: *mut c_void,
    length: usize,
    _desc: *mut c_void,
    from: u64,
    tag: u64,
    ignored: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let segments = [Segment::target(buffer.cast(), length)];
        endpoint.receive(
            recv_match(from, tag, ignored),
            &segments,
            context,
            endpoint.receive_flags(),
        )
    })
}

unsafe extern "C" fn recvv(
    ep: *mut FidEp,
    vectors: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    from: u64,
    tag: u64,
    ignored: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `count` vectors, memory that stays valid
    // until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let segments = IovList::new(vectors, count)?;
        let matched = recv_match(from, tag, ignored);
        endpoint.receive(matched, segments.as_slice(), context, endpoint.receive_flags())
    })
}

unsafe extern "C" fn recvmsg(ep: *mut FidEp, message: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, a description, memory that stays valid until
    // completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let message = message.as_ref().ok_or(FiError(FI_EINVAL))?;
        let segments = IovList::new(message.msg_iov, message.iov_count)?;
        let matched = recv_match(message.addr, message.tag, message.ignore);
        endpoint.receive(matched, segments.as_slice(), message.context, flags)
    })
}

unsafe extern "C" fn send(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    _desc: *mut c_void,
    to: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let segments = [Segment::source(buffer.cast(), length)];
        endpoint.send(to, envelope(tag, None), &segments, context, endpoint.send_flags())
    })
}

unsafe extern "C" fn sendv(
    ep: *mut FidEp,
    vectors: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    to: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `count` vectors, memory that stays valid
    // until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let segments = IovList::new(vectors, count)?;
        let flags = endpoint.send_flags();
        endpoint.send(to, envelope(tag, None), segments.as_slice(), context, flags)
    })
}

unsafe extern "C" fn sendmsg(ep: *mut FidEp, message: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, a description, memory that stays valid until
    // completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let message = message.as_ref().ok_or(FiError(FI_EINVAL))?;
        let segments = IovList::new(message.msg_iov, message.iov_count)?;
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(message.data);
        let envelope = envelope(message.tag, data);
        endpoint.send(message.addr, envelope, segments.as_slice(), message.context, flags)
    })
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    to: u64,
    tag: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    transfer(|| unsafe {
        object::borrow::<Endpoint, _>(ep).inject(to, envelope(tag, None), buffer, length)
    })
}

unsafe extern "C" fn senddata(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    _desc: *mut c_void,
    data: u64,
    to: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, memory that stays valid until completion.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let segments = [Segment::source(buffer.cast(), length)];
        endpoint.send(to, envelope(tag, Some(data)), &segments, context, endpoint.send_flags())
    })
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    buffer: *const c_void,
    length: usize,
    data: u64,
    to: u64,
    tag: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    transfer(|| unsafe {
        object::borrow::<Endpoint, _>(ep).inject(to, envelope(tag, Some(data)), buffer, length)
    })
}
