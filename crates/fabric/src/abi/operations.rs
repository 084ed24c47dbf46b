//! The tables of functions of the objects. The first field of each is its size, by which the core
//! knows which functions exist.

use std::ffi::{c_char, c_int, c_void};

use super::{
    AtomicAttr, AvAttr, CntrAttr, CqAttr, CqErrEntry, EqAttr, EqErrEntry, Fid, FidAv, FidCntr,
    FidCq, FidDomain, FidEp, FidEq, FidFabric, FidMr, Info, MrAttr, Msg, MsgRma, MsgTagged,
    structures,
};

/// A function that returns `FI_ENOSYS` for any arguments: in C's calling convention a callee may
/// ignore arguments.
pub type Unsupported = unsafe extern "C" fn() -> isize;

structures! {
    Ops = "struct fi_ops" {
        size: usize,
        close: unsafe extern "C" fn(*mut Fid) -> c_int,
        bind: unsafe extern "C" fn(*mut Fid, *mut Fid, flags: u64) -> c_int,
        control: unsafe extern "C" fn(*mut Fid, command: c_int, *mut c_void) -> c_int,
        ops_open: Unsupported,
        tostr: Unsupported,
        ops_set: Unsupported,
    }

    OpsFabric = "struct fi_ops_fabric" {
        size: usize,
        domain: unsafe extern "C" fn(
            *mut FidFabric,
            *mut Info,
            *mut *mut FidDomain,
            context: *mut c_void,
        ) -> c_int,
        passive_ep: Unsupported,
        eq_open: unsafe extern "C" fn(
            *mut FidFabric,
            *mut EqAttr,
            *mut *mut FidEq,
            context: *mut c_void,
        ) -> c_int,
        wait_open: Unsupported,
        trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, count: c_int) -> c_int,
        domain2: unsafe extern "C" fn(
            *mut FidFabric,
            *mut Info,
            *mut *mut FidDomain,
            flags: u64,
            context: *mut c_void,
        ) -> c_int,
    }

    OpsDomain = "struct fi_ops_domain" {
        size: usize,
        av_open: unsafe extern "C" fn(
            *mut FidDomain,
            *mut AvAttr,
            *mut *mut FidAv,
            context: *mut c_void,
        ) -> c_int,
        cq_open: unsafe extern "C" fn(
            *mut FidDomain,
            *mut CqAttr,
            *mut *mut FidCq,
            context: *mut c_void,
        ) -> c_int,
        endpoint: unsafe extern "C" fn(
            *mut FidDomain,
            *mut Info,
            *mut *mut FidEp,
            context: *mut c_void,
        ) -> c_int,
        scalable_ep: Unsupported,
        cntr_open: unsafe extern "C" fn(
            *mut FidDomain,
            *mut CntrAttr,
            *mut *mut FidCntr,
            context: *mut c_void,
        ) -> c_int,
        poll_open: Unsupported,
        stx_ctx: Unsupported,
        srx_ctx: Unsupported,
        query_atomic: unsafe extern "C" fn(
            *mut FidDomain,
            datatype: c_int,
            op: c_int,
            *mut AtomicAttr,
            flags: u64,
        ) -> c_int,
        query_collective: Unsupported,
        endpoint2: unsafe extern "C" fn(
            *mut FidDomain,
            *mut Info,
            *mut *mut FidEp,
            flags: u64,
            context: *mut c_void,
        ) -> c_int,
    }

    OpsMr = "struct fi_ops_mr" {
        size: usize,
        reg: unsafe extern "C" fn(
            *mut Fid,
            buf: *const c_void,
            len: usize,
            access: u64,
            offset: u64,
            requested_key: u64,
            flags: u64,
            *mut *mut FidMr,
            context: *mut c_void,
        ) -> c_int,
        regv: unsafe extern "C" fn(
            *mut Fid,
            *const libc::iovec,
            count: usize,
            access: u64,
            offset: u64,
            requested_key: u64,
            flags: u64,
            *mut *mut FidMr,
            context: *mut c_void,
        ) -> c_int,
        regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, flags: u64, *mut *mut FidMr) -> c_int,
    }

    OpsAv = "struct fi_ops_av" {
        size: usize,
        insert: unsafe extern "C" fn(
            *mut FidAv,
            addr: *const c_void,
            count: usize,
            fi_addr: *mut u64,
            flags: u64,
            context: *mut c_void,
        ) -> c_int,
        insertsvc: Unsupported,
        insertsym: Unsupported,
        remove: unsafe extern "C" fn(*mut FidAv, fi_addr: *mut u64, count: usize, flags: u64) -> c_int,
        lookup: unsafe extern "C" fn(
            *mut FidAv,
            fi_addr: u64,
            addr: *mut c_void,
            addrlen: *mut usize,
        ) -> c_int,
        straddr: unsafe extern "C" fn(
            *mut FidAv,
            addr: *const c_void,
            buf: *mut c_char,
            len: *mut usize,
        ) -> *const c_char,
        av_set: Unsupported,
    }

    OpsEndpoint = "struct fi_ops_ep" {
        size: usize,
        cancel: unsafe extern "C" fn(*mut Fid, context: *mut c_void) -> isize,
        getopt: unsafe extern "C" fn(
            *mut Fid,
            level: c_int,
            optname: c_int,
            optval: *mut c_void,
            optlen: *mut usize,
        ) -> c_int,
        setopt: unsafe extern "C" fn(
            *mut Fid,
            level: c_int,
            optname: c_int,
            optval: *const c_void,
            optlen: usize,
        ) -> c_int,
        tx_ctx: Unsupported,
        rx_ctx: Unsupported,
        rx_size_left: unsafe extern "C" fn(*mut FidEp) -> isize,
        tx_size_left: unsafe extern "C" fn(*mut FidEp) -> isize,
    }

    OpsCm = "struct fi_ops_cm" {
        size: usize,
        setname: unsafe extern "C" fn(*mut Fid, addr: *mut c_void, addrlen: usize) -> c_int,
        getname: unsafe extern "C" fn(*mut Fid, addr: *mut c_void, addrlen: *mut usize) -> c_int,
        getpeer: Unsupported,
        connect: Unsupported,
        listen: Unsupported,
        accept: Unsupported,
        reject: Unsupported,
        shutdown: Unsupported,
        join: Unsupported,
    }

    OpsMessage = "struct fi_ops_msg" {
        size: usize,
        recv: unsafe extern "C" fn(
            *mut FidEp,
            buf: *mut c_void,
            len: usize,
            desc: *mut c_void,
            src_addr: u64,
            context: *mut c_void,
        ) -> isize,
        recvv: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            src_addr: u64,
            context: *mut c_void,
        ) -> isize,
        recvmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, flags: u64) -> isize,
        send: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            dest_addr: u64,
            context: *mut c_void,
        ) -> isize,
        sendv: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            dest_addr: u64,
            context: *mut c_void,
        ) -> isize,
        sendmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, flags: u64) -> isize,
        inject: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            dest_addr: u64,
        ) -> isize,
        senddata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            data: u64,
            dest_addr: u64,
            context: *mut c_void,
        ) -> isize,
        injectdata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            data: u64,
            dest_addr: u64,
        ) -> isize,
    }

    OpsTagged = "struct fi_ops_tagged" {
        size: usize,
        recv: unsafe extern "C" fn(
            *mut FidEp,
            buf: *mut c_void,
            len: usize,
            desc: *mut c_void,
            src_addr: u64,
            tag: u64,
            ignore: u64,
            context: *mut c_void,
        ) -> isize,
        recvv: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            src_addr: u64,
            tag: u64,
            ignore: u64,
            context: *mut c_void,
        ) -> isize,
        recvmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, flags: u64) -> isize,
        send: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            dest_addr: u64,
            tag: u64,
            context: *mut c_void,
        ) -> isize,
        sendv: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            dest_addr: u64,
            tag: u64,
            context: *mut c_void,
        ) -> isize,
        sendmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, flags: u64) -> isize,
        inject: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            dest_addr: u64,
            tag: u64,
        ) -> isize,
        senddata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            data: u64,
            dest_addr: u64,
            tag: u64,
            context: *mut c_void,
        ) -> isize,
        injectdata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            data: u64,
            dest_addr: u64,
            tag: u64,
        ) -> isize,
    }

    OpsRma = "struct fi_ops_rma" {
        size: usize,
        read: unsafe extern "C" fn(
            *mut FidEp,
            buf: *mut c_void,
            len: usize,
            desc: *mut c_void,
            src_addr: u64,
            addr: u64,
            key: u64,
            context: *mut c_void,
        ) -> isize,
        readv: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            src_addr: u64,
            addr: u64,
            key: u64,
            context: *mut c_void,
        ) -> isize,
        readmsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, flags: u64) -> isize,
        write: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            dest_addr: u64,
            addr: u64,
            key: u64,
            context: *mut c_void,
        ) -> isize,
        writev: unsafe extern "C" fn(
            *mut FidEp,
            *const libc::iovec,
            desc: *mut *mut c_void,
            count: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
            context: *mut c_void,
        ) -> isize,
        writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, flags: u64) -> isize,
        inject: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            dest_addr: u64,
            addr: u64,
            key: u64,
        ) -> isize,
        writedata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            desc: *mut c_void,
            data: u64,
            dest_addr: u64,
            addr: u64,
            key: u64,
            context: *mut c_void,
        ) -> isize,
        injectdata: unsafe extern "C" fn(
            *mut FidEp,
            buf: *const c_void,
            len: usize,
            data: u64,
            dest_addr: u64,
            addr: u64,
            key: u64,
        ) -> isize,
    }

    OpsCollective = "struct fi_ops_collective" {
        size: usize,
        barrier: Unsupported,
        broadcast: Unsupported,
        alltoall: Unsupported,
        allreduce: Unsupported,
        allgather: Unsupported,
        reduce_scatter: Unsupported,
        reduce: Unsupported,
        scatter: Unsupported,
        gather: Unsupported,
        msg: Unsupported,
        barrier2: Unsupported,
    }

    OpsEq = "struct fi_ops_eq" {
        size: usize,
        read: unsafe extern "C" fn(
            *mut FidEq,
            event: *mut u32,
            buf: *mut c_void,
            len: usize,
            flags: u64,
        ) -> isize,
        readerr: unsafe extern "C" fn(*mut FidEq, *mut EqErrEntry, flags: u64) -> isize,
        write: unsafe extern "C" fn(
            *mut FidEq,
            event: u32,
            buf: *const c_void,
            len: usize,
            flags: u64,
        ) -> isize,
        sread: unsafe extern "C" fn(
            *mut FidEq,
            event: *mut u32,
            buf: *mut c_void,
            len: usize,
            timeout: c_int,
            flags: u64,
        ) -> isize,
        strerror: unsafe extern "C" fn(
            *mut FidEq,
            prov_errno: c_int,
            err_data: *const c_void,
            buf: *mut c_char,
            len: usize,
        ) -> *const c_char,
    }

    OpsCq = "struct fi_ops_cq" {
        size: usize,
        read: unsafe extern "C" fn(*mut FidCq, buf: *mut c_void, count: usize) -> isize,
        readfrom: unsafe extern "C" fn(
            *mut FidCq,
            buf: *mut c_void,
            count: usize,
            src_addr: *mut u64,
        ) -> isize,
        readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, flags: u64) -> isize,
        sread: unsafe extern "C" fn(
            *mut FidCq,
            buf: *mut c_void,
            count: usize,
            cond: *const c_void,
            timeout: c_int,
        ) -> isize,
        sreadfrom: unsafe extern "C" fn(
            *mut FidCq,
            buf: *mut c_void,
            count: usize,
            src_addr: *mut u64,
            cond: *const c_void,
            timeout: c_int,
        ) -> isize,
        signal: unsafe extern "C" fn(*mut FidCq) -> c_int,
        strerror: unsafe extern "C" fn(
            *mut FidCq,
            prov_errno: c_int,
            err_data: *const c_void,
            buf: *mut c_char,
            len: usize,
        ) -> *const c_char,
    }

    OpsCntr = "struct fi_ops_cntr" {
        size: usize,
        read: unsafe extern "C" fn(*mut FidCntr) -> u64,
        readerr: unsafe extern "C" fn(*mut FidCntr) -> u64,
        add: unsafe extern "C" fn(*mut FidCntr, value: u64) -> c_int,
        set: unsafe extern "C" fn(*mut FidCntr, value: u64) -> c_int,
        wait: unsafe extern "C" fn(*mut FidCntr, threshold: u64, timeout: c_int) -> c_int,
        adderr: unsafe extern "C" fn(*mut FidCntr, value: u64) -> c_int,
        seterr: unsafe extern "C" fn(*mut FidCntr, value: u64) -> c_int,
    }
}
