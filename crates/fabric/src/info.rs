//! What the provider offers, and whether that is what a program asks for.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use memferry_sys::cross_memory;

use crate::abi::*;
use crate::address::{ADDRESS_BYTES, Address, LocalId, is_this_host};
use crate::core::core;
use crate::guard::{Code, Result, call};

/// The name of the fabric and of its only domain.
pub(crate) const FABRIC_NAME: &CStr = c"memferry";
pub(crate) const DOMAIN_NAME: &CStr = c"memferry";

/// Messages up to this size are copied where they cannot be sent at once. MPICH waits for an answer
/// to every message that is longer.
pub(crate) const INJECT_BYTES: usize = 16 << 10;
/// The most pieces of memory of one message.
pub(crate) const MOST_PIECES: usize = 16;
/// The bytes of completion data.
const DATA_BYTES: usize = 8;
/// Operations of a direction that may be under way, unless another number is asked for.
const USUAL_OPERATIONS: usize = 1024;
const MOST_OPERATIONS: usize = 32768;
const MOST_OBJECTS: usize = 65536;

/// What programs have to ask for.
const PRIMARY: u64 = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV;
/// The directions of messages: both, unless one is asked for.
const DIRECTIONS: u64 = FI_SEND | FI_RECV;
/// The same of accesses to memory.
const ACCESSES: u64 = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
/// What is there whether it is asked for or not.
const SECONDARY: u64 = FI_MULTI_RECV | FI_SOURCE | DOMAIN;
const DOMAIN: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM;

/// All of it. Memory of others is offered where the system lets processes reach it.
fn all() -> u64 {
    static CAN_REACH: OnceLock<bool> = OnceLock::new();
    let can_reach = *CAN_REACH.get_or_init(|| {
        let is_off = std::env::var_os("MEMFERRY_CMA").is_some_and(|word| word == "off");
        let is_scoped = cross_memory::ptrace_scope() > 0 && !rustix::process::geteuid().is_root();
        !is_off && !is_scoped && !cross_memory::is_filtered()
    });
    let accesses = if can_reach { FI_RMA | ACCESSES } else { 0 };
    PRIMARY | DIRECTIONS | SECONDARY | accesses
}

/// Those of the two directions.
const OF_SENDS: u64 = FI_MSG | FI_TAGGED | FI_SEND | FI_RMA | FI_READ | FI_WRITE;
const OF_RECEIVES: u64 =
    FI_MSG | FI_TAGGED | FI_RECV | FI_DIRECTED_RECV | FI_MULTI_RECV | FI_SOURCE | OF_OWNERS;
const OF_OWNERS: u64 = FI_RMA | FI_REMOTE_READ | FI_REMOTE_WRITE;

/// How memory was registered before 1.5: by address and with keys of the provider's, or by offset and
/// with keys of the program's.
pub(crate) const MR_BASIC: c_int = 1;
const MR_SCALABLE: c_int = 2;

/// Flags that may be the usual ones of an endpoint.
const SEND_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_MATCH_COMPLETE
    | FI_MORE;
const RECEIVE_FLAGS: u64 = FI_COMPLETION | FI_MULTI_RECV | FI_MORE;

/// Flags by which layered providers look for one to stand on: for themselves, for any that is not
/// layered, for one that offloads.
const PRIVATE_FLAGS: u64 = 1 << 58 | 1 << 59 | 1 << 61;

pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    info: *mut *mut Info,
) -> c_int {
    // SAFETY: libfabric's contract: strings or null, an info with or without attributes or null, room
    // for a pointer.
    call(|| unsafe {
        let (node, service) = (text(node), text(service));
        let hints = hints.as_ref();
        let wanted = Wanted::new(hints, version);
        if is_private(flags, hints) || !wanted.is_offered() {
            return Err(Code(FI_ENODATA));
        }
        let (source, target) = addresses(node, service, flags, hints)?;
        let made = core().new_info();
        let offered = made.as_mut().ok_or(Code(FI_ENOMEM))?;
        wanted.fill(offered);
        (offered.src_addr, offered.src_addrlen) = allocated(source)?;
        (offered.dest_addr, offered.dest_addrlen) = allocated(target)?;
        info.write(made);
        Ok(())
    })
}

/// # Safety
/// The string must be one of C's, or null.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("?"))
}

/// Whether it is not a program that asks, but a provider that would stand on this one.
fn is_private(flags: u64, hints: Option<&Info>) -> bool {
    // SAFETY: hints have valid attributes or null, and these valid strings or null.
    let name = unsafe {
        hints.and_then(|hints| hints.fabric_attr.as_ref()).and_then(|attr| text(attr.prov_name))
    };
    flags & PRIVATE_FLAGS != 0 || name.is_some_and(|name| !name.eq_ignore_ascii_case("memferry"))
}

/// The addresses of this side and of the other, as far as they are known.
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
            return Err(Code(FI_ENODATA));
        }
        // SAFETY: hints say how long their addresses are.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), ADDRESS_BYTES) };
        Address::from_bytes(bytes).map(Some).ok_or(Code(FI_ENODATA))
    };
    let (mut source, mut target) = match hints {
        Some(hints) => (
            hinted(hints.src_addr, hints.src_addrlen)?,
            hinted(hints.dest_addr, hints.dest_addrlen)?,
        ),
        None => (None, None),
    };
    if node.is_some_and(|node| !is_this_host(node)) {
        return Err(Code(FI_ENODATA));
    }
    let named = service.map(|service| Address::here(LocalId::of_service(service)));
    if flags & FI_SOURCE != 0 {
        source = named.or(source);
    } else {
        target = named.or(target);
    }
    Ok((source.or_else(|| Some(Address::here(LocalId::random()))), target))
}

/// The bytes of an address in memory of C's.
fn allocated(address: Option<Address>) -> Result<(*mut c_void, usize)> {
    let Some(address) = address else { return Ok((std::ptr::null_mut(), 0)) };
    // SAFETY: as many bytes are allocated as are written.
    unsafe {
        let memory = libc::malloc(ADDRESS_BYTES);
        if memory.is_null() {
            return Err(Code(FI_ENOMEM));
        }
        memory.cast::<[u8; ADDRESS_BYTES]>().write(address.to_bytes());
        Ok((memory, ADDRESS_BYTES))
    }
}

/// What a program asks for. All of it is optional.
struct Wanted<'a> {
    hints: Option<&'a Info>,
    version: u32,
    tx: Option<&'a TxAttr>,
    rx: Option<&'a RxAttr>,
    ep: Option<&'a EpAttr>,
    domain: Option<&'a DomainAttr>,
    fabric: Option<&'a FabricAttr>,
}

impl<'a> Wanted<'a> {
    /// # Safety
    /// The attributes must be valid, or null.
    unsafe fn new(hints: Option<&'a Info>, version: u32) -> Self {
        // SAFETY: the caller's promise.
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
                let accesses = wanted & FI_RMA != 0 && wanted & ACCESSES == 0;
                wanted | both | SECONDARY | if accesses { ACCESSES } else { 0 }
            }
        }
    }

    /// Writes what the program gets: what it asked for where that is offered, else what is usual.
    ///
    /// # Safety
    /// All attributes of the info must be there.
    unsafe fn fill(&self, info: &mut Info) {
        let caps = self.caps();
        info.caps = caps;
        info.addr_format = FI_FORMAT_UNSPEC;
        // SAFETY: the caller's promise.
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
        (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
        self.fill_domain(domain);
        fabric.name = duplicate(FABRIC_NAME);
    }

    fn fill_directions(&self, caps: u64, tx: &mut TxAttr, rx: &mut RxAttr) {
        let or_usual = |wanted: Option<usize>, usual| wanted.filter(|w| *w > 0).unwrap_or(usual);
        tx.caps = caps & OF_SENDS;
        tx.op_flags = self.tx.map_or(0, |tx| tx.op_flags);
        tx.msg_order = FI_ORDER_SAS;
        tx.inject_size = INJECT_BYTES;
        tx.size = or_usual(self.tx.map(|tx| tx.size), USUAL_OPERATIONS);
        tx.iov_limit = MOST_PIECES;
        tx.rma_iov_limit = usize::from(caps & FI_RMA != 0);
        rx.caps = caps & OF_RECEIVES;
        rx.op_flags = self.rx.map_or(0, |rx| rx.op_flags);
        rx.msg_order = FI_ORDER_SAS;
        rx.size = or_usual(self.rx.map(|rx| rx.size), USUAL_OPERATIONS);
        rx.iov_limit = MOST_PIECES;
    }

    fn fill_domain(&self, domain: &mut DomainAttr) {
        let or_usual = |wanted: Option<c_int>, usual| wanted.filter(|w| *w > 0).unwrap_or(usual);
        let asked = self.domain;
        domain.name = duplicate(DOMAIN_NAME);
        domain.threading = or_usual(asked.map(|d| d.threading), FI_THREAD_SAFE);
        domain.control_progress = or_usual(asked.map(|d| d.control_progress), FI_PROGRESS_AUTO);
        domain.data_progress = or_usual(asked.map(|d| d.data_progress), FI_PROGRESS_MANUAL);
        domain.resource_mgmt = or_usual(asked.map(|d| d.resource_mgmt), FI_RM_ENABLED);
        domain.av_type = or_usual(asked.map(|d| d.av_type), FI_AV_UNSPEC);
        domain.mr_mode = mr_mode(asked.map_or(0, |domain| domain.mr_mode), self.version);
        domain.mr_key_size = size_of::<u64>();
        domain.cq_data_size = DATA_BYTES;
        (domain.cq_cnt, domain.ep_cnt) = (MOST_OBJECTS, MOST_OBJECTS);
        (domain.tx_ctx_cnt, domain.rx_ctx_cnt) = (MOST_OBJECTS, MOST_OBJECTS);
        (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx) = (1, 1);
        (domain.cntr_cnt, domain.mr_cnt) = (MOST_OBJECTS, MOST_OBJECTS);
        domain.mr_iov_limit = 1;
        domain.caps = DOMAIN;
    }
}

/// No registration is needed. Before 1.5, that had a name.
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
        && tx.msg_order & !FI_ORDER_SAS == 0
        && tx.comp_order == 0
        && tx.inject_size <= INJECT_BYTES
        && tx.size <= MOST_OPERATIONS
        && tx.iov_limit <= MOST_PIECES
        && tx.rma_iov_limit <= 1
}

fn are_receives_offered(rx: &RxAttr) -> bool {
    rx.caps & !all() == 0
        && rx.op_flags & !RECEIVE_FLAGS == 0
        && rx.msg_order & !FI_ORDER_SAS == 0
        && rx.comp_order == 0
        && rx.total_buffered_recv == 0
        && rx.size <= MOST_OPERATIONS
        && rx.iov_limit <= MOST_PIECES
}

fn is_endpoint_offered(ep: &EpAttr) -> bool {
    [FI_EP_UNSPEC, FI_EP_RDM].contains(&ep.r#type)
        && ep.protocol == FI_PROTO_UNSPEC
        && ep.protocol_version <= 1
        && ep.max_msg_size <= isize::MAX as usize
        && ep.msg_prefix_size == 0
        && ep.max_order_raw_size == 0
        && ep.max_order_war_size == 0
        && ep.max_order_waw_size == 0
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
        && domain.cq_cnt <= MOST_OBJECTS
        && domain.ep_cnt <= MOST_OBJECTS
        && domain.tx_ctx_cnt <= MOST_OBJECTS
        && domain.rx_ctx_cnt <= MOST_OBJECTS
        && domain.max_ep_tx_ctx <= 1
        && domain.max_ep_rx_ctx <= 1
        && domain.max_ep_stx_ctx == 0
        && domain.max_ep_srx_ctx == 0
        && domain.cntr_cnt <= MOST_OBJECTS
        && domain.mr_iov_limit <= 1
        && domain.mr_cnt <= MOST_OBJECTS
        && domain.caps & !DOMAIN == 0
        && domain.auth_key_size == 0
        && domain.max_err_data == 0
}

/// Whether no name is asked for, or this one.
fn is_name(wanted: *const c_char, ours: &CStr) -> bool {
    // SAFETY: names in attributes are strings of C's or null.
    wanted.is_null() || unsafe { CStr::from_ptr(wanted) } == ours
}

/// A string in memory of C's. It is missing where memory is.
fn duplicate(text: &CStr) -> *mut c_char {
    // SAFETY: it is a string of C's.
    unsafe { libc::strdup(text.as_ptr()) }
}
