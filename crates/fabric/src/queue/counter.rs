//! Counters of completed operations, successful and failed.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::wait::{LazyWaitSet, WaitSet, deadline};
use crate::abi::*;
use crate::domain::Domain;
use crate::endpoint::EndpointCore;
use crate::fabric::no_bind;
use crate::guard::{FiError, Result, call, protected, unsupported};
use crate::object::{self, FidHeader, FidObject};

/// How long a thread polls before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(20);

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Counter {
    header: FidHeader<FidCntr>,
    _domain: Arc<Domain>,
    wait_object: c_int,
    value: AtomicU64,
    errors: AtomicU64,
    endpoints: Mutex<Vec<Arc<EndpointCore>>>,
    wait_set: LazyWaitSet,
}

// SAFETY: it begins with the header of a counter, whose class this is.
unsafe impl FidObject for Counter {
    const CLASS: usize = FI_CLASS_CNTR;
}

impl Counter {
    /// Adds an endpoint to count.
    pub(crate) fn add(&self, core: &Arc<EndpointCore>) -> Result {
        let mut cores = self.endpoints.lock().unwrap();
        if !cores.iter().any(|known| Arc::ptr_eq(known, core)) {
            self.wait_set.add(core)?;
            cores.push(core.clone());
        }
        Ok(())
    }

    pub(crate) fn remove(&self, core: &Arc<EndpointCore>) {
        self.endpoints.lock().unwrap().retain(|known| !Arc::ptr_eq(known, core));
        self.wait_set.remove(core);
    }

    /// Counts a completed operation.
    pub(crate) fn count(&self, succeeded: bool) {
        let counted = if succeeded { &self.value } else { &self.errors };
        counted.fetch_add(1, Ordering::AcqRel);
        self.wait_set.signal();
    }

    /// Returns whether a program may wait for the descriptor: it has read the current value.
    pub(crate) fn prepare_to_wait(&self) -> Result<bool> {
        let set = self.wait_set()?;
        set.clear();
        let before = self.load_both();
        self.progress();
        Ok(self.load_both() == before && self.can_block())
    }

    /// Returns whether everything in flight wakes a sleeping thread.
    fn can_block(&self) -> bool {
        self.endpoints.lock().unwrap().iter().all(|core| core.can_block())
    }

    fn load_both(&self) -> (u64, u64) {
        (self.value.load(Ordering::Acquire), self.errors.load(Ordering::Acquire))
    }

    fn progress(&self) {
        self.endpoints.lock().unwrap().iter().for_each(|core| core.progress());
    }

    fn wait_set(&self) -> Result<&WaitSet> {
        self.wait_set.set(&self.endpoints.lock().unwrap())
    }

    /// Waits until the counter has reached the threshold, or an error is counted.
    fn wait(&self, threshold: u64, timeout: c_int) -> Result {
        let (started, end) = (Instant::now(), deadline(timeout));
        let errors = self.errors.load(Ordering::Acquire);
        let mut sleeper = None;
        loop {
            self.progress();
            let (value, errors_now) = self.load_both();
            let now = Instant::now();
            if value >= threshold {
                return Ok(());
            }
            if errors_now != errors {
                return Err(FiError(FI_EAVAIL));
            }
            if end.is_some_and(|end| end <= now) {
                return Err(FiError(FI_ETIMEDOUT));
            }
            if now - started < SPIN_TIME {
                std::hint::spin_loop();
                continue;
            }
            let set = self.wait_set()?;
            match &sleeper {
                None => sleeper = Some(set.sleeper()),
                Some(sleeper) => {
                    set.sleep(end, self.can_block());
                    sleeper.wake();
                }
            }
        }
    }
}

static FID_OPS: Ops = Ops {
    size: size_of::<Ops>(),
    close,
    bind: no_bind,
    control,
    ops_open: unsupported,
    tostr: unsupported,
    ops_set: unsupported,
};

static OPS: OpsCntr =
    OpsCntr { size: size_of::<OpsCntr>(), read, readerr, add, set, wait, adderr, seterr };

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut CntrAttr,
    cntr: *mut *mut FidCntr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open domain, attributes or null, space for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        if ![FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD].contains(&attr.wait_obj)
            || attr.events != FI_CNTR_EVENTS_COMP
        {
            return Err(FiError(FI_ENOSYS));
        }
        let fid = Fid { fclass: FI_CLASS_CNTR, context, ops: &raw const FID_OPS };
        let counter = Counter {
            header: FidHeader::new(FidCntr { fid, ops: &raw const OPS }),
            _domain: object::share(domain),
            wait_object: attr.wait_obj,
            value: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            endpoints: Mutex::default(),
            wait_set: LazyWaitSet::default(),
        };
        object::into_raw(Arc::new(counter), cntr)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open counter, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<Counter, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open counter, and space for the result of the command.
    call(|| unsafe {
        let counter: &Counter = object::borrow(fid);
        let result = match command {
            FI_GETWAIT if counter.wait_object == FI_WAIT_FD => counter.wait_set()?.descriptor(),
            FI_GETWAITOBJ => counter.wait_object,
            _ => return Err(FiError(FI_ENOSYS)),
        };
        argument.cast::<c_int>().write(result);
        Ok(())
    })
}

/// Makes progress and loads one of the two values.
///
/// # Safety
/// The counter must be open.
unsafe fn progress_and_load(cntr: *mut FidCntr, which: impl FnOnce(&Counter) -> &AtomicU64) -> u64 {
    let value = protected(|| {
        // SAFETY: the caller guarantees it.
        let counter: &Counter = unsafe { object::borrow(cntr) };
        counter.progress();
        Ok(which(counter).load(Ordering::Acquire))
    });
    value.unwrap_or(0)
}

/// Changes one of the two values, and wakes its waiters.
///
/// # Safety
/// The counter must be open.
unsafe fn update(cntr: *mut FidCntr, change: impl FnOnce(&Counter)) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let counter: &Counter = unsafe { object::borrow(cntr) };
        change(counter);
        counter.wait_set.signal();
        Ok(())
    })
}

unsafe extern "C" fn read(cntr: *mut FidCntr) -> u64 {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { progress_and_load(cntr, |counter| &counter.value) }
}

unsafe extern "C" fn readerr(cntr: *mut FidCntr) -> u64 {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { progress_and_load(cntr, |counter| &counter.errors) }
}

unsafe extern "C" fn add(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { update(cntr, |counter| _ = counter.value.fetch_add(value, Ordering::AcqRel)) }
}

unsafe extern "C" fn set(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { update(cntr, |counter| counter.value.store(value, Ordering::Release)) }
}

unsafe extern "C" fn adderr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { update(cntr, |counter| _ = counter.errors.fetch_add(value, Ordering::AcqRel)) }
}

unsafe extern "C" fn seterr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { update(cntr, |counter| counter.errors.store(value, Ordering::Release)) }
}

unsafe extern "C" fn wait(cntr: *mut FidCntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    call(|| unsafe { object::borrow::<Counter, _>(cntr) }.wait(threshold, timeout))
}
