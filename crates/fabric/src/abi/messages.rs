//! Descriptions of messages and of RMA, for the calls that take all arguments in one structure.

use std::ffi::c_void;

use super::structures;

structures! {
    Msg = "struct fi_msg" {
        msg_iov: *const libc::iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: u64,
        context: *mut c_void,
        data: u64,
    }

    MsgTagged = "struct fi_msg_tagged" {
        msg_iov: *const libc::iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: u64,
        tag: u64,
        ignore: u64,
        context: *mut c_void,
        data: u64,
    }

    RmaIov = "struct fi_rma_iov" {
        addr: u64,
        len: usize,
        key: u64,
    }

    MsgRma = "struct fi_msg_rma" {
        msg_iov: *const libc::iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: u64,
        rma_iov: *const RmaIov,
        rma_iov_count: usize,
        context: *mut c_void,
        data: u64,
    }
}
