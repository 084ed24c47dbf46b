//! Options, names and cancellation of an endpoint.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use super::Endpoint;
use super::local_address::ReservedAddress;
use crate::abi::*;
use crate::address::{ADDRESS_BYTES, Address, copy_out};
use crate::guard::{FiError, call, count, transfer, unsupported};
use crate::info::INJECT_BYTES;
use crate::object;

/// Options of 2.x: the maximum length of messages, and of injected messages.
const MAX_MSG_SIZE: c_int = 12;
const MAX_TAGGED_SIZE: c_int = 13;
const INJECT_MSG_SIZE: c_int = 16;
const INJECT_TAGGED_SIZE: c_int = 17;

/// The reported number of operations that may be posted. More are accepted.
const OPERATIONS_LEFT: usize = 1024;

pub(super) static OPS: OpsEndpoint = OpsEndpoint {
    size: size_of::<OpsEndpoint>(),
    cancel,
    getopt,
    setopt,
    tx_ctx: unsupported,
    rx_ctx: unsupported,
    rx_size_left: size_left,
    tx_size_left: size_left,
};

pub(super) static CM_OPS: OpsCm = OpsCm {
    size: size_of::<OpsCm>(),
    setname,
    getname,
    getpeer: unsupported,
    connect: unsupported,
    listen: unsupported,
    accept: unsupported,
    reject: unsupported,
    shutdown: unsupported,
    join: unsupported,
};

/// Cancels an operation. Its completion entry is an error, or the usual one if it was too late. An
/// unknown context is no error: the operation may have completed.
unsafe extern "C" fn cancel(fid: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: libfabric's contract: an open endpoint.
    transfer(|| unsafe {
        object::borrow::<Endpoint, _>(fid).core()?.cancel(context as u64);
        Ok(())
    })
}

unsafe extern "C" fn getopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut usize,
) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, a length and memory of that length.
    call(|| unsafe {
        let endpoint: &Endpoint = object::borrow(fid);
        let number = match (level, name) {
            (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) => {
                endpoint.shared.min_multi_recv.load(Ordering::Relaxed)
            }
            (FI_OPT_ENDPOINT, FI_OPT_CM_DATA_SIZE) => 0,
            (FI_OPT_ENDPOINT, MAX_MSG_SIZE | MAX_TAGGED_SIZE) => isize::MAX as usize,
            (FI_OPT_ENDPOINT, INJECT_MSG_SIZE | INJECT_TAGGED_SIZE) => INJECT_BYTES,
            _ => return Err(FiError(FI_ENOPROTOOPT)),
        };
        let capacity = length.as_mut().ok_or(FiError(FI_EINVAL))?;
        let is_enough = *capacity >= size_of::<usize>() && !value.is_null();
        *capacity = size_of::<usize>();
        if !is_enough {
            return Err(FiError(FI_ETOOSMALL));
        }
        value.cast::<usize>().write_unaligned(number);
        Ok(())
    })
}

unsafe extern "C" fn setopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    call(|| unsafe {
        let endpoint: &Endpoint = object::borrow(fid);
        let is_known = [
            FI_OPT_MIN_MULTI_RECV,
            MAX_MSG_SIZE,
            MAX_TAGGED_SIZE,
            INJECT_MSG_SIZE,
            INJECT_TAGGED_SIZE,
        ]
        .contains(&name);
        if level != FI_OPT_ENDPOINT || !is_known {
            return Err(FiError(FI_ENOPROTOOPT));
        }
        if length != size_of::<usize>() || value.is_null() {
            return Err(FiError(FI_EINVAL));
        }
        let number = value.cast::<usize>().read_unaligned();
        match name {
            FI_OPT_MIN_MULTI_RECV => {
                endpoint.shared.min_multi_recv.store(number, Ordering::Relaxed);
            }
            INJECT_MSG_SIZE | INJECT_TAGGED_SIZE if number > INJECT_BYTES => {
                return Err(FiError(FI_EINVAL));
            }
            // Limits that the program sets for itself need no action.
            _ => {}
        }
        Ok(())
    })
}

unsafe extern "C" fn size_left(ep: *mut FidEp) -> isize {
    // SAFETY: libfabric's contract: an open endpoint.
    count(|| unsafe { object::borrow::<Endpoint, _>(ep).core().map(|_| OPERATIONS_LEFT) })
}

unsafe extern "C" fn setname(fid: *mut Fid, address: *mut c_void, length: usize) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, `length` bytes.
    call(|| unsafe {
        let endpoint: &Endpoint = object::borrow(fid);
        if endpoint.core.get().is_some() {
            return Err(FiError(FI_EBUSY));
        }
        if address.is_null() || length < ADDRESS_BYTES {
            return Err(FiError(FI_EINVAL));
        }
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), ADDRESS_BYTES);
        let wanted = Address::from_bytes(bytes).ok_or(FiError(FI_EINVAL))?;
        let mut own = endpoint.shared.address.lock().unwrap();
        if own.get() != wanted {
            *own = ReservedAddress::reserve_exact(wanted)?;
        }
        Ok(())
    })
}

unsafe extern "C" fn getname(fid: *mut Fid, address: *mut c_void, length: *mut usize) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, a length and memory of that length.
    call(|| unsafe {
        let endpoint: &Endpoint = object::borrow(fid);
        let bytes = endpoint.shared.address.lock().unwrap().get().to_bytes();
        let capacity = length.as_mut().ok_or(FiError(FI_EINVAL))?;
        let is_enough = *capacity >= bytes.len() && !address.is_null();
        copy_out(&bytes, address.cast(), *capacity);
        *capacity = bytes.len();
        if is_enough { Ok(()) } else { Err(FiError(FI_ETOOSMALL)) }
    })
}
