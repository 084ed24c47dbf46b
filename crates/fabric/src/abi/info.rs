//! The capabilities that a provider offers and a program requests.

use std::ffi::{c_char, c_int, c_void};

use super::{Fid, FidDomain, FidFabric, structures};

structures! {
    Info = "struct fi_info" {
        next: *mut Info,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut Fid,
        tx_attr: *mut TxAttr,
        rx_attr: *mut RxAttr,
        ep_attr: *mut EpAttr,
        domain_attr: *mut DomainAttr,
        fabric_attr: *mut FabricAttr,
        nic: *mut c_void,
    }

    TxAttr = "struct fi_tx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
        iov_limit: usize,
        rma_iov_limit: usize,
        tclass: u32,
    }

    RxAttr = "struct fi_rx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
        iov_limit: usize,
    }

    EpAttr = "struct fi_ep_attr" {
        r#type: c_int,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
        msg_prefix_size: usize,
        max_order_raw_size: usize,
        max_order_war_size: usize,
        max_order_waw_size: usize,
        mem_tag_format: u64,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        auth_key_size: usize,
        auth_key: *mut u8,
    }

    /// Longer in 2.x: only the core may create one.
    DomainAttr = "struct fi_domain_attr" {
        domain: *mut FidDomain,
        name: *mut c_char,
        threading: c_int,
        control_progress: c_int,
        data_progress: c_int,
        resource_mgmt: c_int,
        av_type: c_int,
        mr_mode: c_int,
        mr_key_size: usize,
        cq_data_size: usize,
        cq_cnt: usize,
        ep_cnt: usize,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        max_ep_tx_ctx: usize,
        max_ep_rx_ctx: usize,
        max_ep_stx_ctx: usize,
        max_ep_srx_ctx: usize,
        cntr_cnt: usize,
        mr_iov_limit: usize,
        caps: u64,
        mode: u64,
        auth_key: *mut u8,
        auth_key_size: usize,
        max_err_data: usize,
        mr_cnt: usize,
        tclass: u32,
    }

    FabricAttr = "struct fi_fabric_attr" {
        fabric: *mut FidFabric,
        name: *mut c_char,
        prov_name: *mut c_char,
        prov_version: u32,
        api_version: u32,
    }
}
