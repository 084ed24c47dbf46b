//! Completion queues. Reading a queue makes progress on the messages of its endpoints; completions
//! go directly into the program's memory if none is queued before them.
//!
//! There are two locks: the holder of `poller` polls the endpoints, and `entries` is held only to
//! push or pop an entry. `entries` is taken while holding `poller`, or alone.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{BufferReceived, CompletionEntry};
use memferry_sys::biased_mutex::BiasedMutex;

use super::entry::{CqFormat, QueuedCompletion, space_flag};
use super::error_text::copy_error_text;
use super::wait::{LazyWaitSet, WaitSet, deadline};
use crate::abi::*;
use crate::domain::Domain;
use crate::endpoint::EndpointCore;
use crate::fabric::no_bind;
use crate::guard::{FiError, Result, call, count, unsupported};
use crate::object::{self, FidHeader, FidObject};

/// How long a thread polls before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(20);

#[derive(Debug)]
#[repr(C)]
pub(crate) struct CompletionQueue {
    header: FidHeader<FidCq>,
    _domain: Arc<Domain>,
    format: CqFormat,
    wait_object: c_int,
    poller: BiasedMutex<CqPoller>,
    /// Completions that the program has not read. The queue grows, because programs request a
    /// smaller size than they need.
    entries: Mutex<VecDeque<QueuedCompletion>>,
    /// The number of entries, for reads without the lock.
    queued: AtomicUsize,
    is_signalled: AtomicBool,
    /// The last read returned entries.
    has_just_read: AtomicBool,
    wait_set: LazyWaitSet,
}

#[derive(Debug, Default)]
struct CqPoller {
    endpoints: Vec<Arc<EndpointCore>>,
    /// Empty between calls; kept for its allocation.
    completions: Vec<CompletionEntry>,
}

// SAFETY: it begins with the header of a completion queue, whose class this is.
unsafe impl FidObject for CompletionQueue {
    const CLASS: usize = FI_CLASS_CQ;
}

/// The part of the program's array that is not written yet.
struct UserEntries {
    array: *mut c_void,
    count: usize,
    /// The array of senders, or null.
    sources: *mut u64,
    written: usize,
}

impl UserEntries {
    /// The number of entries that fit.
    #[inline]
    fn room(&self) -> usize {
        self.count - self.written
    }

    /// # Safety
    /// The array must have space for another entry of the format.
    #[inline]
    unsafe fn write(&mut self, format: CqFormat, entry: &QueuedCompletion) {
        // SAFETY: the caller guarantees it.
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
    /// Adds an endpoint to poll.
    pub(crate) fn add(&self, core: &Arc<EndpointCore>) -> Result {
        let mut poller = self.poller.lock();
        if !poller.endpoints.iter().any(|known| Arc::ptr_eq(known, core)) {
            self.wait_set.add(core)?;
            poller.endpoints.push(core.clone());
        }
        Ok(())
    }

    pub(crate) fn remove(&self, core: &Arc<EndpointCore>) {
        self.poller.lock().endpoints.retain(|known| !Arc::ptr_eq(known, core));
        self.wait_set.remove(core);
    }

    /// Appends an entry.
    pub(crate) fn push(&self, entry: QueuedCompletion) {
        let mut entries = self.entries.lock().unwrap();
        entries.push_back(entry);
        self.queued.store(entries.len(), Ordering::Release);
        let is_first = entries.len() == 1;
        drop(entries);
        if is_first {
            self.wait_set.signal();
        }
    }

    /// Makes progress on the messages of all endpoints, and queues their completions.
    pub(crate) fn make_progress(&self) {
        self.poll_endpoints(&mut self.poller.lock(), &mut no_user_entries());
    }

    /// The number of entries that the program has not read.
    pub(crate) fn len(&self) -> usize {
        self.queued.load(Ordering::Acquire)
    }

    /// Returns whether no entry is queued, so that a program may wait for the descriptor.
    pub(crate) fn prepare_to_wait(&self) -> Result<bool> {
        let set = self.wait_set()?;
        set.clear();
        self.make_progress();
        let is_idle = self.queued.load(Ordering::Acquire) == 0;
        if !is_idle || self.is_signalled.load(Ordering::Acquire) {
            // A program that waits for the descriptor anyway must be woken.
            set.signal();
        }
        Ok(is_idle && self.can_block())
    }

    /// Returns whether everything in flight wakes a sleeping thread.
    fn can_block(&self) -> bool {
        self.poller.lock().endpoints.iter().all(|core| core.can_block())
    }

    fn wait_set(&self) -> Result<&WaitSet> {
        // Endpoints are added and removed with the poller's lock.
        let poller = self.poller.lock();
        self.wait_set.set(&poller.endpoints)
    }

    /// Reads completions.
    ///
    /// # Safety
    /// `array` must be valid for `count` entries of the format; `sources` for as many numbers, or
    /// null.
    #[inline(always)]
    unsafe fn read(&self, array: *mut c_void, count: usize, sources: *mut u64) -> Result<usize> {
        // MPI libraries read until the queue is empty, and continue only then: the second read is
        // on the critical path of every message, and nothing has completed since the first. It
        // returns without polling; the next read polls again.
        if self.has_just_read.load(Ordering::Relaxed) && self.queued.load(Ordering::Acquire) == 0 {
            self.has_just_read.store(false, Ordering::Relaxed);
            return Err(FiError(FI_EAGAIN));
        }
        let mut target = UserEntries { array, count, sources, written: 0 };
        let mut poller = self.poller.lock();
        if self.queued.load(Ordering::Acquire) == 0 || count == 0 {
            self.poll_endpoints(&mut poller, &mut target);
        }
        if target.written == 0 && self.queued.load(Ordering::Acquire) > 0 {
            return self.take_queued(&mut target);
        }
        self.has_just_read.store(target.written > 0, Ordering::Relaxed);
        if target.written == 0 { Err(FiError(FI_EAGAIN)) } else { Ok(target.written) }
    }

    /// Polls all endpoints. Entries that do not fit, or follow an error, are queued.
    #[inline]
    fn poll_endpoints(&self, poller: &mut CqPoller, target: &mut UserEntries) {
        let CqPoller { endpoints: cores, completions: reports } = poller;
        for core in cores {
            if !core.has_single_queue() {
                core.progress();
                continue;
            }
            // The senders of messages can be found only outside of the endpoint.
            let is_empty = self.queued.load(Ordering::Relaxed) == 0;
            let room = if is_empty && target.sources.is_null() { target.room() } else { 0 };
            let has_reports = core.poll_received(reports, room, |received| {
                // SAFETY: there is space, and the caller of `read` guarantees the memory.
                unsafe { target.write(self.format, &received_entry(&received)) };
            });
            if !has_reports {
                core.return_owed_credits();
                continue;
            }
            for report in reports.drain(..) {
                let Some((_, mut entry)) = core.complete(&report) else { continue };
                let is_direct = entry.code == 0
                    && target.written < target.count
                    && self.queued.load(Ordering::Relaxed) == 0;
                if !is_direct || !target.sources.is_null() {
                    entry.source = core.source_of(&report);
                }
                if is_direct {
                    // SAFETY: there is space, and the caller of `read` guarantees the memory.
                    unsafe { target.write(self.format, &entry) };
                } else {
                    self.push(entry);
                }
            }
        }
    }

    /// Takes queued entries, up to the next error.
    fn take_queued(&self, target: &mut UserEntries) -> Result<usize> {
        let mut entries = self.entries.lock().unwrap();
        while target.written < target.count
            && let Some(entry) = entries.front()
            && entry.code == 0
        {
            // SAFETY: there is space, and the caller of `read` guarantees the memory.
            unsafe { target.write(self.format, entry) };
            entries.pop_front();
        }
        self.queued.store(entries.len(), Ordering::Release);
        match entries.front() {
            Some(entry) if target.written == 0 && entry.code != 0 => Err(FiError(FI_EAVAIL)),
            None if target.written == 0 => Err(FiError(FI_EAGAIN)),
            _ => Ok(target.written),
        }
    }

    /// Takes the error at the front.
    fn take_error(&self) -> Result<QueuedCompletion> {
        let mut entries = self.entries.lock().unwrap();
        if entries.front().is_none_or(|entry| entry.code == 0) {
            return Err(FiError(FI_EAGAIN));
        }
        let entry = entries.pop_front().ok_or(FiError(FI_EAGAIN))?;
        self.queued.store(entries.len(), Ordering::Release);
        Ok(entry)
    }

    /// Reads, and waits if there is no entry.
    ///
    /// # Safety
    /// As for [`CompletionQueue::read`].
    unsafe fn read_blocking(
        &self,
        array: *mut c_void,
        count: usize,
        sources: *mut u64,
        timeout: c_int,
    ) -> Result<usize> {
        let (started, end) = (Instant::now(), deadline(timeout));
        let mut sleeper = None;
        loop {
            // SAFETY: the caller guarantees it.
            match unsafe { self.read(array, count, sources) } {
                Err(FiError(FI_EAGAIN)) => {}
                outcome => return outcome,
            }
            let now = Instant::now();
            if self.is_signalled.swap(false, Ordering::AcqRel) || end.is_some_and(|end| end <= now)
            {
                return Err(FiError(FI_EAGAIN));
            }
            if now - started < SPIN_TIME {
                std::hint::spin_loop();
                continue;
            }
            let set = self.wait_set()?;
            match &sleeper {
                // Completions from before the descriptor was armed are read before the first sleep.
                None => sleeper = Some(set.sleeper()),
                Some(sleeper) => {
                    set.sleep(end, self.can_block());
                    sleeper.wake();
                }
            }
        }
    }
}

/// The entry of a message for a posted buffer.
#[inline]
fn received_entry(received: &BufferReceived) -> QueuedCompletion {
    let BufferReceived { context, envelope, length, address, .. } = *received;
    let mut entry = QueuedCompletion::new(context, space_flag(envelope.space) | FI_RECV);
    (entry.tag, entry.length, entry.buffer) = (envelope.tag, length, address.cast());
    if let Some(data) = envelope.data {
        entry.flags |= FI_REMOTE_CQ_DATA;
        entry.data = data;
    }
    entry
}

/// An empty array, for calls that only make progress.
fn no_user_entries() -> UserEntries {
    UserEntries { array: std::ptr::null_mut(), count: 0, sources: std::ptr::null_mut(), written: 0 }
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
    // SAFETY: libfabric's contract: an open domain, attributes or null, space for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        if ![FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD].contains(&attr.wait_obj) {
            return Err(FiError(FI_ENOSYS));
        }
        let fid = Fid { fclass: FI_CLASS_CQ, context, ops: &raw const FID_OPS };
        let queue = CompletionQueue {
            header: FidHeader::new(FidCq { fid, ops: &raw const OPS }),
            _domain: object::share(domain),
            format: CqFormat::new(attr.format)?,
            wait_object: attr.wait_obj,
            poller: BiasedMutex::new(CqPoller::default()),
            entries: Mutex::default(),
            queued: AtomicUsize::new(0),
            is_signalled: AtomicBool::new(false),
            has_just_read: AtomicBool::new(false),
            wait_set: LazyWaitSet::default(),
        };
        object::into_raw(Arc::new(queue), cq)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open queue, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<CompletionQueue, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open queue, and space for the result of the command.
    call(|| unsafe {
        let queue: &CompletionQueue = object::borrow(fid);
        let result = match command {
            FI_GETWAIT if queue.wait_object == FI_WAIT_FD => queue.wait_set()?.descriptor(),
            FI_GETWAITOBJ => queue.wait_object,
            _ => return Err(FiError(FI_ENOSYS)),
        };
        argument.cast::<c_int>().write(result);
        Ok(())
    })
}

unsafe extern "C" fn read(cq: *mut FidCq, array: *mut c_void, length: usize) -> isize {
    // SAFETY: libfabric's contract: an open queue, space for `length` entries.
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
    // SAFETY: libfabric's contract: an open queue, space for `length` entries and senders.
    count(|| unsafe { object::borrow::<CompletionQueue, _>(cq).read(array, length, sources) })
}

unsafe extern "C" fn readerr(cq: *mut FidCq, buffer: *mut CqErrEntry, _flags: u64) -> isize {
    // SAFETY: libfabric's contract: an open queue, space for an entry of the program's version.
    count(|| unsafe {
        let entry = object::borrow::<CompletionQueue, _>(cq).take_error()?;
        // The program may have set memory for error data, of which there is none.
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
    // SAFETY: libfabric's contract: an open queue, space for `length` entries.
    count(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.read_blocking(array, length, std::ptr::null_mut(), timeout)
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
    // SAFETY: libfabric's contract: an open queue, space for `length` entries and senders.
    count(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.read_blocking(array, length, sources, timeout)
    })
}

unsafe extern "C" fn signal(cq: *mut FidCq) -> c_int {
    // SAFETY: libfabric's contract: an open queue.
    call(|| unsafe {
        let queue: &CompletionQueue = object::borrow(cq);
        queue.is_signalled.store(true, Ordering::Release);
        queue.wait_set.signal();
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
    // SAFETY: libfabric's contract: space for `length` bytes, or null.
    unsafe { copy_error_text(code, buffer, length) }
}
