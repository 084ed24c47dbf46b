//! The attributes with which programs open objects.

use std::ffi::{c_char, c_int, c_void};

use super::structures;

structures! {
    AvAttr = "struct fi_av_attr" {
        r#type: c_int,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }

    CqAttr = "struct fi_cq_attr" {
        size: usize,
        flags: u64,
        format: c_int,
        wait_obj: c_int,
        signaling_vector: c_int,
        wait_cond: c_int,
        wait_set: *mut c_void,
    }

    CntrAttr = "struct fi_cntr_attr" {
        events: c_int,
        wait_obj: c_int,
        wait_set: *mut c_void,
        flags: u64,
    }

    EqAttr = "struct fi_eq_attr" {
        size: usize,
        flags: u64,
        wait_obj: c_int,
        signaling_vector: c_int,
        wait_set: *mut c_void,
    }

    /// Longer in 2.x: read only.
    MrAttr = "struct fi_mr_attr" {
        mr_iov: *const libc::iovec,
        iov_count: usize,
        access: u64,
        offset: u64,
        requested_key: u64,
        context: *mut c_void,
        auth_key_size: usize,
        auth_key: *mut u8,
        iface: c_int,
        device: u64,
    }
}
