//! The calls that read and write the memory of peers.

use std::ffi::c_void;

use memferry_message::{AccessWay, CarriedAccess, Ending, Piece, Report, ReportKind};

use super::Endpoint;
use super::marked::{Marked, is_mark};
use super::send::{Gathered, copy_of};
use super::station::{Direction, Station};
use super::windows::Reach;
use crate::abi::*;
use crate::guard::{Code, Result, transfer};
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
    // A write that tells its target of itself would need a message; it is not offered.
    writedata: no_writedata,
    injectdata: no_injectdata,
};

/// Memory of a peer.
#[derive(Debug, Clone, Copy)]
struct Place {
    peer: u64,
    address: u64,
    key: u64,
}

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write,
}

impl Endpoint {
    /// Begins an access.
    ///
    /// # Safety
    /// The pieces must be valid until it has ended, unless the flags ask for a copy of them.
    unsafe fn access(
        &self,
        way: Way,
        place: Place,
        pieces: &[Piece],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        if flags & FI_REMOTE_CQ_DATA != 0 {
            return Err(Code(FI_ENOSYS));
        }
        let station = self.station()?;
        let quiet = station.direction_of(way).is_quiet(flags);
        let marked = Marked::new(context as u64, quiet);
        if flags & FI_INJECT != 0 {
            // SAFETY: passed on.
            let bytes = unsafe { copy_of(pieces) }?;
            let copy = [Piece::source(bytes.as_ptr(), bytes.len())];
            let marked = Marked { bytes: Some(bytes), ..marked };
            // SAFETY: the mark keeps the copy until the end.
            return unsafe { self.access_marked(station, way, place, &copy, marked) };
        }
        let is_counted = quiet && station.direction_of(way).counter.is_some();
        if pieces.len() != 1 || is_mark(marked.context) || is_counted {
            // SAFETY: passed on.
            return unsafe { self.access_marked(station, way, place, pieces, marked) };
        }
        let ending = Ending { context: marked.context, quiet, delivered: true };
        // SAFETY: passed on.
        let report = unsafe { self.begin(station, way, place, pieces[0], ending) }?;
        report.iter().for_each(|report| station.tell(report));
        Ok(())
    }

    /// The same with a mark in place of the context, piece by piece.
    ///
    /// # Safety
    /// As for [`Endpoint::access`]; or the memory must be the mark's.
    unsafe fn access_marked(
        &self,
        station: &Station,
        way: Way,
        mut place: Place,
        pieces: &[Piece],
        marked: Marked,
    ) -> Result {
        let nothing = [Piece::source(std::ptr::null(), 0)];
        let pieces = if pieces.is_empty() { &nothing } else { pieces };
        let mark = station.marks.add(Marked { parts: pieces.len(), ..marked });
        let ending = Ending { context: mark, quiet: false, delivered: true };
        for (index, piece) in pieces.iter().enumerate() {
            // SAFETY: passed on.
            match unsafe { self.begin(station, way, place, *piece, ending) } {
                Ok(report) => report.iter().for_each(|report| station.tell(report)),
                // Nothing has begun.
                Err(code) if index == 0 => {
                    station.marks.forget(mark);
                    return Err(code);
                }
                // What has begun goes on, and its last end tells of this.
                Err(Code(code)) => {
                    (index..pieces.len()).for_each(|_| station.end_part(way.kind(), mark, code));
                    break;
                }
            }
            place.address = place.address.wrapping_add(piece.length as u64);
        }
        Ok(())
    }

    /// # Safety
    /// The piece must be valid until the access has ended.
    unsafe fn begin(
        &self,
        station: &Station,
        way: Way,
        place: Place,
        piece: Piece,
        ending: Ending,
    ) -> Result<Option<Report>> {
        let peer = station.peer(place.peer)?;
        let is_virtual = self.common.domain.has_virtual_addresses();
        let window = match station.reach(peer, place.key)? {
            Reach::Window(window) => window,
            Reach::Carried => {
                let Place { key, address, .. } = place;
                let access = CarriedAccess { way: way.carried(), key, address, local: piece };
                // SAFETY: passed on.
                unsafe { station.messages.post_carried(peer, &access, ending) }?;
                return Ok(None);
            }
        };
        let start = if is_virtual { window.address() } else { 0 };
        let offset = place.address.wrapping_sub(start);
        // SAFETY: passed on.
        Ok(unsafe {
            match way {
                Way::Read => window.post_get(offset, piece.address, piece.length, ending),
                Way::Write => window.post_put(offset, piece.address, piece.length, ending),
            }
        }?)
    }
}

impl Way {
    fn carried(self) -> AccessWay {
        match self {
            Self::Read => AccessWay::Get,
            Self::Write => AccessWay::Put,
        }
    }

    fn kind(self) -> ReportKind {
        match self {
            Self::Read => ReportKind::Get,
            Self::Write => ReportKind::Put,
        }
    }
}

impl Station {
    fn direction_of(&self, way: Way) -> &Direction {
        match way {
            Way::Read => &self.reads,
            Way::Write => &self.writes,
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
    // SAFETY: libfabric's contract: an open endpoint, memory that stays until the end.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (place, pieces) =
            (Place { peer, address, key }, [Piece::target(buffer.cast(), length)]);
        endpoint.access(Way::Read, place, &pieces, context, endpoint.send_flags())
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
    // SAFETY: libfabric's contract: an open endpoint, as many vectors, memory that stays until the end.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (place, pieces) = (Place { peer, address, key }, Gathered::new(vectors, count)?);
        let flags = endpoint.send_flags() & !FI_INJECT;
        endpoint.access(Way::Read, place, pieces.as_slice(), context, flags)
    })
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: passed on.
    transfer(|| unsafe { access_message(ep, message, Way::Read, flags & !FI_INJECT) })
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
    // SAFETY: libfabric's contract: an open endpoint, memory that stays until the end.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (place, pieces) =
            (Place { peer, address, key }, [Piece::source(buffer.cast(), length)]);
        endpoint.access(Way::Write, place, &pieces, context, endpoint.send_flags())
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
    // SAFETY: libfabric's contract: an open endpoint, as many vectors, memory that stays until the end.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (place, pieces) = (Place { peer, address, key }, Gathered::new(vectors, count)?);
        endpoint.access(Way::Write, place, pieces.as_slice(), context, endpoint.send_flags())
    })
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: passed on.
    transfer(|| unsafe { access_message(ep, message, Way::Write, flags) })
}

/// # Safety
/// libfabric's contract: an open endpoint, a description, memory that stays until the end.
unsafe fn access_message(ep: *mut FidEp, message: *const MsgRma, way: Way, flags: u64) -> Result {
    // SAFETY: the caller's promise.
    unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let message = message.as_ref().ok_or(Code(FI_EINVAL))?;
        let pieces = Gathered::new(message.msg_iov, message.iov_count)?;
        let remote = message.rma_iov.as_ref().filter(|_| message.rma_iov_count == 1);
        let remote = remote.ok_or(Code(FI_EINVAL))?;
        let length: usize = pieces.as_slice().iter().map(|piece| piece.length).sum();
        if length > remote.len {
            return Err(Code(FI_EINVAL));
        }
        let place = Place { peer: message.addr, address: remote.addr, key: remote.key };
        endpoint.access(way, place, pieces.as_slice(), message.context, flags)
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
    // SAFETY: libfabric's contract: an open endpoint, as many bytes.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let (place, piece) = (Place { peer, address, key }, Piece::source(buffer.cast(), length));
        let bytes = copy_of(&[piece])?;
        let copy = [Piece::source(bytes.as_ptr(), bytes.len())];
        let marked = Marked { bytes: Some(bytes), ..Marked::new(0, true) };
        // Not even asked for: nothing is told of an injected write that goes well.
        endpoint.access_marked(endpoint.station()?, Way::Write, place, &copy, marked)
    })
}

unsafe extern "C" fn no_writedata(
    _: *mut FidEp,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _data: u64,
    _peer: u64,
    _address: u64,
    _key: u64,
    _: *mut c_void,
) -> isize {
    -(FI_ENOSYS as isize)
}

unsafe extern "C" fn no_injectdata(
    _: *mut FidEp,
    _: *const c_void,
    _: usize,
    _data: u64,
    _peer: u64,
    _address: u64,
    _key: u64,
) -> isize {
    -(FI_ENOSYS as isize)
}
