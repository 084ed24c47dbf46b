//! Event queues: what is not a message. Address vectors put events there, and programs themselves.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;

use super::wait::deadline;
use super::words::say;
use crate::abi::*;
use crate::fabric::{Fabric, no_bind};
use crate::guard::{Code, Result, call, count, unsupported};
use crate::object::{self, Object, Visible};

/// What a program may wait with: the queue grows, but not for ever.
const MOST_EVENTS: usize = 1 << 20;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventQueue {
    visible: Visible<FidEq>,
    _fabric: Arc<Fabric>,
    /// Whether programs may write to it.
    is_writable: bool,
    events: Mutex<VecDeque<Event>>,
    arrived: Condvar,
    /// Readable while there is an event, where that was asked for.
    bell: Option<EventFd>,
}

// SAFETY: it begins with the visible part of an event queue, whose class this is.
unsafe impl Object for EventQueue {
    const CLASS: usize = FI_CLASS_EQ;
}

#[derive(Debug)]
enum Event {
    /// A number, and what a program reads with it.
    Plain(u32, Vec<u8>),
    Error(EqErrEntry),
}

// SAFETY: the pointers inside belong to the program, which alone follows them.
unsafe impl Send for Event {}

impl EventQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.lock().unwrap().is_empty()
    }

    pub(crate) fn push_entry(&self, event: u32, entry: EqEntry) {
        // SAFETY: an entry is three words without gaps.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const entry).cast::<u8>(), size_of::<EqEntry>())
        };
        self.push(Event::Plain(event, bytes.to_vec()));
    }

    pub(crate) fn push_error(&self, error: EqErrEntry) {
        self.push(Event::Error(error));
    }

    fn push(&self, event: Event) {
        let mut events = self.events.lock().unwrap();
        if events.is_empty()
            && let Some(bell) = &self.bell
        {
            bell.signal();
        }
        events.push_back(event);
        drop(events);
        self.arrived.notify_all();
    }

    fn pop(&self, events: &mut VecDeque<Event>) -> Option<Event> {
        let event = events.pop_front();
        if events.is_empty()
            && let Some(bell) = &self.bell
        {
            bell.drain();
        }
        event
    }

    /// Reads the first event, or looks at it.
    ///
    /// # Safety
    /// `number` must be valid for a write, `buffer` for `length` bytes.
    unsafe fn read(
        &self,
        events: &mut VecDeque<Event>,
        number: *mut u32,
        buffer: *mut c_void,
        length: usize,
        flags: u64,
    ) -> Result<usize> {
        match events.front() {
            None => Err(Code(FI_EAGAIN)),
            Some(Event::Error(_)) => Err(Code(FI_EAVAIL)),
            Some(Event::Plain(_, bytes)) if bytes.len() > length => Err(Code(FI_ETOOSMALL)),
            Some(Event::Plain(event, bytes)) => {
                // SAFETY: the caller's promise; the length was checked.
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
    // SAFETY: libfabric's contract: an open fabric, attributes or null, room for a pointer.
    call(|| unsafe {
        let attr = attr.as_ref().ok_or(Code(FI_EINVAL))?;
        let bell = match attr.wait_obj {
            FI_WAIT_NONE | FI_WAIT_UNSPEC | FI_WAIT_YIELD => None,
            FI_WAIT_FD => Some(EventFd::new()?),
            _ => return Err(Code(FI_ENOSYS)),
        };
        let fid = Fid { fclass: FI_CLASS_EQ, context, ops: &raw const FID_OPS };
        let queue = EventQueue {
            visible: Visible::new(FidEq { fid, ops: &raw const OPS }),
            _fabric: object::share(fabric),
            is_writable: attr.flags & FI_WRITE != 0,
            events: Mutex::default(),
            arrived: Condvar::new(),
            bell,
        };
        object::give(Arc::new(queue), eq)
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric's contract: an open queue, which is not used again if it closes.
    call(|| unsafe { object::take::<EventQueue, _>(fid).map(drop) })
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: libfabric's contract: an open queue, and room for a descriptor.
    call(|| unsafe {
        let queue: &EventQueue = object::borrow(fid);
        match (command, &queue.bell) {
            (FI_GETWAIT, Some(bell)) => {
                argument.cast::<c_int>().write(bell.as_fd().as_raw_fd());
                Ok(())
            }
            _ => Err(Code(FI_ENOSYS)),
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
    // SAFETY: libfabric's contract: an open queue, room for a number and for as many bytes.
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
    // SAFETY: libfabric's contract: an open queue, room for a number and for as many bytes.
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
    // SAFETY: libfabric's contract: an open queue, room for an entry.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        let mut events = queue.events.lock().unwrap();
        let Some(Event::Error(error)) = events.front() else { return Err(Code(FI_EAGAIN)) };
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
    // SAFETY: libfabric's contract: an open queue, as many bytes.
    count(|| unsafe {
        let queue: &EventQueue = object::borrow(eq);
        if !queue.is_writable || (buffer.is_null() && length > 0) {
            return Err(Code(FI_EINVAL));
        }
        if queue.events.lock().unwrap().len() >= MOST_EVENTS {
            return Err(Code(FI_EAGAIN));
        }
        let bytes = match length {
            0 => Vec::new(),
            _ => std::slice::from_raw_parts(buffer.cast::<u8>(), length).to_vec(),
        };
        queue.push(Event::Plain(event, bytes));
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
    // SAFETY: libfabric's contract: room for as many bytes, or null.
    unsafe { say(code, buffer, length) }
}
