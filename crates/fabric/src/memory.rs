//! Registered memory: what others may access by its key. Messages need none.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use memferry_message::{Piece, Rights};

use crate::abi::*;
use crate::domain::Domain;
use crate::guard::{Code, Result, call, unsupported};
use crate::object::{self, Object, Visible};

/// Memory of a device, described by a descriptor: a flag of 2.x.
const DEVICE_MEMORY: u64 = 1 << 40;

/// Memory, and what others may do with it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) piece: Piece,
    pub(crate) rights: Option<Rights>,
}

impl Region {
    fn new(piece: libc::iovec, access: u64) -> Self {
        let rights = match (access & FI_REMOTE_READ != 0, access & FI_REMOTE_WRITE != 0) {
            (true, true) => Some(Rights::READ_WRITE),
            (true, false) => Some(Rights::READ),
            (false, true) => Some(Rights::WRITE),
            (false, false) => None,
        };
        Self { piece: Piece::target(piece.iov_base.cast(), piece.iov_len), rights }
    }
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Registration {
    visible: Visible<FidMr>,
    domain: Arc<Domain>,
}

// SAFETY: it begins with the visible part of a registration, whose class this is.
unsafe impl Object for Registration {
    const CLASS: usize = FI_CLASS_MR;
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind,
    control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

pub(crate) static OPS: OpsMr =
    OpsMr { size: size_of::<OpsMr>(), reg: register, regv: register_pieces, regattr: register_as };

unsafe extern "C" fn register(
    domain: *mut Fid,
    address: *const c_void,
    length: usize,
    access: u64,
    _offset: u64,
    key: u64,
    flags: u64,
    mr: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    let piece = libc::iovec { iov_base: address.cast_mut(), iov_len: length };
    // SAFETY: libfabric's contract, passed on.
    call(|| unsafe { open(domain, &raw const piece, 1, access, key, flags, mr, context) })
}

unsafe extern "C" fn register_pieces(
    domain: *mut Fid,
    pieces: *const libc::iovec,
    count: usize,
    access: u64,
    _offset: u64,
    key: u64,
    flags: u64,
    mr: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract, passed on.
    call(|| unsafe { open(domain, pieces, count, access, key, flags, mr, context) })
}

unsafe extern "C" fn register_as(
    domain: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    mr: *mut *mut FidMr,
) -> c_int {
    // SAFETY: libfabric's contract: attributes or null, the rest passed on.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(Code(FI_EINVAL))?;
        if attr.iface != FI_HMEM_SYSTEM {
            return Err(Code(FI_ENOSYS));
        }
        let (access, key) = (attr.access, attr.requested_key);
        open(domain, attr.mr_iov, attr.iov_count, access, key, flags, mr, attr.context)
    })
}

/// # Safety
/// The domain must be open, there must be as many pieces, and room for a pointer.
#[allow(clippy::too_many_arguments)]
unsafe fn open(
    domain: *mut Fid,
    pieces: *const libc::iovec,
    count: usize,
    access: u64,
    key: u64,
    flags: u64,
    mr: *mut *mut FidMr,
    context: *mut c_void,
) -> Result {
    if pieces.is_null() || count != 1 || mr.is_null() {
        return Err(Code(FI_EINVAL));
    }
    if flags & DEVICE_MEMORY != 0 {
        return Err(Code(FI_EOPNOTSUPP));
    }
    // SAFETY: the caller's promise.
    let domain: Arc<Domain> = unsafe { object::downcast(domain) }.ok_or(Code(FI_EINVAL))?;
    // SAFETY: as above; whoever registers memory keeps it until the registration is closed.
    let key = unsafe { domain.register(key, Region::new(*pieces, access))? };
    let fid = Fid { fclass: FI_CLASS_MR, context, ops: &raw const FID_OPS };
    let registration = Arc::new_cyclic(|this: &std::sync::Weak<Registration>| {
        // Programs pass the description back with every message; nothing looks at it.
        let mem_desc = this.as_ptr().cast_mut().cast();
        Registration { visible: Visible::new(FidMr { fid, mem_desc, key }), domain }
    });
    // SAFETY: the caller's promise.
    unsafe { object::give(registration, mr) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open registration, which is not used again if it closes.
    call(|| unsafe {
        let registration: &Registration = object::borrow(fid);
        // It stays open while a peer is in the middle of an access.
        registration.domain.give_key_back(registration.visible.key)?;
        object::take::<Registration, _>(fid).map(drop)
    })
}

/// Counters and endpoints may be bound; they learn nothing: accesses of others are not told here.
unsafe extern "C" fn bind(_: *mut Fid, _: *mut Fid, _flags: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut Fid, command: c_int, _: *mut c_void) -> c_int {
    if command == FI_ENABLE { 0 } else { -FI_ENOSYS }
}
