//! Domains: they open address vectors, queues, counters and endpoints.

use std::collections::HashSet;
use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::*;
use crate::endpoint::EndpointCore;
use crate::fabric::{Fabric, no_control};
use crate::guard::{FiError, Result, call, unsupported};
use crate::info::{DOMAIN_NAME, MR_BASIC};
use crate::mr::MrRange;
use crate::mr_table::MrTable;
use crate::object::{self, FidHeader, FidObject};
use crate::queue::EventQueue;
use crate::{address, endpoint, mr, queue};

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Domain {
    header: FidHeader<FidDomain>,
    /// A reference, so that the fabric is not closed first.
    _fabric: Arc<Fabric>,
    /// Automatic progress: messages make progress without calls of the program.
    auto_progress: bool,
    events: Mutex<Option<Arc<EventQueue>>>,
    /// The keys in use, and the endpoints that expose memory. Locked while memory is registered and
    /// closed.
    keys: Mutex<KeyTable>,
    /// The registered memory.
    mr_table: Arc<MrTable>,
    has_virtual_addresses: bool,
}

#[derive(Debug, Default)]
struct KeyTable {
    next_key: u64,
    /// The keys of all registrations, including those that cannot be closed yet.
    used: HashSet<u64>,
    endpoints: Vec<Weak<EndpointCore>>,
}

// SAFETY: it begins with the header of a domain, whose class this is.
unsafe impl FidObject for Domain {
    const CLASS: usize = FI_CLASS_DOMAIN;
}

impl Domain {
    pub(crate) fn auto_progress(&self) -> bool {
        self.auto_progress
    }

    /// Returns whether peers address memory by its virtual address, and not by the offset in the
    /// registration. The provider then chooses the keys.
    pub(crate) fn has_virtual_addresses(&self) -> bool {
        self.has_virtual_addresses
    }

    /// The memory that peers on other hosts may access.
    pub(crate) fn mr_table(&self) -> &Arc<MrTable> {
        &self.mr_table
    }

    /// Registers memory under a key, which the provider chooses if programs do not, and exposes it
    /// on all endpoints. Returns the key.
    ///
    /// # Safety
    /// The memory must stay valid until the key is released.
    pub(crate) unsafe fn register(&self, wanted: u64, region: MrRange) -> Result<u64> {
        let mut keys = self.keys.lock().unwrap();
        keys.next_key += 1;
        let key = if self.has_virtual_addresses { keys.next_key } else { wanted };
        if !keys.used.insert(key) {
            return Err(FiError(FI_ENOKEY));
        }
        for core in keys.live_endpoints() {
            // SAFETY: the caller guarantees it.
            if let Err(code) = unsafe { core.expose(key, &region) } {
                drop(keys);
                // If a peer already accesses the memory, the key stays in use.
                let _ = self.release_key(key);
                return Err(code);
            }
        }
        // SAFETY: the caller guarantees it.
        unsafe { self.mr_table.insert(key, region) };
        Ok(key)
    }

    /// Ends all access to the memory of a key. Fails while a peer still accesses it: then no other
    /// access can start, the key stays in use, and this must be called again.
    pub(crate) fn release_key(&self, key: u64) -> Result {
        let cores = {
            let keys = self.keys.lock().unwrap();
            // After this, no endpoint starts to expose it.
            self.mr_table.remove(key);
            keys.live_endpoints()
        };
        // Waits for peers without the lock.
        cores.iter().try_for_each(|core| core.withdraw(key))?;
        self.keys.lock().unwrap().used.remove(&key);
        Ok(())
    }

    /// Exposes all memory on an endpoint, including memory that is registered later.
    pub(crate) fn publish_on(&self, core: &Arc<EndpointCore>) -> Result {
        let mut keys = self.keys.lock().unwrap();
        for (key, region) in self.mr_table.list() {
            // SAFETY: the registering caller guarantees that it stays valid, and it is removed only
            // with the lock.
            unsafe { core.expose(key, &region) }?;
        }
        keys.endpoints.retain(|known| known.strong_count() > 0);
        keys.endpoints.push(Arc::downgrade(core));
        Ok(())
    }
}

impl KeyTable {
    fn live_endpoints(&self) -> Vec<Arc<EndpointCore>> {
        self.endpoints.iter().filter_map(Weak::upgrade).collect()
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
    query_atomic: endpoint::query_atomic,
    query_collective: unsupported,
    endpoint2: endpoint::open_with_flags,
};

pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    info: *mut Info,
    domain: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open fabric, an info of `getinfo`, space for a pointer.
    call(|| unsafe {
        let attr = info.as_ref().and_then(|info| info.domain_attr.as_ref());
        let attr = attr.ok_or(FiError(FI_EINVAL))?;
        if !attr.name.is_null() && CStr::from_ptr(attr.name) != DOMAIN_NAME {
            return Err(FiError(FI_EINVAL));
        }
        let fid = Fid { fclass: FI_CLASS_DOMAIN, context, ops: &raw const FID_OPS };
        let visible = FidDomain { fid, ops: &raw const OPS, mr: &raw const mr::OPS };
        let opened = Domain {
            header: FidHeader::new(visible),
            _fabric: object::share(fabric),
            auto_progress: attr.data_progress == FI_PROGRESS_AUTO,
            events: Mutex::default(),
            keys: Mutex::default(),
            mr_table: Arc::new(MrTable::new(attr.mr_mode == MR_BASIC)),
            has_virtual_addresses: attr.mr_mode == MR_BASIC,
        };
        object::into_raw(Arc::new(opened), domain)
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
    // SAFETY: the caller guarantees it.
    unsafe { open(fabric, info, domain, context) }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open domain, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<Domain, _>(fid).map(drop) })
}

unsafe extern "C" fn bind(fid: *mut Fid, to: *mut Fid, _flags: u64) -> c_int {
    // SAFETY: libfabric's contract: both are open.
    call(|| unsafe {
        let domain: &Domain = object::borrow(fid);
        let queue = object::downcast(to).ok_or(FiError(FI_EINVAL))?;
        *domain.events.lock().unwrap() = Some(queue);
        Ok(())
    })
}
