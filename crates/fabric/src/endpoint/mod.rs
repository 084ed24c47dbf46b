//! Endpoints as programs see them: opened, bound to queues and an address vector, enabled, and then
//! used by way of a [`Station`]. Aliases are further views of an endpoint, with flags of their own.

mod access;
mod marked;
mod options;
mod own;
mod peers;
mod plain;
mod receive;
mod send;
mod station;
mod tagged;
mod unoffered;
mod windows;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::*;
use crate::address::{ADDRESS_BYTES, Address, AddressVector};
use crate::domain::Domain;
use crate::guard::{Code, Result, call, unsupported};
use crate::object::{self, Object, Visible};
use crate::queue::{CompletionQueue, Counter, EventQueue};
use crate::remote::{Directory, Inner, RemoteCarrier, Settings};
use own::OwnAddress;
pub(crate) use station::Station;
use station::{Direction, Remotes};

/// The least room for a further message in memory that takes several, unless the program says.
const LEAST_ROOM: usize = 64;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Endpoint {
    visible: Visible<FidEp>,
    /// There from when it is enabled on.
    station: OnceLock<Arc<Station>>,
    /// What sends and receives do if a call has no flags.
    send_flags: AtomicU64,
    receive_flags: AtomicU64,
    common: Arc<Common>,
}

// SAFETY: it begins with the visible part of an endpoint, whose class this is.
unsafe impl Object for Endpoint {
    const CLASS: usize = FI_CLASS_EP;
}

/// What an endpoint and its aliases have in common.
#[derive(Debug)]
struct Common {
    domain: Arc<Domain>,
    caps: u64,
    address: Mutex<OwnAddress>,
    bindings: Mutex<Bindings>,
    /// The least room for a further message in memory that takes several.
    least_room: AtomicUsize,
    /// How many of them are open: the last ends the station.
    views: AtomicUsize,
}

#[derive(Debug, Default)]
struct Bindings {
    vector: Option<Arc<AddressVector>>,
    /// Counted, so that it is not closed first. Endpoints of this kind have no events.
    events: Option<Arc<EventQueue>>,
    sends: Direction,
    receives: Direction,
    /// Of these, only the counters.
    reads: Direction,
    writes: Direction,
}

impl Endpoint {
    /// Where its messages go and come, if it is enabled.
    #[inline]
    fn station(&self) -> Result<&Station> {
        self.station.get().map(|station| &**station).ok_or(Code(FI_EOPBADSTATE))
    }

    fn enable(&self) -> Result {
        if self.station.get().is_some() {
            return Ok(());
        }
        let common = &*self.common;
        let bindings = common.bindings.lock().unwrap();
        let vector = bindings.vector.clone().ok_or(Code(FI_ENOAV))?;
        let needed = [(FI_SEND, &bindings.sends), (FI_RECV, &bindings.receives)];
        if needed.iter().any(|(cap, bound)| common.caps & cap != 0 && bound.is_unbound()) {
            return Err(Code(FI_ENOCQ));
        }
        let messages = self.open_messages()?;
        let remote = self.carry(&messages)?;
        let is_directed = common.caps & FI_DIRECTED_RECV != 0;
        let station = Arc::new(Station::new(messages, remote, vector, &bindings, is_directed));
        let exposes = || match common.caps & FI_RMA {
            0 => Ok(()),
            _ => common.domain.expose_by(&station),
        };
        if let Err(code) = station.attach().and_then(|()| exposes()) {
            // Queues and counters know it by now, and perhaps peers.
            let _ = station.withdraw_all();
            station.detach();
            return Err(code);
        }
        let _ = self.station.set(station);
        Ok(())
    }

    /// Opens the Memferry endpoint, under another address if a process of this host has the one that
    /// was asked for.
    fn open_messages(&self) -> Result<memferry_message::Endpoint> {
        let moves_by_itself = self.common.domain.moves_by_itself();
        let mut own = self.common.address.lock().unwrap();
        let name = own.get().id.listening_name();
        match station::open_messages(&name, moves_by_itself) {
            Err(Code(FI_EADDRINUSE)) if !own.is_fixed() => {
                *own = OwnAddress::new()?;
                station::open_messages(&own.get().id.listening_name(), moves_by_itself)
            }
            outcome => outcome,
        }
    }

    /// Lets messages go to other hosts, if there is a way. It is no error if there is none: then only
    /// peers of this host can be reached.
    fn carry(&self, messages: &memferry_message::Endpoint) -> Result<Remotes> {
        let inner = match Inner::open(&Settings::of_environment()) {
            Ok(inner) => inner,
            Err(unavailable) => {
                tracing::info!("{unavailable}");
                return Ok(Err(unavailable));
            }
        };
        let mut own = self.common.address.lock().unwrap();
        own.set_socket(inner.address().0);
        let directory = Arc::new(Directory::default());
        let regions = match self.common.caps & FI_RMA {
            0 => Arc::default(),
            _ => Arc::clone(self.common.domain.regions()),
        };
        let name = own.get().to_bytes();
        let carrier = RemoteCarrier::new(inner, name, Arc::clone(&directory), regions);
        messages.carry(Box::new(carrier))?;
        Ok(Ok(directory))
    }

    /// Ends the station, if this is the last view of it.
    fn close(&self) -> Result {
        let views = &self.common.views;
        // Of two that are closed at once one sees the other's.
        if views.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(station) = self.station.get()
            && let Err(code) = station.end()
        {
            views.fetch_add(1, Ordering::Relaxed);
            return Err(code);
        }
        Ok(())
    }

    /// # Safety
    /// The other object must be open.
    unsafe fn bind(&self, to: *mut Fid, flags: u64) -> Result {
        if self.station.get().is_some() {
            return Err(Code(FI_EOPBADSTATE));
        }
        // SAFETY: the caller's promise.
        let class = unsafe { to.as_ref() }.ok_or(Code(FI_EINVAL))?.fclass;
        let mut bindings = self.common.bindings.lock().unwrap();
        // SAFETY: as above; each object is looked at as what its class says.
        unsafe {
            match class {
                FI_CLASS_AV => {
                    let vector: Arc<AddressVector> = object::share(to);
                    if !Arc::ptr_eq(vector.domain(), &self.common.domain) {
                        return Err(Code(FI_EDOMAIN));
                    }
                    bindings.vector = Some(vector);
                }
                FI_CLASS_CQ => bindings.bind_queue(&object::share(to), flags)?,
                FI_CLASS_CNTR => bindings.bind_counter(&object::share(to), flags),
                FI_CLASS_EQ => bindings.events = Some(object::share(to)),
                _ => return Err(Code(FI_ENOSYS)),
            }
        }
        Ok(())
    }

    /// The usual flags of the one direction that is named.
    fn flags_of(&self, direction: u64) -> Result<&AtomicU64> {
        match direction & (FI_TRANSMIT | FI_RECV) {
            FI_TRANSMIT => Ok(&self.send_flags),
            FI_RECV => Ok(&self.receive_flags),
            _ => Err(Code(FI_EINVAL)),
        }
    }

    fn set_flags(&self, flags: u64) -> Result {
        let wanted = flags & !(FI_TRANSMIT | FI_RECV);
        self.flags_of(flags)?.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// There must be room for the pointer that the description names.
    unsafe fn alias(&self, description: &Alias) -> Result {
        let station = self.station.get().ok_or(Code(FI_EOPBADSTATE))?;
        if description.fid.is_null() {
            return Err(Code(FI_EINVAL));
        }
        let alias = Self {
            visible: visible(self.visible.fid.context),
            station: OnceLock::from(station.clone()),
            send_flags: AtomicU64::new(self.send_flags()),
            receive_flags: AtomicU64::new(self.receive_flags()),
            common: self.common.clone(),
        };
        alias.set_flags(description.flags)?;
        self.common.views.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { object::give(Arc::new(alias), description.fid) }
    }
}

impl Bindings {
    fn bind_queue(&mut self, queue: &Arc<CompletionQueue>, flags: u64) -> Result {
        if flags & !(FI_SEND | FI_RECV | FI_SELECTIVE_COMPLETION) != 0 {
            return Err(Code(FI_EBADFLAGS));
        }
        let is_selective = flags & FI_SELECTIVE_COMPLETION != 0;
        for (flag, direction) in [(FI_SEND, &mut self.sends), (FI_RECV, &mut self.receives)] {
            if flags & flag != 0 {
                if direction.queue.is_some() {
                    return Err(Code(FI_EINVAL));
                }
                (direction.queue, direction.is_selective) = (Some(queue.clone()), is_selective);
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

fn visible(context: *mut c_void) -> Visible<FidEp> {
    Visible::new(FidEp {
        fid: Fid { fclass: FI_CLASS_EP, context, ops: &raw const FID_OPS },
        ops: &raw const options::OPS,
        cm: &raw const options::CM_OPS,
        msg: &raw const plain::OPS,
        rma: &raw const access::OPS,
        tagged: &raw const tagged::OPS,
        atomic: unoffered::atomics(),
        collective: unoffered::collectives(),
    })
}

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    info: *mut Info,
    ep: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open domain, an info of `getinfo`, room for a pointer.
    call(|| unsafe {
        let info = info.as_ref().ok_or(Code(FI_EINVAL))?;
        if info.ep_attr.as_ref().is_none_or(|attr| attr.r#type != FI_EP_RDM) {
            return Err(Code(FI_EINVAL));
        }
        let wanted = (!info.src_addr.is_null() && info.src_addrlen >= ADDRESS_BYTES)
            .then(|| std::slice::from_raw_parts(info.src_addr.cast::<u8>(), ADDRESS_BYTES));
        let wanted = wanted.map(|bytes| Address::from_bytes(bytes).ok_or(Code(FI_EINVAL)));
        let endpoint = Endpoint {
            visible: visible(context),
            station: OnceLock::new(),
            send_flags: AtomicU64::new(info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags)),
            receive_flags: AtomicU64::new(info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags)),
            common: Arc::new(Common {
                domain: object::share(domain),
                caps: info.caps,
                address: Mutex::new(OwnAddress::take(wanted.transpose()?)?),
                bindings: Mutex::default(),
                least_room: AtomicUsize::new(LEAST_ROOM),
                views: AtomicUsize::new(1),
            }),
        };
        object::give(Arc::new(endpoint), ep)
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
    // SAFETY: passed on.
    unsafe { open(domain, info, ep, context) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open endpoint, which is not used again if it closes.
    call(|| unsafe {
        let endpoint = object::take::<Endpoint, _>(fid)?;
        endpoint.close().inspect_err(|_| {
            // It stays open.
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
            _ => Err(Code(FI_ENOSYS)),
        }
    })
}
