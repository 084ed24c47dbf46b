//! Address vectors: the addresses that a program has inserted, by number.
//!
//! A vector has no connections. Several endpoints may share it, before and after they are enabled,
//! and each connects to an address when it first needs it.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use super::{ADDRESS_BYTES, Address, HostId, LocalId};
use crate::abi::*;
use crate::domain::Domain;
use crate::endpoint::EndpointCore;
use crate::guard::{self, FiError, call, number, unsupported};
use crate::object::{self, FidHeader, FidObject};
use crate::queue::EventQueue;

/// The location of an inserted address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AddressLocation {
    /// On this host, with this listening name.
    Local(String),
    /// On another host.
    Remote(Address),
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct AddressVector {
    header: FidHeader<FidAv>,
    domain: Arc<Domain>,
    /// Insertions are reported to the bound event queue.
    reports_events: bool,
    events: Mutex<Option<Arc<EventQueue>>>,
    addresses: RwLock<AddressTable>,
    /// An address of another host was inserted.
    has_remote: AtomicBool,
    /// The endpoints that use this vector.
    endpoints: Mutex<Vec<Weak<EndpointCore>>>,
}

// SAFETY: it begins with the header of an address vector, whose class this is.
unsafe impl FidObject for AddressVector {
    const CLASS: usize = FI_CLASS_AV;
}

/// Addresses by number. Numbers are never reused, so that endpoints can cache them.
#[derive(Debug, Default)]
struct AddressTable {
    by_number: Vec<Option<Address>>,
    numbers: HashMap<LocalId, u64>,
}

impl AddressTable {
    fn insert(&mut self, address: Address) -> u64 {
        let number = self.by_number.len() as u64;
        self.by_number.push(Some(address));
        // If an address is inserted twice, messages are reported with the first number.
        self.numbers.entry(address.id).or_insert(number);
        number
    }

    fn get(&self, number: u64) -> Option<Address> {
        *self.by_number.get(usize::try_from(number).ok()?)?
    }

    fn remove(&mut self, number: u64) -> Option<Address> {
        let address = self.by_number.get_mut(usize::try_from(number).ok()?)?.take()?;
        if self.numbers.get(&address.id) == Some(&number) {
            self.numbers.remove(&address.id);
            let other = self.by_number.iter().position(|other| *other == Some(address));
            other.map(|other| self.numbers.insert(address.id, other as u64));
        }
        Some(address)
    }
}

impl AddressVector {
    /// The location of the address with this number.
    pub(crate) fn location(&self, number: u64) -> Option<AddressLocation> {
        let address = self.addresses.read().unwrap().get(number)?;
        Some(if address.host == HostId::ours() {
            AddressLocation::Local(address.id.listening_name())
        } else {
            AddressLocation::Remote(address)
        })
    }

    /// The number of the endpoint with this identifier.
    pub(crate) fn number_of(&self, id: LocalId) -> Option<u64> {
        self.addresses.read().unwrap().numbers.get(&id).copied()
    }

    /// Reports removed numbers to an endpoint from now on.
    pub(crate) fn add(&self, core: &Arc<EndpointCore>) {
        let mut cores = self.endpoints.lock().unwrap();
        cores.retain(|known| known.strong_count() > 0);
        cores.push(Arc::downgrade(core));
        if self.has_remote.load(Ordering::Relaxed) {
            core.expect_remote();
        }
    }

    /// Records that an address of another host was inserted: the endpoints expect its messages.
    fn expect_remote(&self) {
        let cores = self.endpoints.lock().unwrap();
        if !self.has_remote.swap(true, Ordering::Relaxed) {
            cores.iter().filter_map(Weak::upgrade).for_each(|core| core.expect_remote());
        }
    }

    /// Removes the address of a number. Returns whether there was one.
    fn remove(&self, number: u64) -> bool {
        if self.addresses.write().unwrap().remove(number).is_none() {
            return false;
        }
        let cores = self.endpoints.lock().unwrap();
        cores.iter().filter_map(Weak::upgrade).for_each(|core| core.remove_peer(number));
        true
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    fn report_event(&self, event: u32, context: *mut c_void, data: u64, code: c_int) {
        let queue = self.events.lock().unwrap().clone();
        let Some(queue) = queue else { return };
        let fid = (&raw const *self).cast_mut().cast();
        if code == 0 {
            queue.push_entry(event, EqEntry { fid, context, data });
        } else {
            queue.push_error(EqErrEntry {
                fid,
                context,
                data,
                err: code,
                prov_errno: code,
                err_data: std::ptr::null_mut(),
                err_data_size: 0,
            });
        }
    }
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind,
    control: crate::fabric::no_control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

static OPS: OpsAv = OpsAv {
    size: size_of::<OpsAv>(),
    insert,
    // Host names do not identify endpoints: programs exchange addresses.
    insertsvc: unsupported,
    insertsym: unsupported,
    remove,
    lookup,
    straddr,
    av_set: unsupported,
};

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut AvAttr,
    av: *mut *mut FidAv,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open domain, attributes or null, space for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        if ![FI_AV_UNSPEC, FI_AV_MAP, FI_AV_TABLE].contains(&attr.r#type) {
            return Err(FiError(FI_EINVAL));
        }
        // A vector with a name is shared by processes.
        if !attr.name.is_null() || attr.flags & FI_READ != 0 {
            return Err(FiError(FI_ENOSYS));
        }
        let fid = Fid { fclass: FI_CLASS_AV, context, ops: &raw const FID_OPS };
        let vector = AddressVector {
            header: FidHeader::new(FidAv { fid, ops: &raw const OPS }),
            domain: object::share(domain),
            reports_events: attr.flags & FI_COMPLETION != 0,
            events: Mutex::default(),
            addresses: RwLock::default(),
            has_remote: AtomicBool::new(false),
            endpoints: Mutex::default(),
        };
        object::into_raw(Arc::new(vector), av)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open vector, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<AddressVector, _>(fid).map(drop) })
}

unsafe extern "C" fn bind(fid: *mut Fid, to: *mut Fid, _flags: u64) -> c_int {
    // SAFETY: libfabric's contract: both are open.
    call(|| unsafe {
        let vector: &AddressVector = object::borrow(fid);
        let queue = object::downcast(to).ok_or(FiError(FI_EINVAL))?;
        *vector.events.lock().unwrap() = Some(queue);
        Ok(())
    })
}

unsafe extern "C" fn insert(
    av: *mut FidAv,
    addresses: *const c_void,
    count: usize,
    numbers: *mut u64,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: `count` consecutive addresses, and as many numbers (or null),
    // and with FI_SYNC_ERR as many ints at the context.
    number(|| unsafe {
        let vector: &AddressVector = object::borrow(av);
        let has_queue = vector.events.lock().unwrap().is_some();
        if vector.reports_events && !has_queue {
            return Err(FiError(FI_ENOEQ));
        }
        if count > 0 && addresses.is_null() {
            return Err(FiError(FI_EINVAL));
        }
        let (mut inserted, mut is_remote) = (0, false);
        let mut table = vector.addresses.write().unwrap();
        for index in 0..count {
            let bytes = addresses.cast::<u8>().add(index * ADDRESS_BYTES);
            let address = Address::from_bytes(std::slice::from_raw_parts(bytes, ADDRESS_BYTES));
            is_remote |= address.is_some_and(|address| address.host != HostId::ours());
            let number = address.map_or(FI_ADDR_NOTAVAIL, |address| table.insert(address));
            if !numbers.is_null() {
                numbers.add(index).write(number);
            }
            let code = if address.is_some() { 0 } else { FI_EINVAL };
            if flags & FI_SYNC_ERR != 0 && !vector.reports_events {
                context.cast::<c_int>().add(index).write(code);
            } else if code != 0 && vector.reports_events {
                vector.report_event(FI_AV_COMPLETE, context, index as u64, code);
            }
            inserted += c_int::from(code == 0);
        }
        drop(table);
        if is_remote {
            vector.expect_remote();
        }
        if vector.reports_events {
            vector.report_event(FI_AV_COMPLETE, context, inserted as u64, 0);
            return Ok(0);
        }
        Ok(inserted)
    })
}

unsafe extern "C" fn remove(av: *mut FidAv, numbers: *mut u64, count: usize, _flags: u64) -> c_int {
    // SAFETY: libfabric's contract: an open vector, `count` numbers.
    call(|| unsafe {
        let vector: &AddressVector = object::borrow(av);
        if count > 0 && numbers.is_null() {
            return Err(FiError(FI_EINVAL));
        }
        let mut outcome = Ok(());
        for index in 0..count {
            if !vector.remove(*numbers.add(index)) {
                outcome = Err(FiError(FI_ENOENT));
            }
        }
        outcome
    })
}

unsafe extern "C" fn lookup(
    av: *mut FidAv,
    number: u64,
    address: *mut c_void,
    length: *mut usize,
) -> c_int {
    // SAFETY: libfabric's contract: an open vector, a length and memory of that length.
    call(|| unsafe {
        let vector: &AddressVector = object::borrow(av);
        let table = vector.addresses.read().unwrap();
        let bytes = table.get(number).ok_or(FiError(FI_EINVAL))?.to_bytes();
        let capacity = length.as_mut().ok_or(FiError(FI_EINVAL))?;
        copy_out(&bytes, address.cast(), *capacity);
        *capacity = bytes.len();
        Ok(())
    })
}

/// Copies at most `capacity` bytes.
///
/// # Safety
/// `to` must be valid for writes of `capacity` bytes, or null.
pub(crate) unsafe fn copy_out(bytes: &[u8], to: *mut u8, capacity: usize) {
    if !to.is_null() {
        // SAFETY: the caller guarantees `capacity` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len().min(capacity)) };
    }
}

unsafe extern "C" fn straddr(
    _av: *mut FidAv,
    address: *const c_void,
    buffer: *mut c_char,
    length: *mut usize,
) -> *const c_char {
    // SAFETY: libfabric's contract: an address, a length and memory of that length.
    let text = guard::protected(|| unsafe {
        let capacity = length.as_mut().ok_or(FiError(FI_EINVAL))?;
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), ADDRESS_BYTES);
        let text = Address::from_bytes(bytes).map_or("not an address".into(), |a| a.text());
        let text = CString::new(text).map_err(|_| FiError(FI_EINVAL))?;
        let whole = text.as_bytes_with_nul();
        copy_out(whole, buffer.cast(), *capacity);
        if !buffer.is_null() && *capacity > 0 && whole.len() > *capacity {
            buffer.add(*capacity - 1).write(0);
        }
        *capacity = whole.len();
        Ok(buffer.cast_const())
    });
    text.unwrap_or(std::ptr::null())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_up_and_are_not_used_again() {
        let mut table = AddressTable::default();
        let address = [(); 3].map(|()| Address::here(LocalId::random()));
        assert_eq!(address.map(|address| table.insert(address)), [0, 1, 2]);
        assert_eq!(table.remove(1), Some(address[1]));
        assert_eq!(table.remove(1), None);
        assert_eq!((table.get(1), table.get(9)), (None, None));
        assert_eq!(table.insert(address[1]), 3);
        assert_eq!(table.numbers[&address[1].id], 3);
    }

    #[test]
    fn an_address_that_is_there_twice_is_found_until_both_are_removed() {
        let mut table = AddressTable::default();
        let address = Address::here(LocalId::random());
        assert_eq!((table.insert(address), table.insert(address)), (0, 1));
        assert_eq!(table.numbers[&address.id], 0);
        table.remove(0);
        assert_eq!(table.numbers[&address.id], 1);
        table.remove(1);
        assert!(table.numbers.is_empty());
    }
}
