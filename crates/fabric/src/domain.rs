//! Domains: where everything is opened that messages need.

use std::collections::HashSet;
use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::*;
use crate::endpoint::Station;
use crate::fabric::{Fabric, no_control};
use crate::guard::{Code, Result, call, unsupported};
use crate::info::{DOMAIN_NAME, MR_BASIC};
use crate::memory::Region;
use crate::object::{self, Object, Visible};
use crate::queue::EventQueue;
use crate::regions::Regions;
use crate::{address, endpoint, memory, queue};

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Domain {
    visible: Visible<FidDomain>,
    /// Counted, so that it is not closed first.
    _fabric: Arc<Fabric>,
    /// Whether messages move on while the program calls nothing.
    moves_by_itself: bool,
    events: Mutex<Option<Arc<EventQueue>>>,
    /// Who exposes memory. Held while memory comes and goes.
    exposed: Mutex<Exposed>,
    /// Memory that others may access.
    regions: Arc<Regions>,
    has_virtual_addresses: bool,
}

#[derive(Debug, Default)]
struct Exposed {
    next_key: u64,
    /// Those of all registrations, also of those that cannot be closed yet.
    taken: HashSet<u64>,
    stations: Vec<Weak<Station>>,
}

// SAFETY: it begins with the visible part of a domain, whose class this is.
unsafe impl Object for Domain {
    const CLASS: usize = FI_CLASS_DOMAIN;
}

impl Domain {
    pub(crate) fn moves_by_itself(&self) -> bool {
        self.moves_by_itself
    }

    /// Whether others name memory by its address here, and not by the distance from where it begins.
    /// Keys are then the provider's to choose.
    pub(crate) fn has_virtual_addresses(&self) -> bool {
        self.has_virtual_addresses
    }

    /// Memory that peers on other hosts may access.
    pub(crate) fn regions(&self) -> &Arc<Regions> {
        &self.regions
    }

    /// Registers memory under a key, one of its own where programs do not choose, and exposes it by
    /// all stations. Returns the key.
    ///
    /// # Safety
    /// The memory must stay valid until the key is given back.
    pub(crate) unsafe fn register(&self, wanted: u64, region: Region) -> Result<u64> {
        let mut exposed = self.exposed.lock().unwrap();
        exposed.next_key += 1;
        let key = if self.has_virtual_addresses { exposed.next_key } else { wanted };
        if !exposed.taken.insert(key) {
            return Err(Code(FI_ENOKEY));
        }
        for station in exposed.stations() {
            // SAFETY: passed on.
            if let Err(code) = unsafe { station.expose(key, &region) } {
                drop(exposed);
                // If a peer has been so quick, the key stays taken.
                let _ = self.give_key_back(key);
                return Err(code);
            }
        }
        // SAFETY: passed on.
        unsafe { self.regions.insert(key, region) };
        Ok(key)
    }

    /// Nobody can access the memory of a key after this. If somebody still does, no other access can
    /// begin, the key stays taken, and this must be called again.
    pub(crate) fn give_key_back(&self, key: u64) -> Result {
        let stations = {
            let exposed = self.exposed.lock().unwrap();
            // From here on no station begins to expose it.
            self.regions.remove(key);
            exposed.stations()
        };
        // Peers are waited for without the lock.
        stations.iter().try_for_each(|station| station.withdraw(key))?;
        self.exposed.lock().unwrap().taken.remove(&key);
        Ok(())
    }

    /// Lets a station expose all memory, that which is registered later too.
    pub(crate) fn expose_by(&self, station: &Arc<Station>) -> Result {
        let mut exposed = self.exposed.lock().unwrap();
        for (key, region) in self.regions.list() {
            // SAFETY: it was promised to stay valid when it was registered, and goes only with the lock.
            unsafe { station.expose(key, &region) }?;
        }
        exposed.stations.retain(|known| known.strong_count() > 0);
        exposed.stations.push(Arc::downgrade(station));
        Ok(())
    }
}

impl Exposed {
    fn stations(&self) -> Vec<Arc<Station>> {
        self.stations.iter().filter_map(Weak::upgrade).collect()
    }
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind,
    control: no_control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

static OPS: OpsDomain = OpsDomain {
    size: size_of::<OpsDomain>(),
    av_open: address::open,
    cq_open: queue::open_completion_queue,
    endpoint: endpoint::open,
    scalable_ep: unsupported,
    cntr_open: queue::open_counter,
    poll_open: unsupported,
    stx_ctx: unsupported,
    srx_ctx: unsupported,
    query_atomic: unsupported,
    query_collective: unsupported,
    endpoint2: endpoint::open_with_flags,
};

pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    info: *mut Info,
    domain: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open fabric, an info of `getinfo`, room for a pointer.
    call(|| unsafe {
        let attr = info.as_ref().and_then(|info| info.domain_attr.as_ref());
        let attr = attr.ok_or(Code(FI_EINVAL))?;
        if !attr.name.is_null() && CStr::from_ptr(attr.name) != DOMAIN_NAME {
            return Err(Code(FI_EINVAL));
        }
        let fid = Fid { fclass: FI_CLASS_DOMAIN, context, ops: &raw const FID_OPS };
        let visible = FidDomain { fid, ops: &raw const OPS, mr: &raw const memory::OPS };
        let opened = Domain {
            visible: Visible::new(visible),
            _fabric: object::share(fabric),
            moves_by_itself: attr.data_progress == FI_PROGRESS_AUTO,
            events: Mutex::default(),
            exposed: Mutex::default(),
            regions: Arc::new(Regions::new(attr.mr_mode == MR_BASIC)),
            has_virtual_addresses: attr.mr_mode == MR_BASIC,
        };
        object::give(Arc::new(opened), domain)
    })
}

pub(crate) unsafe extern "C" fn open_with_flags(
    fabric: *mut FidFabric,
    info: *mut Info,
    domain: *mut *mut FidDomain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return -FI_EBADFLAGS;
    }
    // SAFETY: passed on.
    unsafe { open(fabric, info, domain, context) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open domain, which is not used again if it closes.
    call(|| unsafe { object::take::<Domain, _>(fid).map(drop) })
}

unsafe extern "C" fn bind(fid: *mut Fid, to: *mut Fid, _flags: u64) -> c_int {
    // SAFETY: libfabric's contract: both are open.
    call(|| unsafe {
        let domain: &Domain = object::borrow(fid);
        let queue = object::downcast(to).ok_or(Code(FI_EINVAL))?;
        *domain.events.lock().unwrap() = Some(queue);
        Ok(())
    })
}
