//! Entries of completion queues and of event queues.

use std::ffi::{c_int, c_void};

use super::{Fid, structures};

structures! {
    CqEntry = "struct fi_cq_entry" {
        op_context: *mut c_void,
    }

    CqMsgEntry = "struct fi_cq_msg_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
    }

    CqDataEntry = "struct fi_cq_data_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
    }

    CqTaggedEntry = "struct fi_cq_tagged_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
    }

    /// In 2.x a source address follows, for which a program of 1.17 has no space.
    CqErrEntry = "struct fi_cq_err_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }

    EqEntry = "struct fi_eq_entry" {
        fid: *mut Fid,
        context: *mut c_void,
        data: u64,
    }

    EqErrEntry = "struct fi_eq_err_entry" {
        fid: *mut Fid,
        context: *mut c_void,
        data: u64,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }
}
