//! Event queues: events that are not messages. Address vectors and programs write to them.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;

use super::error_text::copy_error_text;
use super::wait::deadline;
use crate::abi::*;
use crate::fabric::{Fabric, no_bind};
use crate::guard::{FiError, Result, call, count, unsupported};
use crate::object::{self, FidHeader, FidObject};

/// The maximum number of queued events.
const MAX_EVENTS: usize = 1 << 20;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventQueue {
    header: FidHeader<FidEq>,
    _fabric: Arc<Fabric>,
    /// Whether programs may write to it.
    is_writable: bool,
    events: Mutex<VecDeque<EqEvent>>,
    arrived: Condvar,
    /// Readable while there is an event, if the program requested a descriptor.
    event_fd: Option<EventFd>,
}

// SAFETY: it begins with the header of an event queue, whose class this is.
unsafe impl FidObject for EventQueue {
    const CLASS: usize = FI_CLASS_EQ;
}

#[derive(Debug)]
enum EqEvent {
    /// The event number, and the bytes of its entry.
    Entry(u32, Vec<u8>),
    Error(EqErrEntry),
}

// SAFETY: the pointers inside belong to the program, which alone dereferences them.
unsafe impl Send for EqEvent {}

impl EventQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.lock().unwrap().is_empty()
    }

    pub(crate) fn push_entry(&self, event: u32, entry: EqEntry) {
        // SAFETY: an entry is three words without padding.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const entry).cast::<u8>(), size_of::<EqEntry>())
        };
        self.push(EqEvent::Entry(event, bytes.to_vec()));
    }

    pub(crate) fn push_error(&self, error: EqErrEntry) {
        self.push(EqEvent::Error(error));
    }

    fn push(&self, event: EqEvent) {
        let mut events = self.events.lock().unwrap();
        if events.is_empty()
            && let Some(event_fd) = &self.event_fd
        {
            event_fd.signal();
        }
        events.push_back(event);
        drop(events);
        self.arrived.notify_all();
    }

    fn pop(&self, events: &mut VecDeque<EqEvent>) -> Option<EqEvent> {
        let event = events.pop_front();
        if events.is_empty()
            && let Some(event_fd) = &self.event_fd
        {
            event_fd.drain();
        }
        event
    }

    /// Reads or peeks the first event.
    ///
    /// # Safety
    /// `number` must be valid for a write, `buffer` for `length` bytes.
    unsafe fn read(
        &self,
        events: &mut VecDeque<EqEvent>,
        number: *mut u32,
        buffer: *mut c_void,
        length: usize,
        flags: u64,
    ) -> Result<usize> {
        match events.front() {
            None => Err(FiError(FI_EAGAIN)),
            Some(EqEvent::Error(_)) => Err(FiError(FI_EAVAIL)),
            Some(EqEvent::Entry(_, bytes)) if bytes.len() > length => Err(FiError(FI_ETOOSMALL)),
            Some(EqEvent::Entry(event, bytes)) => {
                // SAFETY: the caller guarantees it; the length was checked.
                unsafe {
                    number.write(*event);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len());
                }
                let read = bytes.len();
                if flags & FI_PEEK == 0 {
                    self.pop(events);
                }
                Ok(read)
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

static OPS: OpsEq = OpsEq { size: size_of::<OpsEq>(), read, readerr, write, sread, strerror };

pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    attr: *mut EqAttr,
    eq: *mut *mut FidEq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's contract: an open fabric, attributes or null, space for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(FiError(FI_EINVAL))?;
        let event_fd = match attr.wait_obj {
            FI_WAIT_NONE | FI_WAIT_UNSPEC | FI_WAIT_YIELD => None,
            FI_WAIT_FD => Some(EventFd::new()?),
            _ => return Err(FiError(FI_ENOSYS)),
        };
        let fid = Fid { fclass: FI_CLASS_EQ, context, ops: &raw const FID_OPS };
        let queue = EventQueue {
            header: FidHeader::new(FidEq { fid, ops: &raw const OPS }),
            _fabric: object::share(fabric),
            is_writable: attr.flags & FI_WRITE != 0,
            events: Mutex::default(),
            arrived: Condvar::new(),
            event_fd,
        };
        object::into_raw(Arc::new(queue), eq)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open queue, which the program does not use again after a
    // success.
    call(|| unsafe { object::from_raw::<EventQueue, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open queue, and space for a descriptor.
    call(|| unsafe {
        let queue: &EventQueue = object::borrow(fid);
        match (command, &queue.event_fd) {
            (FI_GETWAIT, Some(event_fd)) => {
                argument.cast::<c_int>().write(event_fd.as_fd().as_raw_fd());
                Ok(())
            }
            _ => Err(FiError(FI_ENOSYS)),
        }
    })
}

unsafe extern "C" fn read(
    eq: *mut FidEq,
    event: *mut u32,
    buffer: *mut c_void,
    length: usize,
    flags: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, space for a number and for `length` bytes.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        queue.read(&mut queue.events.lock().unwrap(), event, buffer, length, flags)
    })
}

unsafe extern "C" fn sread(
    eq: *mut FidEq,
    event: *mut u32,
    buffer: *mut c_void,
    length: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, space for a number and for `length` bytes.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        let end = deadline(timeout);
        let mut events = queue.events.lock().unwrap();
        while events.is_empty() {
            let left = end.map_or(Duration::from_secs(60), |end| end - Instant::now().min(end));
            if left.is_zero() {
                break;
            }
            events = queue.arrived.wait_timeout(events, left).unwrap().0;
        }
        queue.read(&mut events, event, buffer, length, flags)
    })
}

unsafe extern "C" fn readerr(eq: *mut FidEq, buffer: *mut EqErrEntry, flags: u64) -> isize {
    // SAFETY: libfabric's contract: an open queue, space for an entry.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        let mut events = queue.events.lock().unwrap();
        let Some(EqEvent::Error(error)) = events.front() else { return Err(FiError(FI_EAGAIN)) };
        buffer.write(*error);
        if flags & FI_PEEK == 0 {
            queue.pop(&mut events);
        }
        Ok(size_of::<EqErrEntry>())
    })
}

unsafe extern "C" fn write(
    eq: *mut FidEq,
    event: u32,
    buffer: *const c_void,
    length: usize,
    _flags: u64,
) -> isize {
    // SAFETY: libfabric's contract: an open queue, `length` bytes.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        if !queue.is_writable || (buffer.is_null() && length > 0) {
            return Err(FiError(FI_EINVAL));
        }
        if queue.events.lock().unwrap().len() >= MAX_EVENTS {
            return Err(FiError(FI_EAGAIN));
        }
        let bytes = match length {
            0 => Vec::new(),
            _ => std::slice::from_raw_parts(buffer.cast::<u8>(), length).to_vec(),
        };
        queue.push(EqEvent::Entry(event, bytes));
        Ok(length)
    })
}

unsafe extern "C" fn strerror(
    _eq: *mut FidEq,
    code: c_int,
    _data: *const c_void,
    buffer: *mut c_char,
    length: usize,
) -> *const c_char {
    // SAFETY: libfabric's contract: space for `length` bytes, or null.
    unsafe { copy_error_text(code, buffer, length) }
}
