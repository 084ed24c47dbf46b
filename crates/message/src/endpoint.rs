//! Endpoints: one process's address for tagged messages with many peers.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::Pod;
use memferry_copy::{OwnedSource, OwnedTarget};
use memferry_memory::lookup::{LookupCounters, LookupFootprint};
use memferry_sys::epoll::EpollSet;

use crate::buffers::{IntoSegments, IntoSegmentsMut, Source, plain_bytes, plain_bytes_mut};
use crate::builder::EndpointBuilder;
use crate::connect::access_probe::PeerAccess;
use crate::connect::listener::Listener;
use crate::connect::parse_name;
use crate::envelope::MatchSpec;
use crate::error::{ConnectError, Error};
use crate::operation::{self, FailedOperation, Operation, OperationScope, OwnedOperation};
use crate::plan::Pinning;
use crate::port::{MessageStatus, Peer, Port};
use crate::segments::Segment;
use crate::window::{RawMemory, RemoteWindow, Rights, Window, WindowHandle};

/// The mask with which all bits of a tag are compared.
///
/// ```
/// use memferry::message::{Endpoint, Source, TAG_ALL};
///
/// let endpoint = Endpoint::open("tag-all-doc")?;
/// endpoint.send(endpoint.self_peer()?, 7, b"hello")?;
/// assert!(endpoint.iprobe(Source::Any, 8, TAG_ALL)?.is_none());
/// assert!(endpoint.iprobe(Source::Any, 7, TAG_ALL)?.is_some());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub const TAG_ALL: u64 = u64::MAX;
/// The mask with which no bit of a tag is compared: any tag matches.
///
/// ```
/// use memferry::message::{Endpoint, Source, TAG_ANY};
///
/// let endpoint = Endpoint::open("tag-any-doc")?;
/// endpoint.send(endpoint.self_peer()?, 7, b"hello")?;
/// assert_eq!(endpoint.iprobe(Source::Any, 0, TAG_ANY)?.map(|found| found.tag), Some(7));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub const TAG_ANY: u64 = 0;

/// One process's address for tagged messages with many peers. Cheap to clone; clones are the same
/// endpoint, which closes when the last of them is dropped.
///
/// # Progress
///
/// Connections need no call of this side: a thread of the endpoint, which sleeps otherwise, accepts
/// them, and a peer connects and sends while this side computes. It ends with the endpoint.
///
/// Messages make progress while a thread is inside a call of the endpoint, or on a progress thread;
/// without one, no message moves on a side that calls nothing. Calls that wait, test
/// or probe, and [`Endpoint::progress`], advance everything in flight, copies included. Calls that only
/// post an operation ([`Endpoint::isend`], [`Endpoint::irecv`]) process what has arrived and perform no
/// bulk copy. A small message is complete on the sending side when its call returns; a large one needs
/// a call of the receiver, and then calls of the side that copies. A progress thread does all this while
/// the program computes: [`EndpointBuilder::background`] starts one, and so do the first `.await` that
/// does not complete at once and [`Operation::event`]. Windows need no progress of their owner.
///
/// # Example
///
/// ```
/// use memferry::message::{Endpoint, Source, TAG_ALL};
///
/// let here = Endpoint::open("doc-here")?;
/// let there = Endpoint::open("doc-there")?;
/// let peer = here.connect("doc-there")?; // commonly in another process
/// here.send(peer, 7, b"hello")?;
/// let mut buffer = [0; 5];
/// let received = there.recv(Source::Any, 7, TAG_ALL, &mut buffer)?;
/// assert_eq!((received.length, &buffer), (5, b"hello"));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<EndpointInner>,
}

struct EndpointInner {
    port: Arc<Port>,
    name: String,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let EndpointInner { port, name } = &*self.inner;
        f.debug_struct("Endpoint").field("name", name).field("port", port).finish()
    }
}

impl Drop for EndpointInner {
    fn drop(&mut self) {
        self.port.close();
    }
}

impl EndpointBuilder {
    /// Opens an endpoint under a name that peers connect to. A name with a slash is a path in the file
    /// system; any other name is removed with the process.
    pub fn open(&self, name: &str) -> Result<Endpoint, Error> {
        let settings = self.config()?;
        let listener = Listener::bind(&parse_name(name)?, settings.allowed.clone())?;
        let background = settings.background;
        let port = Port::new(settings, name.to_owned(), Some(listener));
        // Every connection needs the table.
        port.lock().windows.table().map_err(ConnectError::system("making shared memory"))?;
        if background {
            // It accepts connections too.
            port.start_progress_thread()?;
        } else {
            port.start_accept_thread();
        }
        Ok(Endpoint { inner: Arc::new(EndpointInner { port, name: name.to_owned() }) })
    }
}

impl Endpoint {
    /// Opens an endpoint with the default settings.
    pub fn open(name: &str) -> Result<Self, Error> {
        EndpointBuilder::new().open(name)
    }

    /// Returns a builder for an endpoint with other settings.
    pub fn builder() -> EndpointBuilder {
        EndpointBuilder::new()
    }

    /// The name that peers connect to.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    pub(crate) fn port(&self) -> &Arc<Port> {
        &self.inner.port
    }

    /// Connects to another endpoint by its name. It needs no call of the other side. If it is connected already, by either side and by any name
    /// of its socket, that connection is used. The name leads to the process that listens on it, and not to a
    /// peer that only claims the name.
    pub fn connect(&self, name: &str) -> Result<Peer, Error> {
        self.port().connect(name)
    }

    /// This endpoint as a peer of itself.
    pub fn self_peer(&self) -> Result<Peer, Error> {
        self.port().check_fork()?;
        Ok(self.port().lock().peer_to_self()?)
    }

    /// All connected peers, including those that connected to this endpoint.
    pub fn peers(&self) -> Vec<Peer> {
        if self.port().check_fork().is_err() {
            return Vec::new();
        }
        let mut state = self.port().lock();
        state.check_peers(true);
        state.protocol.peers.all_peers()
    }

    /// The name on which a peer listens, or listened before it disconnected: the name that this side
    /// connected to, or that the peer sent when it connected. A peer of another user has no name unless its
    /// process listens on it.
    pub fn name_of(&self, peer: Peer) -> Result<String, Error> {
        self.port().check_fork()?;
        self.port().lock().protocol.peers.name_of(peer)
    }

    /// What this process can do with the memory of a peer, and what prevents more. Connects to a rank
    /// of a job that is not connected yet.
    pub fn peer_access(&self, peer: Peer) -> Result<PeerAccess, Error> {
        self.port().check_fork()?;
        Ok(self.port().connect_named(peer)?.protocol.peers.connection_of(peer)?.access)
    }

    /// Sends a buffer, or several segments as one message, and returns when the memory may be used again.
    pub fn send<'a>(&self, to: Peer, tag: u64, buffer: impl IntoSegments<'a>) -> Result<(), Error> {
        let pieces = buffer.into_segments();
        // SAFETY: the memory is borrowed until this returns, which is after completion.
        unsafe { self.port().send(to, tag, pieces.as_slice()) }
    }

    /// Receives a message into a buffer, or into several segments. Only the bits of the tag that are set in
    /// the mask are compared ([`TAG_ALL`], [`TAG_ANY`]).
    pub fn recv<'a>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: impl IntoSegmentsMut<'a>,
    ) -> Result<MessageStatus, Error> {
        let pieces = buffer.into_segments_mut();
        // SAFETY: the memory is borrowed until this returns, which is after completion.
        unsafe { self.port().receive(from.into(), tag, mask, pieces.as_slice()) }
    }

    /// Sends a slice of any plain type, as [`Endpoint::send`] does bytes.
    ///
    /// ```
    /// use memferry::message::{Endpoint, Source, TAG_ALL};
    ///
    /// let endpoint = Endpoint::open("doc-slices")?;
    /// endpoint.send_slice(endpoint.self_peer()?, 7, &[1.5f64, 2.5])?;
    /// let mut values = [0.0f64; 2];
    /// let received = endpoint.recv_slice(Source::Any, 7, TAG_ALL, &mut values)?;
    /// assert_eq!((values, received.length), ([1.5, 2.5], 16));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn send_slice<T: Pod>(&self, to: Peer, tag: u64, values: &[T]) -> Result<(), Error> {
        self.send(to, tag, plain_bytes(values))
    }

    /// Receives a message into a slice of any plain type, as [`Endpoint::recv`] does bytes. The reported
    /// length is in bytes; a last element that is received in part keeps its other bytes.
    pub fn recv_slice<T: Pod>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        values: &mut [T],
    ) -> Result<MessageStatus, Error> {
        self.recv(from, tag, mask, plain_bytes_mut(values))
    }

    /// Starts a send of an owned buffer, which is returned on completion: a vector or boxed slice of any
    /// plain type (`vec![0; n]` has elements of four bytes, `vec![0u8; n]` of one).
    pub fn isend<B: OwnedSource>(
        &self,
        to: Peer,
        tag: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.isend_raw(to, tag, address, length) }
        })
    }

    /// Starts a receive into an owned buffer, which is returned on completion: a vector or boxed slice of any
    /// plain type. The reported length is in bytes.
    pub fn irecv<B: OwnedTarget>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, true, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.irecv_raw(from, tag, mask, address, length) }
        })
    }

    /// Runs `f` with a scope in which borrowed memory can be sent and received into. Returns when `f` has
    /// returned and every operation of the scope is complete. The call waits for sends, and cancels receives
    /// that no message has matched by then.
    ///
    /// A scope blocks its thread. In async code use owned buffers ([`Endpoint::isend`], [`Endpoint::irecv`]):
    /// a scope that suspends would be a future, and a future can be leaked at any `.await` while a peer still
    /// accesses memory whose borrow has then ended.
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope OperationScope<'scope, 'env>) -> R,
    ) -> R {
        operation::scope(self.port(), f)
    }

    /// Starts a send of `length` bytes of raw memory.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the operation completes, even if the handle is dropped.
    pub unsafe fn isend_raw(
        &self,
        to: Peer,
        tag: u64,
        address: *const u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.isend_segments_raw(to, tag, &[Segment::source(address, length)]) }
    }

    /// Starts a send of several segments of raw memory as one message.
    ///
    /// # Safety
    /// As for [`Endpoint::isend_raw`], for every segment.
    pub unsafe fn isend_segments_raw(
        &self,
        to: Peer,
        tag: u64,
        pieces: &[Segment],
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let begun = unsafe { self.port().start_send(to, tag, pieces) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Starts a receive into raw memory.
    ///
    /// # Safety
    /// The memory must stay valid for writes, and no other code may access it, until the operation completes,
    /// even if the handle is dropped.
    pub unsafe fn irecv_raw(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.irecv_segments_raw(from, tag, mask, &[Segment::target(address, length)]) }
    }

    /// Starts a receive of one message into several segments of raw memory.
    ///
    /// # Safety
    /// As for [`Endpoint::irecv_raw`], for every segment.
    pub unsafe fn irecv_segments_raw(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        pieces: &[Segment],
    ) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let begun = unsafe { self.port().start_receive(from.into(), tag, mask, pieces) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Exposes the memory of a buffer to peers, which put to it and get from it as `rights` permit, without a
    /// call of this process. In a [`ShareableBuffer`](crate::ShareableBuffer) they need no system call.
    /// [`Window::withdraw`] returns the buffer.
    pub fn expose<B: OwnedTarget>(
        &self,
        buffer: B,
        rights: Rights,
    ) -> Result<Window<B>, FailedOperation<B>> {
        self.port().expose(buffer, rights, None)
    }

    /// Exposes raw memory.
    ///
    /// # Safety
    /// The memory must be valid for reads and writes until the window is withdrawn or dropped. Code of this
    /// process that accesses it before that must expect concurrent accesses of peers.
    pub unsafe fn expose_raw(
        &self,
        address: *mut u8,
        length: usize,
        rights: Rights,
    ) -> Result<Window<RawMemory>, Error> {
        // SAFETY: the caller guarantees it.
        let memory = unsafe { RawMemory::new(address, length) };
        self.port().expose(memory, rights, None).map_err(|failed| failed.error)
    }

    /// Attaches a window that a peer has exposed. The peer must be connected; puts and gets need no call of
    /// the peer.
    pub fn attach(&self, peer: Peer, handle: WindowHandle) -> Result<RemoteWindow, Error> {
        self.port().attach(peer, handle)
    }

    /// Whether memory is prefaulted before it is copied; see [`EndpointBuilder::pinning`].
    pub fn pinning(&self) -> Result<Pinning, Error> {
        self.port().check_fork()?;
        Ok(self.port().lock().protocol.planner.pinning())
    }

    /// Changes whether memory is prefaulted before it is copied, for messages that are matched from now
    /// on.
    ///
    /// ```
    /// use memferry::message::Endpoint;
    /// use memferry::message::plan::Pinning;
    ///
    /// let endpoint = Endpoint::open("doc-set-pinning")?;
    /// endpoint.set_pinning(Pinning::Off)?; // from here on, all buffers are in use already
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_pinning(&self, pinning: Pinning) -> Result<(), Error> {
        self.port().check_fork()?;
        self.port().lock().protocol.planner.set_pinning(pinning);
        Ok(())
    }

    /// The counters of the window lookup; `None` before the first window is attached.
    pub fn lookup_counters(&self) -> Option<LookupCounters> {
        self.port().lookup_counters()
    }

    /// The memory use of the window lookup; `None` before the first window is attached.
    pub fn lookup_memory(&self) -> Option<LookupFootprint> {
        self.port().lookup_memory()
    }

    /// The first message that a receive would match, if one has arrived or is announced.
    pub fn iprobe(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
    ) -> Result<Option<MessageStatus>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().lock();
        state.progress_and_check_peers();
        state.protocol.probe(&MatchSpec::tagged(from, tag, mask))
    }

    /// Waits for a message that a receive would match.
    pub fn probe(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
    ) -> Result<MessageStatus, Error> {
        self.port().check_fork()?;
        let wanted = MatchSpec::tagged(from, tag, mask);
        let found =
            self.port().block(true, None, |state| state.protocol.probe(&wanted).transpose());
        found.expect("without a deadline it ends")
    }

    /// Makes progress; returns whether there was any. Calls that wait, test or probe do this too; calls that
    /// only post an operation process what has arrived.
    pub fn progress(&self) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        self.port().lock().progress_and_check_peers()
    }

    /// Makes progress until there is any, or until the timeout.
    pub fn progress_timeout(&self, timeout: Duration) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.port().lock();
        // A wait begins without copies, which are progress too.
        if state.progress() {
            return true;
        }
        let before = state.progress_count();
        let moved =
            |state: &mut crate::port::PortState| (state.progress_count() != before).then_some(());
        self.port().block_locked(state, true, deadline, moved).is_some()
    }

    /// A descriptor for event loops. It is readable while there is work or a result, for which the
    /// application calls [`Endpoint::progress`], a test or a receive.
    pub fn ready_fd(&self) -> Result<ReadyFd, Error> {
        self.port().check_fork()?;
        self.port().ready_fd().map(ReadyFd)
    }

    /// Closes the endpoint for all clones: operations in flight end with [`Error::Closed`], and peers are
    /// notified. A receive that a peer is writing to completes when the peer is done; the call waits for that
    /// for up to one second: see [`Endpoint::is_busy`].
    pub fn close(self) {
        self.port().close();
    }

    /// Whether memory of operations is in use after a close, although the operations have ended: a peer that
    /// was stopped while it wrote may continue, or an access to a peer's memory has not returned. Raw memory
    /// must stay valid while this returns `true`.
    pub fn is_busy(&self) -> bool {
        self.port().is_busy()
    }
}

/// A descriptor that is readable while an endpoint or link has work to do.
///
/// ```
/// use std::os::fd::AsFd;
///
/// use memferry::message::Endpoint;
///
/// let endpoint = Endpoint::open("doc-ready")?;
/// let ready = endpoint.ready_fd()?; // for poll and epoll
/// println!("{:?}", ready.as_fd());
/// endpoint.progress(); // after it became readable
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReadyFd(pub(crate) Arc<EpollSet>);

impl AsFd for ReadyFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
