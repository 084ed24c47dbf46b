//! Completion queues. A program that reads one moves the messages of its endpoints on; what has
//! ended goes straight into the program's memory if nothing waits before it.
//!
//! Two locks: whoever holds `collector` asks the stations for reports, and `entries` is held just
//! long enough to put something in or take it out. The second is taken under the first, or alone.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::Report;

use super::entry::{Entry, Format};
use super::wait::{Sleep, WaitSet, deadline};
use super::words::say;
use crate::abi::*;
use crate::domain::Domain;
use crate::endpoint::Station;
use crate::fabric::no_bind;
use crate::guard::{Code, Result, call, count, unsupported};
use crate::object::{self, Object, Visible};

/// How long a thread looks before it sleeps.
const LOOK: Duration = Duration::from_micros(20);

#[derive(Debug)]
#[repr(C)]
pub(crate) struct CompletionQueue {
    visible: Visible<FidCq>,
    _domain: Arc<Domain>,
    format: Format,
    wait_object: c_int,
    collector: Mutex<Collector>,
    /// What has ended and is not read. It grows: programs ask for less than they need.
    entries: Mutex<VecDeque<Entry>>,
    /// How many entries there are, for those who look without the lock.
    waiting: AtomicUsize,
    is_signalled: AtomicBool,
    /// The last read found something.
    has_just_read: AtomicBool,
    sleep: Sleep,
}

#[derive(Debug, Default)]
struct Collector {
    stations: Vec<Arc<Station>>,
    /// Empty between calls; kept for its memory.
    reports: Vec<Report>,
}

// SAFETY: it begins with the visible part of a completion queue, whose class this is.
unsafe impl Object for CompletionQueue {
    const CLASS: usize = FI_CLASS_CQ;
}

/// The part of the program's memory that is not yet written.
struct Target {
    array: *mut c_void,
    count: usize,
    /// Where the senders go, or null.
    sources: *mut u64,
    written: usize,
}

impl Target {
    /// # Safety
    /// There must be room left, in the format.
    #[inline]
    unsafe fn write(&mut self, format: Format, entry: &Entry) {
        // SAFETY: the caller's promise.
        unsafe {
            format.write(entry, self.array, self.written);
            if !self.sources.is_null() {
                self.sources.add(self.written).write(entry.source);
            }
        }
        self.written += 1;
    }
}

impl CompletionQueue {
    /// Collects for a station from now on.
    pub(crate) fn add(&self, station: &Arc<Station>) -> Result {
        let mut collector = self.collector.lock().unwrap();
        if !collector.stations.iter().any(|known| Arc::ptr_eq(known, station)) {
            self.sleep.add(station)?;
            collector.stations.push(station.clone());
        }
        Ok(())
    }

    pub(crate) fn remove(&self, station: &Arc<Station>) {
        self.collector.lock().unwrap().stations.retain(|known| !Arc::ptr_eq(known, station));
        self.sleep.remove(station);
    }

    /// Puts an entry behind the others.
    pub(crate) fn push(&self, entry: Entry) {
        let mut entries = self.entries.lock().unwrap();
        entries.push_back(entry);
        self.waiting.store(entries.len(), Ordering::Release);
        let is_first = entries.len() == 1;
        drop(entries);
        if is_first {
            self.sleep.ring();
        }
    }

    /// Whether nothing waits, so that a program may sleep on the descriptor.
    pub(crate) fn prepare_to_wait(&self) -> Result<bool> {
        let set = self.wait_set()?;
        set.silence();
        self.collect(&mut self.collector.lock().unwrap(), &mut nowhere());
        let is_idle = self.waiting.load(Ordering::Acquire) == 0;
        if !is_idle || self.is_signalled.load(Ordering::Acquire) {
            // Whoever polls the descriptor nevertheless must see it.
            set.ring();
        }
        Ok(is_idle && self.rings())
    }

    /// Whether everything that is under way wakes whoever sleeps.
    fn rings(&self) -> bool {
        self.collector.lock().unwrap().stations.iter().all(|station| station.rings())
    }

    fn wait_set(&self) -> Result<&WaitSet> {
        // Stations come and go under the collector's lock.
        let collector = self.collector.lock().unwrap();
        self.sleep.set(&collector.stations)
    }

    /// Reads what has ended.
    ///
    /// # Safety
    /// `array` must be valid for `count` entries of the format; `sources` for as many numbers, or null.
    #[inline]
    unsafe fn read(&self, array: *mut c_void, count: usize, sources: *mut u64) -> Result<usize> {
        // MPI libraries read until there is nothing, and go on only then: the question behind an answer
        // is on the way of every message, and nothing has come since. The next one looks again.
        if self.has_just_read.load(Ordering::Relaxed) && self.waiting.load(Ordering::Acquire) == 0 {
            self.has_just_read.store(false, Ordering::Relaxed);
            return Err(Code(FI_EAGAIN));
        }
        let mut target = Target { array, count, sources, written: 0 };
        let mut collector = self.collector.lock().unwrap();
        if self.waiting.load(Ordering::Acquire) == 0 || count == 0 {
            self.collect(&mut collector, &mut target);
        }
        if target.written == 0 && self.waiting.load(Ordering::Acquire) > 0 {
            return self.take(&mut target);
        }
        self.has_just_read.store(target.written > 0, Ordering::Relaxed);
        if target.written == 0 { Err(Code(FI_EAGAIN)) } else { Ok(target.written) }
    }

    /// Asks all stations. What does not fit, or follows an error, is kept.
    #[inline]
    fn collect(&self, collector: &mut Collector, target: &mut Target) {
        let Collector { stations, reports } = collector;
        for station in stations {
            if !station.reports_to_one_queue() {
                station.progress();
                continue;
            }
            if !station.collect(reports) {
                continue;
            }
            for report in reports.drain(..) {
                let Some(mut entry) = station.settle(&report) else { continue };
                let is_direct = entry.code == 0
                    && target.written < target.count
                    && self.waiting.load(Ordering::Relaxed) == 0;
                if !is_direct || !target.sources.is_null() {
                    entry.source = station.source_of(&report);
                }
                if is_direct {
                    // SAFETY: there is room; the memory is that which `read` was promised.
                    unsafe { target.write(self.format, &entry) };
                } else {
                    self.push(entry);
                }
            }
        }
    }

    /// Takes what was kept, up to the next error.
    fn take(&self, target: &mut Target) -> Result<usize> {
        let mut entries = self.entries.lock().unwrap();
        while target.written < target.count
            && let Some(entry) = entries.front()
            && entry.code == 0
        {
            // SAFETY: there is room; the memory is that which `read` was promised.
            unsafe { target.write(self.format, entry) };
            entries.pop_front();
        }
        self.waiting.store(entries.len(), Ordering::Release);
        match entries.front() {
            Some(entry) if target.written == 0 && entry.code != 0 => Err(Code(FI_EAVAIL)),
            None if target.written == 0 => Err(Code(FI_EAGAIN)),
            _ => Ok(target.written),
        }
    }

    /// Takes the error that is first.
    fn take_error(&self) -> Result<Entry> {
        let mut entries = self.entries.lock().unwrap();
        if entries.front().is_none_or(|entry| entry.code == 0) {
            return Err(Code(FI_EAGAIN));
        }
        let entry = entries.pop_front().ok_or(Code(FI_EAGAIN))?;
        self.waiting.store(entries.len(), Ordering::Release);
        Ok(entry)
    }

    /// Reads, and waits if there is nothing.
    ///
    /// # Safety
    /// As for [`CompletionQueue::read`].
    unsafe fn read_waiting(
        &self,
        array: *mut c_void,
        count: usize,
        sources: *mut u64,
        timeout: c_int,
    ) -> Result<usize> {
        let (begin, end) = (Instant::now(), deadline(timeout));
        let mut sleeper = None;
        loop {
            // SAFETY: passed on.
            match unsafe { self.read(array, count, sources) } {
                Err(Code(FI_EAGAIN)) => {}
                outcome => return outcome,
            }
            let now = Instant::now();
            if self.is_signalled.swap(false, Ordering::AcqRel) || end.is_some_and(|end| end <= now)
            {
                return Err(Code(FI_EAGAIN));
            }
            if now - begin < LOOK {
                std::hint::spin_loop();
                continue;
            }
            let set = self.wait_set()?;
            match &sleeper {
                // What was there before the descriptor watched for it is read before the first sleep.
                None => sleeper = Some(set.sleeper()),
                Some(sleeper) => {
                    set.sleep(end, self.rings());
                    sleeper.wake();
                }
            }
        }
    }
}

/// For those who only want messages to move on.
fn nowhere() -> Target {
    Target { array: std::ptr::null_mut(), count: 0, sources: std::ptr::null_mut(), written: 0 }
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

static OPS: OpsCq =
    OpsCq { size: size_of::<OpsCq>(), read, readfrom, readerr, sread, sreadfrom, signal, strerror };

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut CqAttr,
    cq: *mut *mut FidCq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open domain, attributes or null, room for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(Code(FI_EINVAL))?;
        if ![FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD].contains(&attr.wait_obj) {
            return Err(Code(FI_ENOSYS));
        }
        let fid = Fid { fclass: FI_CLASS_CQ, context, ops: &raw const FID_OPS };
        let queue = CompletionQueue {
            visible: Visible::new(FidCq { fid, ops: &raw const OPS }),
            _domain: object::share(domain),
            format: Format::new(attr.format)?,
            wait_object: attr.wait_obj,
            collector: Mutex::default(),
            entries: Mutex::default(),
            waiting: AtomicUsize::new(0),
            is_signalled: AtomicBool::new(false),
            has_just_read: AtomicBool::new(false),
            sleep: Sleep::default(),
        };
        object::give(Arc::new(queue), cq)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open queue, which is not used again if it closes.
    call(|| unsafe { object::take::<CompletionQueue, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open queue, and room for what the command gives.
    call(|| unsafe {
        let queue: &CompletionQueue = object::borrow(fid);
        let given = match command {
            FI_GETWAIT if queue.wait_object == FI_WAIT_FD => queue.wait_set()?.descriptor(),
            FI_GETWAITOBJ => queue.wait_object,
            _ => return Err(Code(FI_ENOSYS)),
        };
        argument.cast::<c_int>().write(given);
        Ok(())
    })
}

unsafe extern "C" fn read(cq: *mut FidCq, array: *mut c_void, length: usize) -> isize {
    // SAFETY: libfabric's contract: an open queue, room for as many entries.
    count(|| unsafe {
        object::borrow::<CompletionQueue, _>(cq).read(array, length, std::ptr::null_mut())
    })
}

unsafe extern "C" fn readfrom(
    cq: *mut FidCq,
    array: *mut c_void,
    length: usize,
    sources: *mut u64,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, room for as many entries and senders.
    count(|| unsafe { object::borrow::<CompletionQueue, _>(cq).read(array, length, sources) })
}

unsafe extern "C" fn readerr(cq: *mut FidCq, buffer: *mut CqErrEntry, _flags: u64) -> isize {
    // SAFETY: libfabric's contract: an open queue, room for an entry of the program's version.
    count(|| unsafe {
        let entry = object::borrow::<CompletionQueue, _>(cq).take_error()?;
        // A program may have put memory for data of errors there, of which there is none.
        let error = CqErrEntry { err_data: (*buffer).err_data, ..entry.error() };
        buffer.write(error);
        Ok(1)
    })
}

unsafe extern "C" fn sread(
    cq: *mut FidCq,
    array: *mut c_void,
    length: usize,
    _condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, room for as many entries.
    count(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.read_waiting(array, length, std::ptr::null_mut(), timeout)
    })
}

unsafe extern "C" fn sreadfrom(
    cq: *mut FidCq,
    array: *mut c_void,
    length: usize,
    sources: *mut u64,
    _condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, room for as many entries and senders.
    count(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.read_waiting(array, length, sources, timeout)
    })
}

unsafe extern "C" fn signal(cq: *mut FidCq) -> c_int {
    // SAFETY: libfabric's contract: an open queue.
    call(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.is_signalled.store(true, Ordering::Release);
        queue.sleep.ring();
        Ok(())
    })
}

unsafe extern "C" fn strerror(
    _cq: *mut FidCq,
    code: c_int,
    _data: *const c_void,
    buffer: *mut c_char,
    length: usize,
) -> *const c_char {
    // SAFETY: libfabric's contract: room for as many bytes, or null.
    unsafe { say(code, buffer, length) }
}
