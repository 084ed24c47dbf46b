//! Fabrics: where domains and event queues are opened, and where programs ask whether they may wait.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use crate::abi::*;
use crate::domain;
use crate::guard::{Code, call, unsupported};
use crate::info::FABRIC_NAME;
use crate::object::{self, Object, Visible};
use crate::queue::{self, CompletionQueue, Counter, EventQueue};

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Fabric {
    visible: Visible<FidFabric>,
}

// SAFETY: it begins with the visible part of a fabric, whose class this is.
unsafe impl Object for Fabric {
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
    // SAFETY: libfabric's contract: attributes that `getinfo` gave, room for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(Code(FI_EINVAL))?;
        if !attr.name.is_null() && CStr::from_ptr(attr.name) != FABRIC_NAME {
            return Err(Code(FI_ENODATA));
        }
        let fid = Fid { fclass: FI_CLASS_FABRIC, context, ops: &raw const FID_OPS };
        let visible = FidFabric { fid, ops: &raw const OPS, api_version: attr.api_version };
        object::give(Arc::new(Fabric { visible: Visible::new(visible) }), fabric)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open fabric, which is not used again if it closes.
    call(|| unsafe { object::take::<Fabric, _>(fid).map(drop) })
}

/// Whether a program may wait for these queues: not while there is something in one of them.
unsafe extern "C" fn trywait(_fabric: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int {
    // SAFETY: libfabric's contract: `count` open objects.
    call(|| unsafe {
        for index in 0..usize::try_from(count).map_err(|_| Code(FI_EINVAL))? {
            let fid = *fids.add(index);
            let is_idle = match (*fid).fclass {
                FI_CLASS_CQ => object::borrow::<CompletionQueue, _>(fid).prepare_to_wait()?,
                FI_CLASS_EQ => object::borrow::<EventQueue, _>(fid).is_empty(),
                FI_CLASS_CNTR => object::borrow::<Counter, _>(fid).prepare_to_wait()?,
                _ => return Err(Code(FI_ENOSYS)),
            };
            if !is_idle {
                return Err(Code(FI_EAGAIN));
            }
        }
        Ok(())
    })
}

/// For objects to which nothing is bound.
pub(crate) unsafe extern "C" fn no_bind(_: *mut Fid, _: *mut Fid, _flags: u64) -> c_int {
    -FI_ENOSYS
}

/// For objects without commands.
pub(crate) unsafe extern "C" fn no_control(_: *mut Fid, _command: c_int, _: *mut c_void) -> c_int {
    -FI_ENOSYS
}
