//! The inner endpoint: another libfabric provider that reaches other hosts.
//!
//! One thread at a time uses it, which is the threading model of the inner domain, behind a gate
//! that is closed when libfabric is unloaded.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use super::gate::{UNLOAD_GATE, UnloadGuard};
use super::library::Library;
use super::open::{OwnedInfo, RemoteConfig, Unavailable, failed};
use crate::abi::*;
use crate::address::SOCKET_BYTES;

/// The inner objects. They are closed in the order of the fields, each before those that it uses.
#[derive(Debug)]
pub(crate) struct InnerEndpoint {
    endpoint: OwnedFid<FidEp>,
    queue: OwnedFid<FidCq>,
    vector: OwnedFid<FidAv>,
    domain: OwnedFid<FidDomain>,
    fabric: OwnedFid<FidFabric>,
    wait: Option<RawFd>,
    max_iov: usize,
    address: ([u8; SOCKET_BYTES], usize),
}

// SAFETY: the objects belong to no thread; one thread at a time uses the owner.
unsafe impl Send for InnerEndpoint {}

/// An object that is closed with its owner.
#[derive(Debug)]
struct OwnedFid<T>(*mut T);

impl<T> OwnedFid<T> {
    /// Opens an object.
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

    /// The header of every object.
    fn fid(&self) -> *mut Fid {
        self.0.cast()
    }
}

impl<T> Drop for OwnedFid<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T> OwnedFid<T> {
    /// Closes the object.
    fn close(&mut self) {
        // With a closed gate the object cannot be closed.
        let Some(_guard) = UNLOAD_GATE.enter().filter(|_| !self.0.is_null()) else { return };
        // SAFETY: it is open, and not used again.
        let code = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        if code != 0 {
            tracing::debug!(code, "an inner object of libfabric did not close");
        }
        self.0 = ptr::null_mut();
    }
}

/// The cause of a rejected call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PostError {
    /// The call can be retried.
    Again,
    /// The call cannot be retried.
    Failed(c_int),
}

fn post_result(code: isize) -> Result<(), PostError> {
    match code {
        0 => Ok(()),
        _ if code == -(FI_EAGAIN as isize) => Err(PostError::Again),
        _ => Err(PostError::Failed(-code as c_int)),
    }
}

/// A completed operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct InnerCompletion {
    pub(super) context: u64,
    /// The number of bytes received.
    pub(super) length: usize,
    /// The sender, if it is known.
    pub(super) source: u64,
    pub(super) outcome: Result<(), c_int>,
}

impl InnerEndpoint {
    /// Opens an endpoint that peers on other hosts can reach.
    pub(crate) fn open(config: &RemoteConfig) -> Result<Self, Unavailable> {
        if config.is_off {
            return Err(Unavailable("disabled by MEMFERRY_REMOTE=off, which `memferry mpirun` sets if nothing names another host; \
                 MEMFERRY_REMOTE=on prevents that"
                    .into()));
        }
        let _guard =
            UNLOAD_GATE.enter().ok_or_else(|| Unavailable("libfabric is closed".into()))?;
        let library = Library::find()
            .ok_or_else(|| Unavailable("libfabric's functions were not found".into()))?;
        let chosen = OwnedInfo::query(library, config)?;
        // SAFETY: the info is from this library, with all its attributes.
        unsafe { Self::open_info(library, &chosen) }
    }

    unsafe fn open_info(
        library: &'static Library,
        chosen: &OwnedInfo,
    ) -> Result<Self, Unavailable> {
        let (info, none) = (chosen.info, ptr::null_mut());
        // SAFETY: the caller guarantees it; objects are open while others are opened from them.
        unsafe {
            let fabric =
                OwnedFid::opened("fabric", |to| (library.fabric)((*info).fabric_attr, to, none))?;
            let ops = (*fabric.0).ops;
            let domain =
                OwnedFid::opened("domain", |to| ((*ops).domain)(fabric.0, info, to, none))?;
            let ops = (*domain.0).ops;
            let mut attr = av_attr();
            let vector = OwnedFid::opened("address vector", |to| {
                ((*ops).av_open)(domain.0, &mut attr, to, none)
            })?;
            // Not every provider has a wait object.
            let queue =
                open_queue(&domain, FI_WAIT_FD).or_else(|_| open_queue(&domain, FI_WAIT_NONE))?;
            let endpoint =
                OwnedFid::opened("endpoint", |to| ((*ops).endpoint)(domain.0, info, to, none))?;
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
            check("reading the address", name)?;
            let limits = [(*(*info).tx_attr).iov_limit, (*(*info).rx_attr).iov_limit];
            Ok(Self {
                wait: descriptor_of(&queue),
                max_iov: limits[0].min(limits[1]).clamp(1, 16),
                address: (address, length),
                endpoint,
                queue,
                vector,
                domain,
                fabric,
            })
        }
    }

    /// The socket address at which peers reach this endpoint, and its length.
    pub(crate) fn address(&self) -> ([u8; SOCKET_BYTES], usize) {
        self.address
    }

    /// Closes everything: nothing accesses the memory of operations in flight after this.
    pub(super) fn close(&mut self) {
        self.wait = None;
        self.endpoint.close();
        self.queue.close();
        self.vector.close();
        self.domain.close();
        self.fabric.close();
    }

    /// Enters the gate, if the endpoint is open.
    fn enter(&self) -> Option<UnloadGuard<'static>> {
        UNLOAD_GATE.enter().filter(|_| !self.endpoint.0.is_null())
    }

    /// The maximum number of segments of one operation.
    pub(super) fn max_iov(&self) -> usize {
        self.max_iov
    }

    /// The descriptor that becomes readable when there are completions.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: it belongs to the queue, which stays open as long as the borrow.
        self.wait.map(|descriptor| unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    /// Returns whether the caller may wait for the descriptor.
    pub(super) fn can_block(&self) -> bool {
        let Some(_guard) = self.enter() else { return true };
        let mut fid = self.queue.fid();
        // SAFETY: both are open; the list has one object.
        unsafe { ((*(*self.fabric.0).ops).trywait)(self.fabric.0, &mut fid, 1) == 0 }
    }

    /// Inserts a socket address, and returns its inner number.
    pub(super) fn insert(&self, socket: &[u8; SOCKET_BYTES]) -> Option<u64> {
        let _guard = self.enter()?;
        let mut number = FI_ADDR_NOTAVAIL;
        // SAFETY: an address in the endpoint's format, and space for its number.
        let count = unsafe {
            let insert = (*(*self.vector.0).ops).insert;
            insert(self.vector.0, socket.as_ptr().cast(), 1, &mut number, 0, ptr::null_mut())
        };
        (count == 1 && number != FI_ADDR_NOTAVAIL).then_some(number)
    }

    /// Sends a packet.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the operation with this context completes.
    pub(super) unsafe fn send(&self, bytes: &[u8], to: u64, context: u64) -> Result<(), PostError> {
        let _guard = self.enter().ok_or(PostError::Again)?;
        let (at, none) = (bytes.as_ptr().cast(), ptr::null_mut());
        // SAFETY: the caller guarantees it; the endpoint is open.
        post_result(unsafe {
            let send = (*(*self.endpoint.0).msg).send;
            send(self.endpoint.0, at, bytes.len(), none, to, context as *mut c_void)
        })
    }

    /// Posts a buffer for the next packet.
    ///
    /// # Safety
    /// The memory must stay valid for writes until the operation with this context completes.
    pub(super) unsafe fn receive(
        &self,
        at: *mut u8,
        length: usize,
        context: u64,
    ) -> Result<(), PostError> {
        let _guard = self.enter().ok_or(PostError::Again)?;
        let none = ptr::null_mut();
        // SAFETY: the caller guarantees it; the endpoint is open.
        post_result(unsafe {
            let receive = (*(*self.endpoint.0).msg).recv;
            let context = context as *mut c_void;
            receive(self.endpoint.0, at.cast(), length, none, FI_ADDR_UNSPEC, context)
        })
    }

    /// Sends the bytes of a message under a label.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the operation with this context completes.
    pub(super) unsafe fn send_labelled(
        &self,
        segments: &[libc::iovec],
        to: u64,
        label: u64,
        context: u64,
    ) -> Result<(), PostError> {
        let _guard = self.enter().ok_or(PostError::Again)?;
        let (at, count, none) = (segments.as_ptr(), segments.len(), ptr::null_mut());
        // SAFETY: the caller guarantees it; the endpoint is open.
        post_result(unsafe {
            let send = (*(*self.endpoint.0).tagged).sendv;
            send(self.endpoint.0, at, none, count, to, label, context as *mut c_void)
        })
    }

    /// Receives the bytes that a peer sends under a label.
    ///
    /// # Safety
    /// The memory must stay valid for writes until the operation with this context completes.
    pub(super) unsafe fn receive_labelled(
        &self,
        segments: &[libc::iovec],
        from: u64,
        label: u64,
        context: u64,
    ) -> Result<(), PostError> {
        let _guard = self.enter().ok_or(PostError::Again)?;
        let (at, count, none) = (segments.as_ptr(), segments.len(), ptr::null_mut());
        // SAFETY: the caller guarantees it; the endpoint is open.
        post_result(unsafe {
            let receive = (*(*self.endpoint.0).tagged).recvv;
            receive(self.endpoint.0, at, none, count, from, label, 0, context as *mut c_void)
        })
    }

    /// Cancels a receive; it completes in any case.
    pub(super) fn cancel(&self, context: u64) {
        let Some(_guard) = self.enter() else { return };
        let fid = self.endpoint.fid();
        // SAFETY: the endpoint is open; the context is only compared.
        unsafe { ((*(*self.endpoint.0).ops).cancel)(fid, context as *mut c_void) };
    }

    /// Makes progress, and appends completions. Returns whether there were any.
    pub(super) fn read(&self, finished: &mut Vec<InnerCompletion>) -> bool {
        let Some(_guard) = self.enter() else { return false };
        const EMPTY: CqMsgEntry = CqMsgEntry { op_context: ptr::null_mut(), flags: 0, len: 0 };
        let (mut entries, mut sources) = ([EMPTY; 32], [FI_ADDR_NOTAVAIL; 32]);
        // SAFETY: the queue is open and has this format; there is space for 32 entries and senders.
        let count = unsafe {
            let read = (*(*self.queue.0).ops).readfrom;
            read(self.queue.0, entries.as_mut_ptr().cast(), entries.len(), sources.as_mut_ptr())
        };
        if count == -(FI_EAVAIL as isize) {
            return self.read_error(finished);
        }
        let Ok(count) = usize::try_from(count) else { return false };
        finished.extend(entries[..count].iter().zip(sources).map(|(entry, source)| {
            InnerCompletion {
                context: entry.op_context as u64,
                length: entry.len,
                source,
                outcome: Ok(()),
            }
        }));
        count > 0
    }

    fn read_error(&self, finished: &mut Vec<InnerCompletion>) -> bool {
        // Later versions write beyond the end that this version knows.
        let mut space = [0u64; 32];
        let entry = space.as_mut_ptr().cast::<CqErrEntry>();
        // SAFETY: the queue is open, and there is enough space for an entry; no pointer in it is
        // dereferenced.
        let (count, entry) = unsafe {
            let count = ((*(*self.queue.0).ops).readerr)(self.queue.0, entry, 0);
            (count, entry.read())
        };
        if count <= 0 {
            return false;
        }
        finished.push(InnerCompletion {
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
    domain: &OwnedFid<FidDomain>,
    wait_obj: c_int,
) -> Result<OwnedFid<FidCq>, Unavailable> {
    let mut attr = CqAttr {
        size: 4096,
        flags: 0,
        format: FI_CQ_FORMAT_MSG,
        wait_obj,
        signaling_vector: 0,
        wait_cond: FI_CQ_COND_NONE,
        wait_set: ptr::null_mut(),
    };
    // SAFETY: the caller guarantees it.
    OwnedFid::opened("completion queue", |to| unsafe {
        ((*(*domain.0).ops).cq_open)(domain.0, &mut attr, to, ptr::null_mut())
    })
}

/// # Safety
/// The queue must be open.
unsafe fn descriptor_of(queue: &OwnedFid<FidCq>) -> Option<RawFd> {
    let mut descriptor: RawFd = -1;
    // SAFETY: the caller guarantees it; this command writes one descriptor.
    let code = unsafe {
        let control = (*(*queue.fid()).ops).control;
        control(queue.fid(), FI_GETWAIT, (&raw mut descriptor).cast())
    };
    (code == 0 && descriptor >= 0).then_some(descriptor)
}
