//! The calls on a window of a peer: put, get, and their order.

use std::sync::Arc;

use bytemuck::Pod;
use memferry_copy::{OwnedSource, OwnedTarget};

use super::peer_memory::PeerMemory;
use super::rma::{RmaDirection, RmaRequest, WaitMode};
use super::rma_engine::RmaEngine;
use super::window_table::{WindowId, WindowInfo};
use super::{Rights, WindowHandle};
use crate::buffers::{plain_bytes, plain_bytes_mut};
use crate::completion::{CompletionEntry, CompletionKind, CompletionOptions};
use crate::error::{Error, ValidationError};
use crate::operation::{FailedOperation, Operation, OwnedOperation};
use crate::port::{Peer, Port, PortState, Started};
use crate::segments::Segment;

/// Maximum length of an access that is executed in the posting call, if its translation is cached.
const MAX_INLINE_BYTES: usize = 16 << 10;

/// A variable of a window that is set after the data of a put has arrived.
///
/// ```
/// use memferry::message::{Error, PutNotification, RemoteWindow};
///
/// fn put_and_tell(window: &RemoteWindow) -> Result<(), Error> {
///     window.put_notify(8, b"hello", PutNotification { offset: 0, value: 1 })
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutNotification {
    /// The offset of the variable in the window: eight bytes, aligned to eight in the owner's
    /// memory.
    pub offset: u64,
    /// The value that it is set to.
    pub value: u64,
}

/// A window of a peer. Accesses to one peer are executed in the order in which they were started;
/// the peer need not call anything. Cheap to clone.
///
/// ```
/// use memferry::message::{Endpoint, Rights, ShareableBuffer};
///
/// let owner = Endpoint::builder().background(true).open("doc-remote-owner")?;
/// let window = owner.expose(ShareableBuffer::new(4096)?, Rights::READ_WRITE)?;
/// let other = Endpoint::open("doc-remote-other")?;
/// let remote = other.attach(other.connect("doc-remote-owner")?, window.handle())?;
/// remote.put(0, b"hello")?;
/// let mut data = [0; 5];
/// remote.get(0, &mut data)?;
/// assert_eq!(&data, b"hello");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct RemoteWindow {
    pub(crate) port: Arc<Port>,
    rma_engine: Arc<RmaEngine>,
    memory: Arc<PeerMemory>,
    peer: Peer,
    id: WindowId,
    info: WindowInfo,
}

impl std::fmt::Debug for RemoteWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteWindow")
            .field("peer", &self.peer.index)
            .field("name", &self.id)
            .field("length", &self.info.length)
            .field("rights", &self.info.rights)
            .finish_non_exhaustive()
    }
}

impl Port {
    /// Attaches a window of a peer by its handle.
    pub(crate) fn attach(
        self: &Arc<Self>,
        peer: Peer,
        handle: WindowHandle,
    ) -> Result<RemoteWindow, Error> {
        self.attach_with(peer, |state, _| {
            if handle.0.process() != state.process_handle(peer)? {
                return Err(ValidationError::ForeignHandle.into());
            }
            Ok(handle.window_id())
        })
    }

    /// Attaches a window of a peer by its owner's key.
    pub(crate) fn attach_key(
        self: &Arc<Self>,
        peer: Peer,
        key: u64,
    ) -> Result<RemoteWindow, Error> {
        self.attach_with(peer, |_, memory| memory.windows.find(key).ok_or(Error::Withdrawn))
    }

    fn attach_with(
        self: &Arc<Self>,
        peer: Peer,
        find: impl FnOnce(&PortState, &PeerMemory) -> Result<WindowId, Error>,
    ) -> Result<RemoteWindow, Error> {
        self.check_fork()?;
        let rma_engine = self.rma_engine()?;
        let mut state = self.connect_named(peer)?;
        // Imports the regions that the owner has shared by now.
        state.progress_control();
        let memory = state.peer_memory(peer, &rma_engine)?;
        let id = find(&state, &memory);
        drop(state);
        let id = match id {
            Err(Error::Withdrawn) => return memory.check_now().and(Err(Error::Withdrawn)),
            id => id?,
        };
        let Some((info, is_new)) = memory.attach(id) else {
            return memory.check_now().and(Err(Error::Withdrawn));
        };
        if !memory.can_reach(info.region) {
            return Err(memory.unreachable_error());
        }
        if is_new && !rma_engine.invalidate_translations(&memory, info.address, info.length) {
            return Err(Error::Unreachable(None));
        }
        Ok(RemoteWindow { port: self.clone(), rma_engine, memory, peer, id, info })
    }
}

impl RemoteWindow {
    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.info.length
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.info.length == 0
    }

    /// The address of the first byte in the owner's memory.
    pub fn address(&self) -> u64 {
        self.info.address
    }

    /// Returns whether the window is open, as this side sees it.
    pub fn is_open(&self) -> bool {
        self.memory.windows.read(self.id).is_some()
    }

    /// The rights of peers.
    pub fn rights(&self) -> Rights {
        self.info.rights
    }

    /// The owner.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Copies data into the window, and returns when the data has arrived.
    pub fn put(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let request = self.put_request(offset, data.as_ptr(), data.len(), None)?;
        // SAFETY: the memory is borrowed until this returns, which is after the access has
        // completed.
        unsafe { self.execute(request) }
    }

    /// Copies data into the window, then sets a variable of the window: a reader that reads the
    /// value also reads the data. The owner can sleep until then: [`crate::Window::wait`].
    pub fn put_notify(
        &self,
        offset: u64,
        data: &[u8],
        notify: PutNotification,
    ) -> Result<(), Error> {
        let request = self.put_request(offset, data.as_ptr(), data.len(), Some(notify))?;
        // SAFETY: as in `put`.
        unsafe { self.execute(request) }
    }

    /// Copies out of the window, and returns when the data has arrived.
    pub fn get(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let request = self.get_request(offset, buffer.as_mut_ptr(), buffer.len())?;
        // SAFETY: the memory is borrowed until this returns, which is after the access has
        // completed.
        unsafe { self.execute(request) }
    }

    /// Copies a slice of any plain type into the window. The offset is in bytes.
    pub fn put_slice<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), Error> {
        self.put(offset, plain_bytes(values))
    }

    /// Copies out of the window into a slice of any plain type. The offset is in bytes.
    pub fn get_slice<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), Error> {
        self.get(offset, plain_bytes_mut(values))
    }

    /// Starts a put of an owned buffer, which is returned on completion.
    pub fn iput<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        self.iput_owned(offset, buffer, None)
    }

    /// As [`RemoteWindow::iput`], and sets a variable after the data.
    pub fn iput_notify<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
        notify: PutNotification,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        self.iput_owned(offset, buffer, Some(notify))
    }

    fn iput_owned<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
        notify: Option<PutNotification>,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.iput_raw(offset, address, length, notify) }
        })
    }

    /// Starts a get into an owned buffer, which is returned on completion.
    pub fn iget<B: OwnedTarget>(
        &self,
        offset: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.iget_raw(offset, address, length) }
        })
    }

    /// Starts a put of raw memory.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the operation completes, even if the handle
    /// is dropped.
    pub unsafe fn iput_raw(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<PutNotification>,
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let started = unsafe { self.begin_put(offset, address, length, notify) }?;
        Ok(Operation::new(&self.port, started))
    }

    /// Starts a get into raw memory.
    ///
    /// # Safety
    /// The memory must stay valid for writes, and no other thread may access it, until the
    /// operation completes, even if the handle is dropped.
    pub unsafe fn iget_raw(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let started = unsafe { self.begin_get(offset, address, length) }?;
        Ok(Operation::new(&self.port, started))
    }

    #[doc(hidden)]
    /// Starts a put that ends in a completion entry of the endpoint. If it completes at once, the
    /// entry is returned (`None` for a silent put that succeeded).
    ///
    /// # Safety
    /// As for [`RemoteWindow::iput_raw`].
    pub unsafe fn post_put(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        options: CompletionOptions,
    ) -> Result<Option<CompletionEntry>, Error> {
        let request = self.put_request(offset, address, length, None)?;
        // SAFETY: the caller guarantees it.
        let started = unsafe { self.begin(request, Some(options)) }?;
        Ok(self.report_completion(CompletionKind::Put, started, length, options))
    }

    #[doc(hidden)]
    /// Starts a get that ends in a completion entry, as [`RemoteWindow::post_put`] does.
    ///
    /// # Safety
    /// As for [`RemoteWindow::iget_raw`].
    pub unsafe fn post_get(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
        options: CompletionOptions,
    ) -> Result<Option<CompletionEntry>, Error> {
        let request = self.get_request(offset, address, length)?;
        // SAFETY: the caller guarantees it.
        let started = unsafe { self.begin(request, Some(options)) }?;
        Ok(self.report_completion(CompletionKind::Get, started, length, options))
    }

    fn report_completion(
        &self,
        kind: CompletionKind,
        started: Started,
        length: usize,
        options: CompletionOptions,
    ) -> Option<CompletionEntry> {
        let Started::Completed(outcome) = started else { return None };
        let is_reported = outcome.is_err() || !options.silent_on_success;
        is_reported.then(|| CompletionEntry {
            peer: Some(self.peer),
            length: length as u64,
            ..CompletionEntry::new(kind, options.context, outcome.map(drop))
        })
    }

    /// # Safety
    /// As for [`RemoteWindow::iput_raw`].
    pub(crate) unsafe fn begin_put(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<PutNotification>,
    ) -> Result<Started, Error> {
        let request = self.put_request(offset, address, length, notify)?;
        // SAFETY: the caller guarantees it.
        unsafe { self.begin(request, None) }
    }

    /// # Safety
    /// As for [`RemoteWindow::iget_raw`].
    pub(crate) unsafe fn begin_get(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Started, Error> {
        let request = self.get_request(offset, address, length)?;
        // SAFETY: the caller guarantees it.
        unsafe { self.begin(request, None) }
    }

    /// Waits until all accesses that were started before, on any window of this peer, are complete:
    /// puts are in the owner's memory. The handle of each access has its result.
    pub fn fence(&self) -> Result<(), Error> {
        let request =
            self.request(RmaDirection::Get, 0, Segment::source(std::ptr::null(), 0), None);
        // SAFETY: the access has no memory.
        unsafe { self.execute(request) }
    }

    pub(super) fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    pub(super) fn rma_engine(&self) -> &RmaEngine {
        &self.rma_engine
    }

    pub(super) fn request(
        &self,
        direction: RmaDirection,
        offset: u64,
        local: Segment,
        notify: Option<PutNotification>,
    ) -> RmaRequest {
        RmaRequest { window: self.id, direction, offset, local, done: 0, notify, operation: None }
    }

    fn put_request(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<PutNotification>,
    ) -> Result<RmaRequest, Error> {
        self.check(RmaDirection::Put, offset, address, length)?;
        if let Some(notify) = notify {
            self.check_inside(notify.offset, 8)?;
            if !self.info.address.wrapping_add(notify.offset).is_multiple_of(8) {
                return Err(ValidationError::MisalignedVariable(notify.offset).into());
            }
        }
        Ok(self.request(RmaDirection::Put, offset, Segment::source(address, length), notify))
    }

    fn get_request(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<RmaRequest, Error> {
        self.check(RmaDirection::Get, offset, address, length)?;
        Ok(self.request(RmaDirection::Get, offset, Segment::target(address, length), None))
    }

    /// Validates an access before it is started.
    fn check(
        &self,
        direction: RmaDirection,
        offset: u64,
        address: *const u8,
        length: usize,
    ) -> Result<(), Error> {
        let (asked, given) = (direction.right(), self.info.rights);
        if !given.include(asked) {
            return Err(Error::NotPermitted { asked, given });
        }
        if address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        self.check_inside(offset, length as u64)
    }

    pub(super) fn check_inside(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        let window_bytes = self.info.length;
        if offset.checked_add(bytes).is_none_or(|end| end > window_bytes) {
            return Err(ValidationError::OutsideWindow { offset, bytes, window_bytes }.into());
        }
        Ok(())
    }

    /// # Safety
    /// The request's memory must be valid until this returns.
    unsafe fn execute(&self, request: RmaRequest) -> Result<(), Error> {
        self.port.check_fork()?;
        // SAFETY: the caller guarantees it.
        match unsafe { self.rma_engine.execute_now(&self.memory, request, WaitMode::Blocking) } {
            Ok(outcome) => outcome,
            Err(request) => {
                Operation::new(&self.port, self.enqueue(request, None)?).wait().map(drop)
            }
        }
    }

    /// # Safety
    /// The request's memory must be valid until the operation completes.
    unsafe fn begin(
        &self,
        mut request: RmaRequest,
        options: Option<CompletionOptions>,
    ) -> Result<Started, Error> {
        self.port.check_fork()?;
        if request.local.length <= MAX_INLINE_BYTES {
            let length = request.local.length as u64;
            // SAFETY: the caller guarantees it.
            match unsafe { self.rma_engine.execute_now(&self.memory, request, WaitMode::Posting) } {
                Ok(Ok(())) => {
                    let received = crate::MessageStatus { source: self.peer, tag: 0, length };
                    return Ok(Started::Completed(Ok(received)));
                }
                Ok(Err(error)) => return Ok(Started::Completed(Err(error))),
                Err(back) => request = back,
            }
        }
        self.enqueue(request, options)
    }

    fn enqueue(
        &self,
        mut request: RmaRequest,
        options: Option<CompletionOptions>,
    ) -> Result<Started, Error> {
        let number = self.port.lock().start_rma(request.direction.completion_kind(), options)?;
        request.operation = Some(number);
        if let Err(error) = self.rma_engine.enqueue(&self.port, self.peer, &self.memory, request) {
            self.port.lock().protocol.operations.remove(number);
            return Err(error);
        }
        Ok(Started::Pending(number))
    }
}
