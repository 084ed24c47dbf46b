//! Fabrics: they open domains and event queues, and check whether a program may wait.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use crate::abi::*;
use crate::domain;
use crate::guard::{FiError, call, unsupported};
use crate::info::FABRIC_NAME;
use crate::object::{self, FidHeader, FidObject};
use crate::queue::{self, CompletionQueue, Counter, EventQueue};

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Fabric {
    header: FidHeader<FidFabric>,
}

// SAFETY: it begins with the header of a fabric, whose class this is.
unsafe impl FidObject for Fabric {
    const CLASS: usize = FI_CLASS_FABRIC;
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind: no_bind,
    control: no_control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

static OPS: OpsFabric = OpsFabric {
    size: size_of::<OpsFabric>(),
    domain: domain::open,
    passive_ep: unsupported,
    eq_open: queue::open_event_queue,
    wait_open: unsupported,
    trywait,
    domain2: domain::open_with_flags,
};

pub(crate) unsafe extern "C" fn open(
    attr: *mut FabricAttr,
    fabric: *mut *mut FidFabric,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: attributes that `getinfo` gave, space for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        if !attr.name.is_null() && CStr::from_ptr(attr.name) != FABRIC_NAME {
            return Err(FiError(FI_ENODATA));
        }
        let fid = Fid { fclass: FI_CLASS_FABRIC, context, ops: &raw const FID_OPS };
        let visible = FidFabric { fid, ops: &raw const OPS, api_version: attr.api_version };
        object::into_raw(Arc::new(Fabric { header: FidHeader::new(visible) }), fabric)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open fabric, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<Fabric, _>(fid).map(drop) })
}

/// Returns whether a program may wait for these queues: not while one of them has entries.
unsafe extern "C" fn trywait(_fabric: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int {
    // SAFETY: libfabric's contract: `count` open objects.
    call(|| unsafe {
        for index in 0..usize::try_from(count).map_err(|_| FiError(FI_EINVAL))? {
            let fid = *fids.add(index);
            let is_idle = match (*fid).fclass {
                FI_CLASS_CQ => object::borrow::<CompletionQueue, _>(fid).prepare_to_wait()?,
                FI_CLASS_EQ => object::borrow::<EventQueue, _>(fid).is_empty(),
                FI_CLASS_CNTR => object::borrow::<Counter, _>(fid).prepare_to_wait()?,
                _ => return Err(FiError(FI_ENOSYS)),
            };
            if !is_idle {
                return Err(FiError(FI_EAGAIN));
            }
        }
        Ok(())
    })
}

/// For objects that cannot be bound.
pub(crate) unsafe extern "C" fn no_bind(_: *mut Fid, _: *mut Fid, _flags: u64) -> c_int {
    -FI_ENOSYS
}

/// For objects without control commands.
pub(crate) unsafe extern "C" fn no_control(_: *mut Fid, _command: c_int, _: *mut c_void) -> c_int {
    -FI_ENOSYS
}
