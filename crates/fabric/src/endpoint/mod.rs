//! Endpoints of programs: opened, bound to queues and an address vector, enabled, and then used
//! through an [`EndpointCore`]. Aliases are further handles of an endpoint, with flags of their
//! own.

mod atomic;
mod atomic_calls;
mod auto_progress;
mod core;
mod local_address;
mod options;
mod order;
mod peers;
mod receive;
mod rma;
mod send;
mod service;
mod tagged;
mod tracked;
mod unsupported;
mod untagged;
mod windows;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::*;
use crate::address::{ADDRESS_BYTES, Address, AddressVector};
use crate::domain::Domain;
use crate::guard::{FiError, Result, call, unsupported};
use crate::mr_table::MrTable;
use crate::object::{self, FidHeader, FidObject};
use crate::queue::{CompletionQueue, Counter, EventQueue};
use crate::remote::{Directory, FabricTransport, InnerEndpoint, RemoteConfig};
pub(crate) use atomic_calls::query_atomic;
use auto_progress::AutoProgress;
pub(crate) use core::EndpointCore;
use core::{CompletionBinding, Remotes};
use local_address::ReservedAddress;

/// The default minimum of free bytes in a buffer of a multi-receive.
const DEFAULT_MIN_MULTI_RECV: usize = 64;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Endpoint {
    header: FidHeader<FidEp>,
    /// Set when the endpoint is enabled.
    core: OnceLock<Arc<EndpointCore>>,
    /// The default flags of sends and receives.
    send_flags: AtomicU64,
    receive_flags: AtomicU64,
    /// Sends wait for earlier accesses to memory of their peer.
    orders_sends: bool,
    shared: Arc<EndpointShared>,
}

// SAFETY: it begins with the header of an endpoint, whose class this is.
unsafe impl FidObject for Endpoint {
    const CLASS: usize = FI_CLASS_EP;
}

/// The state that an endpoint and its aliases share.
#[derive(Debug)]
struct EndpointShared {
    domain: Arc<Domain>,
    caps: u64,
    /// The message order that the program has requested.
    msg_order: u64,
    address: Mutex<ReservedAddress>,
    bindings: Mutex<Bindings>,
    /// Executes requests of peers without a call of the program.
    auto_progress: Mutex<Option<AutoProgress>>,
    /// The minimum of free bytes in a buffer of a multi-receive.
    min_multi_recv: AtomicUsize,
    /// The number of open handles: closing the last one closes the core.
    open_aliases: AtomicUsize,
}

#[derive(Debug, Default)]
struct Bindings {
    vector: Option<Arc<AddressVector>>,
    /// A reference, so that the queue is not closed first. Endpoints of this type have no events.
    events: Option<Arc<EventQueue>>,
    sends: CompletionBinding,
    receives: CompletionBinding,
    /// Only the counters of these are used.
    reads: CompletionBinding,
    writes: CompletionBinding,
}

impl Endpoint {
    /// The core of an enabled endpoint.
    #[inline]
    fn core(&self) -> Result<&EndpointCore> {
        self.core.get().map(|core| &**core).ok_or(FiError(FI_EOPBADSTATE))
    }

    fn enable(&self) -> Result {
        if self.core.get().is_some() {
            return Ok(());
        }
        let shared = &*self.shared;
        let bindings = shared.bindings.lock().unwrap();
        let vector = bindings.vector.clone().ok_or(FiError(FI_ENOAV))?;
        let needed = [(FI_SEND, &bindings.sends), (FI_RECV, &bindings.receives)];
        if needed.iter().any(|(cap, bound)| shared.caps & cap != 0 && bound.is_unbound()) {
            return Err(FiError(FI_ENOCQ));
        }
        let messages = self.open_messages()?;
        let remote = self.set_remote_transport(&messages)?;
        // Without these capabilities too: a peer that expects them is refused, and not disconnected.
        messages.enable_service();
        let mr_table = self.mr_table();
        let is_alone = shared.domain.auto_progress();
        let core = EndpointCore::new(messages, remote, vector, &bindings, shared.caps, mr_table);
        let core = Arc::new(if is_alone { core.serving_alone(shared.caps) } else { core });
        let expose = || match shared.caps & (FI_RMA | FI_ATOMIC) {
            0 => Ok(()),
            _ => shared.domain.publish_on(&core),
        };
        if let Err(code) = core.attach().and_then(|()| expose()) {
            // Queues and counters know it already, and perhaps peers.
            let _ = core.withdraw_all();
            core.detach();
            return Err(code);
        }
        if core.serves_alone() {
            let started = AutoProgress::start(&core);
            *shared.auto_progress.lock().unwrap() = Some(started.inspect_err(|_| {
                let _ = core.withdraw_all();
                core.detach();
            })?);
        }
        let _ = self.core.set(core);
        Ok(())
    }

    /// Opens the Memferry endpoint, with another address if a process of this host has the
    /// requested one.
    fn open_messages(&self) -> Result<memferry_message::Endpoint> {
        let auto_progress = self.shared.domain.auto_progress();
        let mut own = self.shared.address.lock().unwrap();
        let name = own.get().id.listening_name();
        match core::open_messages(&name, auto_progress) {
            Err(FiError(FI_EADDRINUSE)) if !own.is_fixed() => {
                *own = ReservedAddress::new()?;
                core::open_messages(&own.get().id.listening_name(), auto_progress)
            }
            outcome => outcome,
        }
    }

    /// Sets the transport to other hosts, if one is available. Without one, only peers of this host
    /// can be reached, which is no error.
    fn set_remote_transport(&self, messages: &memferry_message::Endpoint) -> Result<Remotes> {
        let inner = match InnerEndpoint::open(&RemoteConfig::from_environment()) {
            Ok(inner) => inner,
            Err(unavailable) => {
                tracing::info!("{unavailable}");
                return Ok(Err(unavailable));
            }
        };
        let mut own = self.shared.address.lock().unwrap();
        own.set_socket(inner.address().0);
        let (directory, mr_table) = (Arc::new(Directory::default()), self.mr_table());
        let name = own.get().to_bytes();
        let transport = FabricTransport::new(inner, name, Arc::clone(&directory), mr_table);
        messages.set_remote_transport(Box::new(transport))?;
        // Until the program inserts an address of another host. A thread of the library sleeps for
        // any time, and then watches the transport.
        messages.expect_remote(self.shared.domain.auto_progress());
        Ok(Ok(directory))
    }

    /// The registered memory that peers may access through this endpoint.
    fn mr_table(&self) -> Arc<MrTable> {
        match self.shared.caps & (FI_RMA | FI_ATOMIC) {
            0 => Arc::default(),
            _ => Arc::clone(self.shared.domain.mr_table()),
        }
    }

    /// Closes the core, if this is the last handle.
    fn close(&self) -> Result {
        let aliases = &self.shared.open_aliases;
        // Of two concurrent closes, exactly one sees the count 1.
        if aliases.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(core) = self.core.get()
        {
            if let Err(code) = core.close() {
                aliases.fetch_add(1, Ordering::Relaxed);
                return Err(code);
            }
            let thread = self.shared.auto_progress.lock().unwrap().take();
            drop(thread);
        }
        Ok(())
    }

    /// # Safety
    /// The other object must be open.
    unsafe fn bind(&self, to: *mut Fid, flags: u64) -> Result {
        if self.core.get().is_some() {
            return Err(FiError(FI_EOPBADSTATE));
        }
        // SAFETY: the caller guarantees it.
        let class = unsafe { to.as_ref() }.ok_or(FiError(FI_EINVAL))?.fclass;
        let mut bindings = self.shared.bindings.lock().unwrap();
        // SAFETY: as above; each object is used as its class.
        unsafe {
            match class {
                FI_CLASS_AV => {
                    let vector: Arc<AddressVector> = object::share(to);
                    if !Arc::ptr_eq(vector.domain(), &self.shared.domain) {
                        return Err(FiError(FI_EDOMAIN));
                    }
                    bindings.vector = Some(vector);
                }
                FI_CLASS_CQ => bindings.bind_queue(&object::share(to), flags)?,
                FI_CLASS_CNTR => bindings.bind_counter(&object::share(to), flags),
                FI_CLASS_EQ => bindings.events = Some(object::share(to)),
                _ => return Err(FiError(FI_ENOSYS)),
            }
        }
        Ok(())
    }

    /// The default flags of the given direction.
    fn flags_of(&self, direction: u64) -> Result<&AtomicU64> {
        match direction & (FI_TRANSMIT | FI_RECV) {
            FI_TRANSMIT => Ok(&self.send_flags),
            FI_RECV => Ok(&self.receive_flags),
            _ => Err(FiError(FI_EINVAL)),
        }
    }

    fn set_flags(&self, flags: u64) -> Result {
        let wanted = flags & !(FI_TRANSMIT | FI_RECV);
        self.flags_of(flags)?.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// The pointer in the description must be valid for a write.
    unsafe fn alias(&self, description: &Alias) -> Result {
        let core = self.core.get().ok_or(FiError(FI_EOPBADSTATE))?;
        if description.fid.is_null() {
            return Err(FiError(FI_EINVAL));
        }
        let alias = Self {
            header: header(self.header.fid.context),
            core: OnceLock::from(core.clone()),
            send_flags: AtomicU64::new(self.send_flags()),
            receive_flags: AtomicU64::new(self.receive_flags()),
            orders_sends: self.orders_sends,
            shared: self.shared.clone(),
        };
        alias.set_flags(description.flags)?;
        self.shared.open_aliases.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller guarantees it.
        unsafe { object::into_raw(Arc::new(alias), description.fid) }
    }
}

impl Bindings {
    fn bind_queue(&mut self, queue: &Arc<CompletionQueue>, flags: u64) -> Result {
        if flags & !(FI_SEND | FI_RECV | FI_SELECTIVE_COMPLETION) != 0 {
            return Err(FiError(FI_EBADFLAGS));
        }
        let is_selective = flags & FI_SELECTIVE_COMPLETION != 0;
        for (flag, direction) in [(FI_SEND, &mut self.sends), (FI_RECV, &mut self.receives)] {
            if flags & flag != 0 {
                if direction.queue.is_some() {
                    return Err(FiError(FI_EINVAL));
                }
                (direction.queue, direction.selective) = (Some(queue.clone()), is_selective);
            }
        }
        Ok(())
    }

    fn bind_counter(&mut self, counter: &Arc<Counter>, flags: u64) {
        let directions = [
            (FI_SEND, &mut self.sends),
            (FI_RECV, &mut self.receives),
            (FI_READ, &mut self.reads),
            (FI_WRITE, &mut self.writes),
        ];
        for (flag, direction) in directions {
            if flags & flag != 0 {
                direction.counter = Some(counter.clone());
            }
        }
    }
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind,
    control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

fn header(context: *mut c_void) -> FidHeader<FidEp> {
    FidHeader::new(FidEp {
        fid: Fid { fclass: FI_CLASS_EP, context, ops: &raw const FID_OPS },
        ops: &raw const options::OPS,
        cm: &raw const options::CM_OPS,
        msg: &raw const untagged::OPS,
        rma: &raw const rma::OPS,
        tagged: &raw const tagged::OPS,
        atomic: &raw const atomic_calls::OPS,
        collective: unsupported::collectives(),
    })
}

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    info: *mut Info,
    ep: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open domain, an info of `getinfo`, space for a pointer.
    call(|| unsafe {
        let info = info.as_ref().ok_or(FiError(FI_EINVAL))?;
        if info.ep_attr.as_ref().is_none_or(|attr| attr.r#type != FI_EP_RDM) {
            return Err(FiError(FI_EINVAL));
        }
        let wanted = (!info.src_addr.is_null() && info.src_addrlen >= ADDRESS_BYTES)
            .then(|| std::slice::from_raw_parts(info.src_addr.cast::<u8>(), ADDRESS_BYTES));
        let wanted = wanted.map(|bytes| Address::from_bytes(bytes).ok_or(FiError(FI_EINVAL)));
        let msg_order = info.tx_attr.as_ref().map_or(0, |tx| tx.msg_order);
        let endpoint = Endpoint {
            header: header(context),
            core: OnceLock::new(),
            send_flags: AtomicU64::new(info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags)),
            receive_flags: AtomicU64::new(info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags)),
            orders_sends: order::orders_sends(msg_order),
            shared: Arc::new(EndpointShared {
                domain: object::share(domain),
                caps: info.caps,
                msg_order,
                address: Mutex::new(ReservedAddress::reserve(wanted.transpose()?)?),
                bindings: Mutex::default(),
                auto_progress: Mutex::default(),
                min_multi_recv: AtomicUsize::new(DEFAULT_MIN_MULTI_RECV),
                open_aliases: AtomicUsize::new(1),
            }),
        };
        object::into_raw(Arc::new(endpoint), ep)
    })
}

pub(crate) unsafe extern "C" fn open_with_flags(
    domain: *mut FidDomain,
    info: *mut Info,
    ep: *mut *mut FidEp,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return -FI_EBADFLAGS;
    }
    // SAFETY: the caller guarantees it.
    unsafe { open(domain, info, ep, context) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, which the program does not use again after a
    // success.
    call(|| unsafe {
        let endpoint = object::from_raw::<Endpoint, _>(fid)?;
        endpoint.close().inspect_err(|_| {
            // The endpoint stays open.
            let _ = Arc::into_raw(Arc::clone(&endpoint));
        })
    })
}

unsafe extern "C" fn bind(fid: *mut Fid, to: *mut Fid, flags: u64) -> c_int {
    // SAFETY: libfabric's contract: both are open.
    call(|| unsafe { object::borrow::<Endpoint, _>(fid).bind(to, flags) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, and what the command takes.
    call(|| unsafe {
        let endpoint: &Endpoint = object::borrow(fid);
        match command {
            FI_ENABLE => endpoint.enable(),
            FI_GETOPSFLAG => {
                let flags = argument.cast::<u64>();
                *flags = endpoint.flags_of(*flags)?.load(Ordering::Relaxed);
                Ok(())
            }
            FI_SETOPSFLAG => endpoint.set_flags(*argument.cast::<u64>()),
            FI_ALIAS => endpoint.alias(&*argument.cast::<Alias>()),
            _ => Err(FiError(FI_ENOSYS)),
        }
    })
}
