//! The capabilities of the provider, and the check of a program's hints.

use std::ffi::{CStr, c_char, c_int, c_void};

use memferry_sys::fork::ForkSafe;
use memferry_sys::{cross_memory, settings};

use crate::abi::*;
use crate::address::{ADDRESS_BYTES, Address, LocalId, is_this_host};
use crate::core::core;
use crate::guard::{FiError, Result, call};

/// The name of the fabric and of its only domain.
pub(crate) const FABRIC_NAME: &CStr = c"memferry";
pub(crate) const DOMAIN_NAME: &CStr = c"memferry";

/// Maximum length of an injected message, which is copied if it cannot be sent at once. MPICH waits
/// for a reply to every message that is longer.
pub(crate) const INJECT_BYTES: usize = 16 << 10;
/// The maximum number of segments of one message.
pub(crate) const IOV_LIMIT: usize = 16;
/// The bytes of completion data.
const DATA_BYTES: usize = 8;
/// The number of operations in flight per direction, unless the program requests another.
const DEFAULT_OPERATIONS: usize = 1024;
const MAX_OPERATIONS: usize = 32768;
const MAX_OBJECTS: usize = 65536;

/// Capabilities that programs must request.
const PRIMARY: u64 = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_ATOMIC | FI_FENCE;
/// The directions of messages: both, unless one is requested.
const DIRECTIONS: u64 = FI_SEND | FI_RECV;
/// The directions of RMA and atomic operations.
const ACCESSES: u64 = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
/// Capabilities that are always present.
const SECONDARY: u64 = FI_MULTI_RECV | FI_SOURCE | DOMAIN;
const DOMAIN: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM;

/// All capabilities. RMA is offered if the system permits processes to access each other's memory.
fn all() -> u64 {
    static CAN_REACH: ForkSafe<bool> = ForkSafe::new();
    let can_reach = *CAN_REACH.get_or_init(|| {
        let is_off = settings::is_switched_off("MEMFERRY_CMA");
        let is_scoped = cross_memory::ptrace_scope() > 0 && !rustix::process::geteuid().is_root();
        !is_off && !is_scoped && !cross_memory::is_seccomp_filtered()
    });
    PRIMARY | DIRECTIONS | SECONDARY | ACCESSES | if can_reach { FI_RMA } else { 0 }
}

/// The capabilities of the two directions.
const OF_SENDS: u64 =
    FI_MSG | FI_TAGGED | FI_SEND | FI_RMA | FI_ATOMIC | FI_READ | FI_WRITE | FI_FENCE;
const OF_RECEIVES: u64 =
    FI_MSG | FI_TAGGED | FI_RECV | FI_DIRECTED_RECV | FI_MULTI_RECV | FI_SOURCE | OF_OWNERS;
const OF_OWNERS: u64 = FI_RMA | FI_ATOMIC | FI_REMOTE_READ | FI_REMOTE_WRITE;

/// The message orders that are always there.
const NATURAL_ORDER: u64 = FI_ORDER_SAS
    | FI_ORDER_RMA_RAR
    | FI_ORDER_RMA_RAW
    | FI_ORDER_RMA_WAR
    | FI_ORDER_RMA_WAW
    | FI_ORDER_ATOMIC_RAR
    | FI_ORDER_ATOMIC_RAW
    | FI_ORDER_ATOMIC_WAR
    | FI_ORDER_ATOMIC_WAW;
/// The message orders that cost time, and are there if the program requests them.
const REQUESTED_ORDER: u64 =
    FI_ORDER_RAR | FI_ORDER_RAW | FI_ORDER_WAR | FI_ORDER_WAW | FI_ORDER_SAR | FI_ORDER_SAW;
/// Accesses of any length are in order.
const MAX_ORDERED_BYTES: usize = isize::MAX as usize;

/// The registration modes before 1.5: by virtual address with keys of the provider, or by offset
/// with keys of the program.
pub(crate) const MR_BASIC: c_int = 1;
const MR_SCALABLE: c_int = 2;

/// Valid default flags of an endpoint.
const SEND_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_MATCH_COMPLETE
    | FI_MORE;
const RECEIVE_FLAGS: u64 = FI_COMPLETION | FI_MULTI_RECV | FI_MORE;

/// Flags by which layered providers search for a provider to use: for themselves, for any that is
/// not layered, for one that offloads.
const PRIVATE_FLAGS: u64 = 1 << 58 | 1 << 59 | 1 << 61;

pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    info: *mut *mut Info,
) -> c_int {
    // SAFETY: libfabric's contract: strings or null, an info with or without attributes or null,
    // space for a pointer.
    call(|| unsafe {
        let (node, service) = (text(node), text(service));
        let hints = hints.as_ref();
        let requested = Hints::new(hints, version);
        if is_private(flags, hints) || !requested.is_offered() {
            return Err(FiError(FI_ENODATA));
        }
        let (source, target) = addresses(node, service, flags, hints)?;
        let allocated_info = core().new_info();
        let offered = allocated_info.as_mut().ok_or(FiError(FI_ENOMEM))?;
        requested.fill(offered);
        (offered.src_addr, offered.src_addrlen) = allocated(source)?;
        (offered.dest_addr, offered.dest_addrlen) = allocated(target)?;
        info.write(allocated_info);
        Ok(())
    })
}

/// # Safety
/// The string must be a C string, or null.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller guarantees it.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("?"))
}

/// Returns whether the caller is not a program, but a provider that would use this one.
fn is_private(flags: u64, hints: Option<&Info>) -> bool {
    // SAFETY: hints have valid attributes or null, and these valid strings or null.
    let name = unsafe {
        hints.and_then(|hints| hints.fabric_attr.as_ref()).and_then(|attr| text(attr.prov_name))
    };
    flags & PRIVATE_FLAGS != 0 || name.is_some_and(|name| !name.eq_ignore_ascii_case("memferry"))
}

/// The addresses of this side and of the peer, as far as they are known.
fn addresses(
    node: Option<&str>,
    service: Option<&str>,
    flags: u64,
    hints: Option<&Info>,
) -> Result<(Option<Address>, Option<Address>)> {
    let hinted = |address: *mut c_void, length: usize| {
        if address.is_null() {
            return Ok(None);
        }
        if length < ADDRESS_BYTES {
            return Err(FiError(FI_ENODATA));
        }
        // SAFETY: hints contain the length of their addresses.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), ADDRESS_BYTES) };
        Address::from_bytes(bytes).map(Some).ok_or(FiError(FI_ENODATA))
    };
    let (mut source, mut target) = match hints {
        Some(hints) => (
            hinted(hints.src_addr, hints.src_addrlen)?,
            hinted(hints.dest_addr, hints.dest_addrlen)?,
        ),
        None => (None, None),
    };
    if node.is_some_and(|node| !is_this_host(node)) {
        return Err(FiError(FI_ENODATA));
    }
    let named = service.map(|service| Address::here(LocalId::of_service(service)));
    if flags & FI_SOURCE != 0 {
        source = named.or(source);
    } else {
        target = named.or(target);
    }
    Ok((source.or_else(|| Some(Address::here(LocalId::random()))), target))
}

/// Copies an address into memory from `malloc`.
fn allocated(address: Option<Address>) -> Result<(*mut c_void, usize)> {
    let Some(address) = address else { return Ok((std::ptr::null_mut(), 0)) };
    // SAFETY: the allocation has the size that is written.
    unsafe {
        let memory = libc::malloc(ADDRESS_BYTES);
        if memory.is_null() {
            return Err(FiError(FI_ENOMEM));
        }
        memory.cast::<[u8; ADDRESS_BYTES]>().write(address.to_bytes());
        Ok((memory, ADDRESS_BYTES))
    }
}

/// The hints of a program. All of them are optional.
struct Hints<'a> {
    hints: Option<&'a Info>,
    version: u32,
    tx: Option<&'a TxAttr>,
    rx: Option<&'a RxAttr>,
    ep: Option<&'a EpAttr>,
    domain: Option<&'a DomainAttr>,
    fabric: Option<&'a FabricAttr>,
}

impl<'a> Hints<'a> {
    /// # Safety
    /// The attributes must be valid, or null.
    unsafe fn new(hints: Option<&'a Info>, version: u32) -> Self {
        // SAFETY: the caller guarantees it.
        unsafe {
            Self {
                hints,
                version,
                tx: hints.and_then(|hints| hints.tx_attr.as_ref()),
                rx: hints.and_then(|hints| hints.rx_attr.as_ref()),
                ep: hints.and_then(|hints| hints.ep_attr.as_ref()),
                domain: hints.and_then(|hints| hints.domain_attr.as_ref()),
                fabric: hints.and_then(|hints| hints.fabric_attr.as_ref()),
            }
        }
    }

    fn is_offered(&self) -> bool {
        self.hints.is_none_or(|hints| {
            let formats = [FI_FORMAT_UNSPEC];
            hints.caps & !all() == 0 && formats.contains(&hints.addr_format)
        }) && self.tx.is_none_or(are_sends_offered)
            && self.rx.is_none_or(are_receives_offered)
            && self.ep.is_none_or(is_endpoint_offered)
            && self.domain.is_none_or(is_domain_offered)
            && self.fabric.is_none_or(|fabric| is_name(fabric.name, FABRIC_NAME))
    }

    /// The capabilities that the program gets.
    fn caps(&self) -> u64 {
        match self.hints.map_or(0, |hints| hints.caps) {
            0 => all(),
            wanted => {
                let messages = wanted & (FI_MSG | FI_TAGGED) != 0;
                let both = if messages && wanted & DIRECTIONS == 0 { DIRECTIONS } else { 0 };
                let accesses = wanted & (FI_RMA | FI_ATOMIC) != 0 && wanted & ACCESSES == 0;
                wanted | both | SECONDARY | if accesses { ACCESSES } else { 0 }
            }
        }
    }

    /// Fills the info: with the requested values if they are offered, else with the defaults.
    ///
    /// # Safety
    /// All attributes of the info must exist.
    unsafe fn fill(&self, info: &mut Info) {
        let caps = self.caps();
        info.caps = caps;
        info.addr_format = FI_FORMAT_UNSPEC;
        // SAFETY: the caller guarantees it.
        let (tx, rx, ep) = unsafe { (&mut *info.tx_attr, &mut *info.rx_attr, &mut *info.ep_attr) };
        // SAFETY: as above.
        let (domain, fabric) = unsafe { (&mut *info.domain_attr, &mut *info.fabric_attr) };
        self.fill_directions(caps, tx, rx);
        ep.r#type = FI_EP_RDM;
        ep.protocol = FI_PROTO_UNSPEC;
        ep.protocol_version = 1;
        ep.max_msg_size = isize::MAX as usize;
        ep.mem_tag_format = match self.ep.map_or(0, |ep| ep.mem_tag_format) {
            0 => u64::MAX,
            wanted => wanted,
        };
        let ordered = if caps & (FI_RMA | FI_ATOMIC) != 0 { MAX_ORDERED_BYTES } else { 0 };
        (ep.max_order_raw_size, ep.max_order_war_size) = (ordered, ordered);
        ep.max_order_waw_size = ordered;
        (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
        self.fill_domain(domain);
        fabric.name = duplicate(FABRIC_NAME);
    }

    fn fill_directions(&self, caps: u64, tx: &mut TxAttr, rx: &mut RxAttr) {
        let or_default =
            |wanted: Option<usize>, default| wanted.filter(|w| *w > 0).unwrap_or(default);
        tx.caps = caps & OF_SENDS;
        tx.op_flags = self.tx.map_or(0, |tx| tx.op_flags);
        tx.msg_order = NATURAL_ORDER | self.tx.map_or(0, |tx| tx.msg_order);
        tx.inject_size = INJECT_BYTES;
        tx.size = or_default(self.tx.map(|tx| tx.size), DEFAULT_OPERATIONS);
        tx.iov_limit = IOV_LIMIT;
        tx.rma_iov_limit = usize::from(caps & (FI_RMA | FI_ATOMIC) != 0);
        rx.caps = caps & OF_RECEIVES;
        rx.op_flags = self.rx.map_or(0, |rx| rx.op_flags);
        rx.msg_order = NATURAL_ORDER | self.rx.map_or(0, |rx| rx.msg_order);
        rx.size = or_default(self.rx.map(|rx| rx.size), DEFAULT_OPERATIONS);
        rx.iov_limit = IOV_LIMIT;
    }

    fn fill_domain(&self, domain: &mut DomainAttr) {
        let or_default =
            |wanted: Option<c_int>, default| wanted.filter(|w| *w > 0).unwrap_or(default);
        let hints = self.domain;
        domain.name = duplicate(DOMAIN_NAME);
        domain.threading = or_default(hints.map(|d| d.threading), FI_THREAD_SAFE);
        domain.control_progress = or_default(hints.map(|d| d.control_progress), FI_PROGRESS_AUTO);
        domain.data_progress = or_default(hints.map(|d| d.data_progress), FI_PROGRESS_MANUAL);
        domain.resource_mgmt = or_default(hints.map(|d| d.resource_mgmt), FI_RM_ENABLED);
        domain.av_type = or_default(hints.map(|d| d.av_type), FI_AV_UNSPEC);
        domain.mr_mode = mr_mode(hints.map_or(0, |domain| domain.mr_mode), self.version);
        domain.mr_key_size = size_of::<u64>();
        domain.cq_data_size = DATA_BYTES;
        (domain.cq_cnt, domain.ep_cnt) = (MAX_OBJECTS, MAX_OBJECTS);
        (domain.tx_ctx_cnt, domain.rx_ctx_cnt) = (MAX_OBJECTS, MAX_OBJECTS);
        (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx) = (1, 1);
        (domain.cntr_cnt, domain.mr_cnt) = (MAX_OBJECTS, MAX_OBJECTS);
        domain.mr_iov_limit = 1;
        domain.caps = DOMAIN;
    }
}

/// The registration mode: no registration is needed. Before 1.5 this had a name.
fn mr_mode(wanted: c_int, version: u32) -> c_int {
    match wanted {
        MR_BASIC | MR_SCALABLE => wanted,
        _ if version < (1 << 16 | 5) => MR_SCALABLE,
        _ => 0,
    }
}

fn are_sends_offered(tx: &TxAttr) -> bool {
    tx.caps & !all() == 0
        && tx.op_flags & !SEND_FLAGS == 0
        && tx.msg_order & !(NATURAL_ORDER | REQUESTED_ORDER) == 0
        && tx.comp_order == 0
        && tx.inject_size <= INJECT_BYTES
        && tx.size <= MAX_OPERATIONS
        && tx.iov_limit <= IOV_LIMIT
        && tx.rma_iov_limit <= 1
}

fn are_receives_offered(rx: &RxAttr) -> bool {
    rx.caps & !all() == 0
        && rx.op_flags & !RECEIVE_FLAGS == 0
        && rx.msg_order & !(NATURAL_ORDER | REQUESTED_ORDER) == 0
        && rx.comp_order == 0
        && rx.total_buffered_recv == 0
        && rx.size <= MAX_OPERATIONS
        && rx.iov_limit <= IOV_LIMIT
}

fn is_endpoint_offered(ep: &EpAttr) -> bool {
    [FI_EP_UNSPEC, FI_EP_RDM].contains(&ep.r#type)
        && ep.protocol == FI_PROTO_UNSPEC
        && ep.protocol_version <= 1
        && ep.max_msg_size <= isize::MAX as usize
        && ep.msg_prefix_size == 0
        && ep.max_order_raw_size <= MAX_ORDERED_BYTES
        && ep.max_order_war_size <= MAX_ORDERED_BYTES
        && ep.max_order_waw_size <= MAX_ORDERED_BYTES
        && ep.tx_ctx_cnt <= 1
        && ep.rx_ctx_cnt <= 1
        && ep.auth_key_size == 0
}

fn is_domain_offered(domain: &DomainAttr) -> bool {
    let kinds = [
        (domain.threading, FI_THREAD_ENDPOINT),
        (domain.control_progress, FI_PROGRESS_MANUAL),
        (domain.data_progress, FI_PROGRESS_MANUAL),
        (domain.resource_mgmt, FI_RM_ENABLED),
        (domain.av_type, FI_AV_TABLE),
    ];
    is_name(domain.name, DOMAIN_NAME)
        && kinds.into_iter().all(|(wanted, last)| (0..=last).contains(&wanted))
        && domain.mr_key_size <= size_of::<u64>()
        && domain.cq_data_size <= DATA_BYTES
        && domain.cq_cnt <= MAX_OBJECTS
        && domain.ep_cnt <= MAX_OBJECTS
        && domain.tx_ctx_cnt <= MAX_OBJECTS
        && domain.rx_ctx_cnt <= MAX_OBJECTS
        && domain.max_ep_tx_ctx <= 1
        && domain.max_ep_rx_ctx <= 1
        && domain.max_ep_stx_ctx == 0
        && domain.max_ep_srx_ctx == 0
        && domain.cntr_cnt <= MAX_OBJECTS
        && domain.mr_iov_limit <= 1
        && domain.mr_cnt <= MAX_OBJECTS
        && domain.caps & !DOMAIN == 0
        && domain.auth_key_size == 0
        && domain.max_err_data == 0
}

/// Returns whether no name is requested, or this one.
fn is_name(wanted: *const c_char, ours: &CStr) -> bool {
    // SAFETY: names in attributes are C strings or null.
    wanted.is_null() || unsafe { CStr::from_ptr(wanted) } == ours
}

/// Copies a string into memory from `malloc`; null if that fails.
fn duplicate(text: &CStr) -> *mut c_char {
    // SAFETY: it is a C string.
    unsafe { libc::strdup(text.as_ptr()) }
}
