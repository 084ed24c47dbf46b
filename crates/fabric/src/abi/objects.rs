//! The headers of objects: programs hold pointers to these, and call through their tables.

use std::ffi::{c_char, c_int, c_void};

use super::{
    FabricAttr, Info, Ops, OpsAtomic, OpsAv, OpsCm, OpsCntr, OpsCollective, OpsCq, OpsDomain,
    OpsEndpoint, OpsEq, OpsFabric, OpsMessage, OpsMr, OpsRma, OpsTagged, structures,
};

structures! {
    /// The header of every object.
    Fid = "struct fid" {
        fclass: usize,
        context: *mut c_void,
        ops: *const Ops,
    }

    FidFabric = "struct fid_fabric" {
        fid: Fid,
        ops: *const OpsFabric,
        api_version: u32,
    }

    FidDomain = "struct fid_domain" {
        fid: Fid,
        ops: *const OpsDomain,
        mr: *const OpsMr,
    }

    FidAv = "struct fid_av" {
        fid: Fid,
        ops: *const OpsAv,
    }

    FidMr = "struct fid_mr" {
        fid: Fid,
        mem_desc: *mut c_void,
        key: u64,
    }

    FidEp = "struct fid_ep" {
        fid: Fid,
        ops: *const OpsEndpoint,
        cm: *const OpsCm,
        msg: *const OpsMessage,
        rma: *const OpsRma,
        tagged: *const OpsTagged,
        atomic: *const OpsAtomic,
        collective: *const OpsCollective,
    }

    FidEq = "struct fid_eq" {
        fid: Fid,
        ops: *const OpsEq,
    }

    FidCq = "struct fid_cq" {
        fid: Fid,
        ops: *const OpsCq,
    }

    FidCntr = "struct fid_cntr" {
        fid: Fid,
        ops: *const OpsCntr,
    }

    Alias = "struct fi_alias" {
        fid: *mut *mut Fid,
        flags: u64,
    }

    /// The result of `fi_prov_ini`. The core writes to `context`.
    Provider = "struct fi_provider" {
        version: u32,
        fi_version: u32,
        context: [*mut c_void; 4],
        name: *const c_char,
        getinfo: unsafe extern "C" fn(
            version: u32,
            node: *const c_char,
            service: *const c_char,
            flags: u64,
            hints: *const Info,
            info: *mut *mut Info,
        ) -> c_int,
        fabric: unsafe extern "C" fn(
            attr: *mut FabricAttr,
            fabric: *mut *mut FidFabric,
            context: *mut c_void,
        ) -> c_int,
        cleanup: extern "C" fn(),
    }
}
