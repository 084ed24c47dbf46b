//! Counters: how many operations have ended, well and badly.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::wait::{Sleep, WaitSet, deadline};
use crate::abi::*;
use crate::domain::Domain;
use crate::endpoint::Station;
use crate::fabric::no_bind;
use crate::guard::{Code, Result, call, protected, unsupported};
use crate::object::{self, Object, Visible};

/// How long a thread looks before it sleeps.
const LOOK: Duration = Duration::from_micros(20);

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Counter {
    visible: Visible<FidCntr>,
    _domain: Arc<Domain>,
    wait_object: c_int,
    value: AtomicU64,
    errors: AtomicU64,
    stations: Mutex<Vec<Arc<Station>>>,
    sleep: Sleep,
}

// SAFETY: it begins with the visible part of a counter, whose class this is.
unsafe impl Object for Counter {
    const CLASS: usize = FI_CLASS_CNTR;
}

impl Counter {
    /// Counts for a station from now on.
    pub(crate) fn add(&self, station: &Arc<Station>) -> Result {
        let mut stations = self.stations.lock().unwrap();
        if !stations.iter().any(|known| Arc::ptr_eq(known, station)) {
            self.sleep.add(station)?;
            stations.push(station.clone());
        }
        Ok(())
    }

    pub(crate) fn remove(&self, station: &Arc<Station>) {
        self.stations.lock().unwrap().retain(|known| !Arc::ptr_eq(known, station));
        self.sleep.remove(station);
    }

    /// Counts an operation that has ended.
    pub(crate) fn count(&self, is_well: bool) {
        let counted = if is_well { &self.value } else { &self.errors };
        counted.fetch_add(1, Ordering::AcqRel);
        self.sleep.ring();
    }

    /// Whether a program may sleep on the descriptor: it has read what the counter says now.
    pub(crate) fn prepare_to_wait(&self) -> Result<bool> {
        let set = self.wait_set()?;
        set.silence();
        let before = self.both();
        self.progress();
        Ok(self.both() == before && self.rings())
    }

    /// Whether everything that is under way wakes whoever sleeps.
    fn rings(&self) -> bool {
        self.stations.lock().unwrap().iter().all(|station| station.rings())
    }

    fn both(&self) -> (u64, u64) {
        (self.value.load(Ordering::Acquire), self.errors.load(Ordering::Acquire))
    }

    fn progress(&self) {
        self.stations.lock().unwrap().iter().for_each(|station| station.progress());
    }

    fn wait_set(&self) -> Result<&WaitSet> {
        self.sleep.set(&self.stations.lock().unwrap())
    }

    /// Waits until the counter has reached the threshold, or an error is counted.
    fn wait(&self, threshold: u64, timeout: c_int) -> Result {
        let (begin, end) = (Instant::now(), deadline(timeout));
        let errors = self.errors.load(Ordering::Acquire);
        let mut sleeper = None;
        loop {
            self.progress();
            let (value, errors_now) = self.both();
            let now = Instant::now();
            if value >= threshold {
                return Ok(());
            }
            if errors_now != errors {
                return Err(Code(FI_EAVAIL));
            }
            if end.is_some_and(|end| end <= now) {
                return Err(Code(FI_ETIMEDOUT));
            }
            if now - begin < LOOK {
                std::hint::spin_loop();
                continue;
            }
            let set = self.wait_set()?;
            match &sleeper {
                None => sleeper = Some(set.sleeper()),
                Some(sleeper) => {
                    set.sleep(end, self.rings());
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
    // SAFETY: libfabric's contract: an open domain, attributes or null, room for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(Code(FI_EINVAL))?;
        if ![FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD].contains(&attr.wait_obj)
            || attr.events != FI_CNTR_EVENTS_COMP
        {
            return Err(Code(FI_ENOSYS));
        }
        let fid = Fid { fclass: FI_CLASS_CNTR, context, ops: &raw const FID_OPS };
        let counter = Counter {
            visible: Visible::new(FidCntr { fid, ops: &raw const OPS }),
            _domain: object::share(domain),
            wait_object: attr.wait_obj,
            value: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            stations: Mutex::default(),
            sleep: Sleep::default(),
        };
        object::give(Arc::new(counter), cntr)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open counter, which is not used again if it closes.
    call(|| unsafe { object::take::<Counter, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open counter, and room for what the command gives.
    call(|| unsafe {
        let counter: &Counter = object::borrow(fid);
        let given = match command {
            FI_GETWAIT if counter.wait_object == FI_WAIT_FD => counter.wait_set()?.descriptor(),
            FI_GETWAITOBJ => counter.wait_object,
            _ => return Err(Code(FI_ENOSYS)),
        };
        argument.cast::<c_int>().write(given);
        Ok(())
    })
}

/// What one of the two says after messages have moved on.
///
/// # Safety
/// The counter must be open.
unsafe fn look(cntr: *mut FidCntr, which: impl FnOnce(&Counter) -> &AtomicU64) -> u64 {
    let value = protected(|| {
        // SAFETY: the caller's promise.
        let counter: &Counter = unsafe { object::borrow(cntr) };
        counter.progress();
        Ok(which(counter).load(Ordering::Acquire))
    });
    value.unwrap_or(0)
}

/// Changes one of the two, and wakes whoever waits for it.
///
/// # Safety
/// The counter must be open.
unsafe fn change(cntr: *mut FidCntr, change: impl FnOnce(&Counter)) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let counter: &Counter = unsafe { object::borrow(cntr) };
        change(counter);
        counter.sleep.ring();
        Ok(())
    })
}

unsafe extern "C" fn read(cntr: *mut FidCntr) -> u64 {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { look(cntr, |counter| &counter.value) }
}

unsafe extern "C" fn readerr(cntr: *mut FidCntr) -> u64 {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { look(cntr, |counter| &counter.errors) }
}

unsafe extern "C" fn add(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { change(cntr, |counter| _ = counter.value.fetch_add(value, Ordering::AcqRel)) }
}

unsafe extern "C" fn set(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { change(cntr, |counter| counter.value.store(value, Ordering::Release)) }
}

unsafe extern "C" fn adderr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { change(cntr, |counter| _ = counter.errors.fetch_add(value, Ordering::AcqRel)) }
}

unsafe extern "C" fn seterr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    unsafe { change(cntr, |counter| counter.errors.store(value, Ordering::Release)) }
}

unsafe extern "C" fn wait(cntr: *mut FidCntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: libfabric's contract: an open counter.
    call(|| unsafe { object::borrow::<Counter, _>(cntr) }.wait(threshold, timeout))
}
