//! The inner endpoint: another provider of libfabric's that reaches other hosts, and the calls of it.
//!
//! Everything here is used by one thread at a time, which is what the inner domain was asked for, and
//! behind a gate that is closed when libfabric ends.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use super::gate::{GATE, Inside};
use super::library::Library;
use super::open::{Chosen, Settings, Unavailable, failed};
use crate::abi::*;
use crate::address::SOCKET_BYTES;

/// The inner objects. Closed in the order in which they stand on each other.
#[derive(Debug)]
pub(crate) struct Inner {
    endpoint: Owned<FidEp>,
    queue: Owned<FidCq>,
    vector: Owned<FidAv>,
    domain: Owned<FidDomain>,
    fabric: Owned<FidFabric>,
    wait: Option<RawFd>,
    most_pieces: usize,
    address: ([u8; SOCKET_BYTES], usize),
}

// SAFETY: the objects belong to no thread; the owner is used by one at a time.
unsafe impl Send for Inner {}

/// An object that is closed with its owner.
#[derive(Debug)]
struct Owned<T>(*mut T);

impl<T> Owned<T> {
    /// The object that a call has opened.
    fn opened(
        what: &'static str,
        open: impl FnOnce(&mut *mut T) -> c_int,
    ) -> Result<Self, Unavailable> {
        let mut object = ptr::null_mut();
        match open(&mut object) {
            0 if !object.is_null() => Ok(Self(object)),
            code => Err(failed(what, code as isize)),
        }
    }

    /// Every object begins with this.
    fn fid(&self) -> *mut Fid {
        self.0.cast()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T> Owned<T> {
    /// Closes it before its owner goes.
    fn close(&mut self) {
        // Nobody is there to close it if the gate is closed.
        let Some(_inside) = GATE.pass().filter(|_| !self.0.is_null()) else { return };
        // SAFETY: it is open, and nobody uses it any more.
        let code = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        if code != 0 {
            tracing::debug!(code, "an inner object of libfabric's did not close");
        }
        self.0 = ptr::null_mut();
    }
}

/// Why a call was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// It can be made again later.
    Again,
    /// It cannot.
    Failed(c_int),
}

fn taken(code: isize) -> Result<(), Refused> {
    match code {
        0 => Ok(()),
        _ if code == -(FI_EAGAIN as isize) => Err(Refused::Again),
        _ => Err(Refused::Failed(-code as c_int)),
    }
}

/// An operation that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finished {
    pub(super) context: u64,
    /// The bytes of what was received.
    pub(super) length: usize,
    /// Whose it is, where that is known.
    pub(super) source: u64,
    pub(super) outcome: Result<(), c_int>,
}

impl Inner {
    /// Opens an endpoint that peers on other hosts can reach.
    pub(crate) fn open(settings: &Settings) -> Result<Self, Unavailable> {
        if settings.is_off {
            return Err(Unavailable("switched off by MEMFERRY_REMOTE".into()));
        }
        let _inside = GATE.pass().ok_or_else(|| Unavailable("libfabric is closed".into()))?;
        let library = Library::find()
            .ok_or_else(|| Unavailable("libfabric's functions were not found".into()))?;
        let chosen = Chosen::ask(library, settings)?;
        // SAFETY: the info is one of this library's, with all its attributes.
        unsafe { Self::open_chosen(library, &chosen) }
    }

    unsafe fn open_chosen(library: &'static Library, chosen: &Chosen) -> Result<Self, Unavailable> {
        let (info, none) = (chosen.info, ptr::null_mut());
        // SAFETY: the caller's promise; objects are open while others are opened on them.
        unsafe {
            let fabric =
                Owned::opened("fabric", |to| (library.fabric)((*info).fabric_attr, to, none))?;
            let ops = (*fabric.0).ops;
            let domain = Owned::opened("domain", |to| ((*ops).domain)(fabric.0, info, to, none))?;
            let ops = (*domain.0).ops;
            let mut attr = av_attr();
            let vector = Owned::opened("address vector", |to| {
                ((*ops).av_open)(domain.0, &mut attr, to, none)
            })?;
            // Not every provider has something to wait for.
            let queue =
                open_queue(&domain, FI_WAIT_FD).or_else(|_| open_queue(&domain, FI_WAIT_NONE))?;
            let endpoint =
                Owned::opened("endpoint", |to| ((*ops).endpoint)(domain.0, info, to, none))?;
            let fid = endpoint.fid();
            let check = |what: &str, code: c_int| match code {
                0 => Ok(()),
                _ => Err(failed(what, code as isize)),
            };
            let bind = (*(*fid).ops).bind;
            check("binding the queue", bind(fid, queue.fid(), FI_SEND | FI_RECV))?;
            check("binding the vector", bind(fid, vector.fid(), 0))?;
            check("enabling", ((*(*fid).ops).control)(fid, FI_ENABLE, none))?;
            let mut address = [0; SOCKET_BYTES];
            let mut length = SOCKET_BYTES;
            let name = ((*(*endpoint.0).cm).getname)(fid, address.as_mut_ptr().cast(), &mut length);
            check("asking for the address", name)?;
            let limits = [(*(*info).tx_attr).iov_limit, (*(*info).rx_attr).iov_limit];
            Ok(Self {
                wait: descriptor_of(&queue),
                most_pieces: limits[0].min(limits[1]).clamp(1, 16),
                address: (address, length),
                endpoint,
                queue,
                vector,
                domain,
                fabric,
            })
        }
    }

    /// The address of the socket at which peers reach this endpoint, and its length.
    pub(crate) fn address(&self) -> ([u8; SOCKET_BYTES], usize) {
        self.address
    }

    /// Closes everything early: nobody touches the memory of what was under way after this.
    pub(super) fn close(&mut self) {
        self.wait = None;
        self.endpoint.close();
        self.queue.close();
        self.vector.close();
        self.domain.close();
        self.fabric.close();
    }

    /// Goes in, if there is something to go into.
    fn pass(&self) -> Option<Inside<'static>> {
        GATE.pass().filter(|_| !self.endpoint.0.is_null())
    }

    /// The most pieces of memory of one operation.
    pub(super) fn most_pieces(&self) -> usize {
        self.most_pieces
    }

    /// What becomes readable when something has happened.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: it belongs to the queue, which stays open as long as the borrow.
        self.wait.map(|descriptor| unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    /// Whether nothing is lost if the descriptor is waited for.
    pub(super) fn is_quiet(&self) -> bool {
        let Some(_inside) = self.pass() else { return true };
        let mut fid = self.queue.fid();
        // SAFETY: both are open; the list has one object.
        unsafe { ((*(*self.fabric.0).ops).trywait)(self.fabric.0, &mut fid, 1) == 0 }
    }

    /// The inner number of a socket's address.
    pub(super) fn insert(&self, socket: &[u8; SOCKET_BYTES]) -> Option<u64> {
        let _inside = self.pass()?;
        let mut number = FI_ADDR_NOTAVAIL;
        // SAFETY: an address of the format that the endpoint has, and room for its number.
        let count = unsafe {
            let insert = (*(*self.vector.0).ops).insert;
            insert(self.vector.0, socket.as_ptr().cast(), 1, &mut number, 0, ptr::null_mut())
        };
        (count == 1 && number != FI_ADDR_NOTAVAIL).then_some(number)
    }

    /// Sends a packet.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the context is told as finished.
    pub(super) unsafe fn send(&self, bytes: &[u8], to: u64, context: u64) -> Result<(), Refused> {
        let _inside = self.pass().ok_or(Refused::Again)?;
        let (at, none) = (bytes.as_ptr().cast(), ptr::null_mut());
        // SAFETY: passed on; the endpoint is open.
        taken(unsafe {
            let send = (*(*self.endpoint.0).msg).send;
            send(self.endpoint.0, at, bytes.len(), none, to, context as *mut c_void)
        })
    }

    /// Gives memory for the next packet.
    ///
    /// # Safety
    /// The memory must stay valid for writes until the context is told as finished.
    pub(super) unsafe fn receive(
        &self,
        at: *mut u8,
        length: usize,
        context: u64,
    ) -> Result<(), Refused> {
        let _inside = self.pass().ok_or(Refused::Again)?;
        let none = ptr::null_mut();
        // SAFETY: passed on; the endpoint is open.
        taken(unsafe {
            let receive = (*(*self.endpoint.0).msg).recv;
            let context = context as *mut c_void;
            receive(self.endpoint.0, at.cast(), length, none, FI_ADDR_UNSPEC, context)
        })
    }

    /// Sends the bytes of a message under a label.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the context is told as finished.
    pub(super) unsafe fn send_labelled(
        &self,
        pieces: &[libc::iovec],
        to: u64,
        label: u64,
        context: u64,
    ) -> Result<(), Refused> {
        let _inside = self.pass().ok_or(Refused::Again)?;
        let (at, count, none) = (pieces.as_ptr(), pieces.len(), ptr::null_mut());
        // SAFETY: passed on; the endpoint is open.
        taken(unsafe {
            let send = (*(*self.endpoint.0).tagged).sendv;
            send(self.endpoint.0, at, none, count, to, label, context as *mut c_void)
        })
    }

    /// Receives what a peer sends under a label.
    ///
    /// # Safety
    /// The memory must stay valid for writes until the context is told as finished.
    pub(super) unsafe fn receive_labelled(
        &self,
        pieces: &[libc::iovec],
        from: u64,
        label: u64,
        context: u64,
    ) -> Result<(), Refused> {
        let _inside = self.pass().ok_or(Refused::Again)?;
        let (at, count, none) = (pieces.as_ptr(), pieces.len(), ptr::null_mut());
        // SAFETY: passed on; the endpoint is open.
        taken(unsafe {
            let receive = (*(*self.endpoint.0).tagged).recvv;
            receive(self.endpoint.0, at, none, count, from, label, 0, context as *mut c_void)
        })
    }

    /// Asks for an early end of a receive; it is told as finished in any case.
    pub(super) fn cancel(&self, context: u64) {
        let Some(_inside) = self.pass() else { return };
        let fid = self.endpoint.fid();
        // SAFETY: the endpoint is open; the context is only compared.
        unsafe { ((*(*self.endpoint.0).ops).cancel)(fid, context as *mut c_void) };
    }

    /// Moves everything on, and appends what has ended. Whether there was anything.
    pub(super) fn read(&self, finished: &mut Vec<Finished>) -> bool {
        let Some(_inside) = self.pass() else { return false };
        const EMPTY: CqMsgEntry = CqMsgEntry { op_context: ptr::null_mut(), flags: 0, len: 0 };
        let (mut entries, mut sources) = ([EMPTY; 32], [FI_ADDR_NOTAVAIL; 32]);
        // SAFETY: the queue is open and has this format; there is room for so many entries and senders.
        let count = unsafe {
            let read = (*(*self.queue.0).ops).readfrom;
            read(self.queue.0, entries.as_mut_ptr().cast(), entries.len(), sources.as_mut_ptr())
        };
        if count == -(FI_EAVAIL as isize) {
            return self.read_error(finished);
        }
        let Ok(count) = usize::try_from(count) else { return false };
        finished.extend(entries[..count].iter().zip(sources).map(|(entry, source)| Finished {
            context: entry.op_context as u64,
            length: entry.len,
            source,
            outcome: Ok(()),
        }));
        count > 0
    }

    fn read_error(&self, finished: &mut Vec<Finished>) -> bool {
        // Later versions write behind the end that this one knows.
        let mut room = [0u64; 32];
        let entry = room.as_mut_ptr().cast::<CqErrEntry>();
        // SAFETY: the queue is open, and there is plenty of room for an entry, none of which is an
        // address that anybody follows.
        let (count, entry) = unsafe {
            let count = ((*(*self.queue.0).ops).readerr)(self.queue.0, entry, 0);
            (count, entry.read())
        };
        if count <= 0 {
            return false;
        }
        finished.push(Finished {
            context: entry.op_context as u64,
            length: entry.len,
            source: FI_ADDR_NOTAVAIL,
            outcome: Err(entry.err),
        });
        true
    }
}

fn av_attr() -> AvAttr {
    AvAttr {
        r#type: FI_AV_TABLE,
        rx_ctx_bits: 0,
        count: 0,
        ep_per_node: 0,
        name: ptr::null(),
        map_addr: ptr::null_mut(),
        flags: 0,
    }
}

/// # Safety
/// The domain must be open.
unsafe fn open_queue(
    domain: &Owned<FidDomain>,
    wait_obj: c_int,
) -> Result<Owned<FidCq>, Unavailable> {
    let mut attr = CqAttr {
        size: 4096,
        flags: 0,
        format: FI_CQ_FORMAT_MSG,
        wait_obj,
        signaling_vector: 0,
        wait_cond: FI_CQ_COND_NONE,
        wait_set: ptr::null_mut(),
    };
    // SAFETY: the caller's promise.
    Owned::opened("completion queue", |to| unsafe {
        ((*(*domain.0).ops).cq_open)(domain.0, &mut attr, to, ptr::null_mut())
    })
}

/// # Safety
/// The queue must be open.
unsafe fn descriptor_of(queue: &Owned<FidCq>) -> Option<RawFd> {
    let mut descriptor: RawFd = -1;
    // SAFETY: the caller's promise; this command writes one descriptor.
    let code = unsafe {
        let control = (*(*queue.fid()).ops).control;
        control(queue.fid(), FI_GETWAIT, (&raw mut descriptor).cast())
    };
    (code == 0 && descriptor >= 0).then_some(descriptor)
}
