//! Atomic operations: their descriptions and their table of functions.

use std::ffi::{c_int, c_void};

use super::{FidEp, structures};

/// Checks whether an operation is offered, and stores the maximum number of elements.
pub type AtomicValid =
    unsafe extern "C" fn(*mut FidEp, datatype: c_int, op: c_int, count: *mut usize) -> c_int;

structures! {
    AtomicAttr = "struct fi_atomic_attr" {
        count: usize,
        size: usize,
    }

    Ioc = "struct fi_ioc" {
        addr: *mut c_void,
        count: usize,
    }

    RmaIoc = "struct fi_rma_ioc" {
        addr: u64,
        count: usize,
        key: u64,
    }

    MsgAtomic = "struct fi_msg_atomic" {
        msg_iov: *const Ioc,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: u64,
        rma_iov: *const RmaIoc,
        rma_iov_count: usize,
        datatype: c_int,
        op: c_int,
        context: *mut c_void,
        data: u64,
    }

    OpsAtomic = "struct fi_ops_atomic" {
        size: usize,
        write: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            count: usize,
            desc: *mut c_void,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        writev: unsafe extern "C" fn(
            *mut FidEp,
            *const Ioc,
            desc: *mut *mut c_void,
            count: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgAtomic, flags: u64) -> isize,
        inject: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            count: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
        ) -> isize,
        readwrite: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            count: usize,
            desc: *mut c_void,
            result: *mut c_void,
            result_desc: *mut c_void,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        readwritev: unsafe extern "C" fn(
            *mut FidEp,
            *const Ioc,
            desc: *mut *mut c_void,
            count: usize,
            resultv: *mut Ioc,
            result_desc: *mut *mut c_void,
            result_count: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        readwritemsg: unsafe extern "C" fn(
            *mut FidEp,
            *const MsgAtomic,
            resultv: *mut Ioc,
            result_desc: *mut *mut c_void,
            result_count: usize,
            flags: u64,
        ) -> isize,
        compwrite: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            count: usize,
            desc: *mut c_void,
            compare: *const c_void,
            compare_desc: *mut c_void,
            result: *mut c_void,
            result_desc: *mut c_void,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        compwritev: unsafe extern "C" fn(
            *mut FidEp,
            *const Ioc,
            desc: *mut *mut c_void,
            count: usize,
            comparev: *const Ioc,
            compare_desc: *mut *mut c_void,
            compare_count: usize,
            resultv: *mut Ioc,
            result_desc: *mut *mut c_void,
            result_count: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
            datatype: c_int,
            op: c_int,
            context: *mut c_void,
        ) -> isize,
        compwritemsg: unsafe extern "C" fn(
            *mut FidEp,
            *const MsgAtomic,
            comparev: *const Ioc,
            compare_desc: *mut *mut c_void,
            compare_count: usize,
            resultv: *mut Ioc,
            result_desc: *mut *mut c_void,
            result_count: usize,
            flags: u64,
        ) -> isize,
        writevalid: AtomicValid,
        readwritevalid: AtomicValid,
        compwritevalid: AtomicValid,
    }
}
