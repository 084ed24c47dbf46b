//! Registered memory, which peers access by its key. Messages need no registration.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use memferry_message::{Rights, Segment};

use crate::abi::*;
use crate::domain::Domain;
use crate::guard::{FiError, Result, call, unsupported};
use crate::object::{self, FidHeader, FidObject};

/// Memory of a device, described by a descriptor: a flag of 2.x.
const DEVICE_MEMORY: u64 = 1 << 40;

/// Registered memory, and the rights of peers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MrRange {
    pub(crate) segment: Segment,
    pub(crate) rights: Option<Rights>,
}

impl MrRange {
    fn new(segment: libc::iovec, access: u64) -> Self {
        let rights = match (access & FI_REMOTE_READ != 0, access & FI_REMOTE_WRITE != 0) {
            (true, true) => Some(Rights::READ_WRITE),
            (true, false) => Some(Rights::READ),
            (false, true) => Some(Rights::WRITE),
            (false, false) => None,
        };
        Self { segment: Segment::target(segment.iov_base.cast(), segment.iov_len), rights }
    }
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct MemoryRegion {
    header: FidHeader<FidMr>,
    domain: Arc<Domain>,
}

// SAFETY: it begins with the header of a registration, whose class this is.
unsafe impl FidObject for MemoryRegion {
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

pub(crate) static OPS: OpsMr = OpsMr {
    size: size_of::<OpsMr>(),
    reg: register,
    regv: register_vector,
    regattr: register_attr,
};

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
    let segment = libc::iovec { iov_base: address.cast_mut(), iov_len: length };
    // SAFETY: libfabric's contract, which `open` requires.
    call(|| unsafe { open(domain, &raw const segment, 1, access, key, flags, mr, context) })
}

unsafe extern "C" fn register_vector(
    domain: *mut Fid,
    segments: *const libc::iovec,
    count: usize,
    access: u64,
    _offset: u64,
    key: u64,
    flags: u64,
    mr: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract, which `open` requires.
    call(|| unsafe { open(domain, segments, count, access, key, flags, mr, context) })
}

unsafe extern "C" fn register_attr(
    domain: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    mr: *mut *mut FidMr,
) -> c_int {
    // SAFETY: libfabric's contract: attributes or null; `open` requires the rest.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        if attr.iface != FI_HMEM_SYSTEM {
            return Err(FiError(FI_ENOSYS));
        }
        let (access, key) = (attr.access, attr.requested_key);
        open(domain, attr.mr_iov, attr.iov_count, access, key, flags, mr, attr.context)
    })
}

/// # Safety
/// The domain must be open, there must be `count` vectors, and space for a pointer.
#[allow(clippy::too_many_arguments)]
unsafe fn open(
    domain: *mut Fid,
    segments: *const libc::iovec,
    count: usize,
    access: u64,
    key: u64,
    flags: u64,
    mr: *mut *mut FidMr,
    context: *mut c_void,
) -> Result {
    if segments.is_null() || count != 1 || mr.is_null() {
        return Err(FiError(FI_EINVAL));
    }
    if flags & DEVICE_MEMORY != 0 {
        return Err(FiError(FI_EOPNOTSUPP));
    }
    // SAFETY: the caller guarantees it.
    let domain: Arc<Domain> = unsafe { object::downcast(domain) }.ok_or(FiError(FI_EINVAL))?;
    // SAFETY: as above; the program keeps the memory valid until the registration is closed.
    let key = unsafe { domain.register(key, MrRange::new(*segments, access))? };
    let fid = Fid { fclass: FI_CLASS_MR, context, ops: &raw const FID_OPS };
    let registration = Arc::new_cyclic(|this: &std::sync::Weak<MemoryRegion>| {
        // Programs pass the descriptor back with every message; it is ignored.
        let mem_desc = this.as_ptr().cast_mut().cast();
        MemoryRegion { header: FidHeader::new(FidMr { fid, mem_desc, key }), domain }
    });
    // SAFETY: the caller guarantees it.
    unsafe { object::into_raw(registration, mr) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open registration, which the program does not use again
    // after a success.
    call(|| unsafe {
        let registration: &MemoryRegion = object::borrow(fid);
        // The registration stays open while a peer accesses the memory.
        registration.domain.release_key(registration.header.key)?;
        object::from_raw::<MemoryRegion, _>(fid).map(drop)
    })
}

/// Counters and endpoints may be bound, without effect: accesses of peers are not reported.
unsafe extern "C" fn bind(_: *mut Fid, _: *mut Fid, _flags: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut Fid, command: c_int, _: *mut c_void) -> c_int {
    if command == FI_ENABLE { 0 } else { -FI_ENOSYS }
}
