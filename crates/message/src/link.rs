//! Links: two connected processes that post reads and writes, matched in order.

use std::sync::Arc;

use bytemuck::Pod;
use memferry_copy::{OwnedSource, OwnedTarget};

use crate::buffers::{IntoSegments, IntoSegmentsMut, Source, plain_bytes, plain_bytes_mut};
use crate::builder::EndpointBuilder;
use crate::endpoint::ReadyFd;
use crate::envelope::MatchSpec;
use crate::error::Error;
use crate::operation::{self, FailedOperation, Operation, OwnedOperation};
use crate::port::{Peer, Port, Started};
use crate::segments::Segment;
use crate::window::{RawMemory, RemoteWindow, Rights, Window, WindowHandle};

impl EndpointBuilder {
    /// Connects a link to a name that another process listens on. Needs no call of that process: see
    /// [`Listener`](crate::Listener).
    pub fn connect_link(&self, name: &str) -> Result<Link, Error> {
        let port = Port::new(self.config()?, String::new(), None);
        let peer = port.connect(name)?;
        Link::from_port(port, peer)
    }
}

/// Two connected processes: the n-th write of one matches the n-th read of the other. Cheap to clone; the
/// link closes when the last clone is dropped.
///
/// ```
/// use memferry::message::{Link, Listener};
///
/// let listener = Listener::bind("doc-link")?;
/// let other = std::thread::spawn(|| Link::connect("doc-link")?.write(b"hello"));
/// let mut buffer = [0; 5];
/// assert_eq!(listener.accept()?.read(&mut buffer)?, 5);
/// other.join().unwrap()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Link {
    inner: Arc<LinkInner>,
}

struct LinkInner {
    port: Arc<Port>,
    peer: Peer,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("port", self.port()).finish()
    }
}

impl Drop for LinkInner {
    fn drop(&mut self) {
        self.port.close();
    }
}

/// The tag of all messages of a link.
const TAG: u64 = 0;

impl Link {
    /// Connects to a name with the default settings.
    pub fn connect(name: &str) -> Result<Self, Error> {
        EndpointBuilder::new().connect_link(name)
    }

    /// Makes a link of a port with one connection.
    pub(crate) fn from_port(port: Arc<Port>, peer: Peer) -> Result<Self, Error> {
        if port.lock().uses_progress_thread() {
            port.start_progress_thread()?;
        }
        Ok(Self { inner: Arc::new(LinkInner { port, peer }) })
    }

    fn port(&self) -> &Arc<Port> {
        &self.inner.port
    }

    /// Whether the peer has left and no message of it waits to be read.
    pub(crate) fn is_abandoned(&self) -> bool {
        let mut state = self.port().lock();
        state.check_peers(true);
        state.is_abandoned()
    }

    fn source(&self) -> Source {
        Source::Peer(self.inner.peer)
    }

    /// Writes a buffer, or several segments as one message, and returns when the memory may be used again.
    pub fn write<'a>(&self, buffer: impl IntoSegments<'a>) -> Result<(), Error> {
        let pieces = buffer.into_segments();
        // SAFETY: the memory is borrowed until this returns, which is after completion.
        unsafe { self.port().send(self.inner.peer, TAG, pieces.as_slice()) }
    }

    /// Reads the message of the matching write of the peer; returns its length in bytes. A buffer that is too
    /// short gets the part that fits, and the call returns [`Error::Truncated`].
    pub fn read<'a>(&self, buffer: impl IntoSegmentsMut<'a>) -> Result<u64, Error> {
        let pieces = buffer.into_segments_mut();
        // SAFETY: the memory is borrowed until this returns, which is after completion.
        let received =
            unsafe { self.port().receive(self.source(), TAG, u64::MAX, pieces.as_slice()) };
        received.map(|received| received.length)
    }

    /// Writes a slice of any plain type.
    pub fn write_slice<T: Pod>(&self, values: &[T]) -> Result<(), Error> {
        self.write(plain_bytes(values))
    }

    /// Reads a message into a slice of any plain type; returns its length in bytes, as [`Link::read`] does.
    pub fn read_slice<T: Pod>(&self, values: &mut [T]) -> Result<u64, Error> {
        self.read(plain_bytes_mut(values))
    }

    unsafe fn start_write(&self, pieces: &[Segment]) -> Result<Started, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().start_send(self.inner.peer, TAG, pieces) }
    }

    unsafe fn start_read(&self, pieces: &[Segment]) -> Result<Started, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().start_receive(self.source(), TAG, u64::MAX, pieces) }
    }

    /// Starts a write of an owned buffer, which is returned on completion.
    pub fn iwrite<B: OwnedSource>(
        &self,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.iwrite_raw(address, length) }
        })
    }

    /// Starts a read into an owned buffer, which is returned on completion.
    pub fn iread<B: OwnedTarget>(
        &self,
        buffer: B,
    ) -> Result<OwnedOperation<B>, FailedOperation<B>> {
        OwnedOperation::begin(buffer, true, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and returns it only after completion.
            unsafe { self.iread_raw(address, length) }
        })
    }

    /// Starts a write of raw memory.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until the operation completes, even if the handle is dropped.
    pub unsafe fn iwrite_raw(&self, address: *const u8, length: usize) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let begun = unsafe { self.start_write(&[Segment::source(address, length)]) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Starts a read into raw memory.
    ///
    /// # Safety
    /// The memory must stay valid for writes, and no other code may access it, until the operation completes,
    /// even if the handle is dropped.
    pub unsafe fn iread_raw(&self, address: *mut u8, length: usize) -> Result<Operation, Error> {
        // SAFETY: the caller guarantees it.
        let begun = unsafe { self.start_read(&[Segment::target(address, length)]) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Runs `f` with a scope in which borrowed memory can be used: `isend` to [`Link::peer`] is a write,
    /// `irecv` from it a read.
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope operation::OperationScope<'scope, 'env>) -> R,
    ) -> R {
        operation::scope(self.port(), f)
    }

    /// Exposes the memory of a buffer to the peer, which puts to it and gets from it as `rights` permit,
    /// without a call of this process. In a [`ShareableBuffer`](crate::ShareableBuffer) it needs no system
    /// call. [`Window::withdraw`] returns the buffer.
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
    /// process that accesses it before that must expect concurrent accesses of the peer.
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

    /// Attaches a window that the peer has exposed.
    pub fn attach(&self, handle: WindowHandle) -> Result<RemoteWindow, Error> {
        self.port().attach(self.inner.peer, handle)
    }

    /// The peer.
    pub fn peer(&self) -> Peer {
        self.inner.peer
    }

    /// Makes progress, and returns the length in bytes of the message that the next read gets, if it has
    /// arrived or is announced. The message stays.
    pub fn peek(&self) -> Result<Option<u64>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().lock();
        state.progress_and_check_peers();
        let found = state.protocol.probe(&MatchSpec::tagged(self.inner.peer, TAG, u64::MAX))?;
        Ok(found.map(|message| message.length))
    }

    /// Makes progress; returns whether there was any. Calls that wait, test or probe do this too; calls that
    /// only post an operation process what has arrived.
    pub fn progress(&self) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        self.port().lock().progress_and_check_peers()
    }

    /// A descriptor for event loops. It is readable while there is work to do or a result to collect.
    pub fn ready_fd(&self) -> Result<ReadyFd, Error> {
        self.port().check_fork()?;
        self.port().ready_fd().map(ReadyFd)
    }

    /// Makes the descriptor of [`Link::ready_fd`], and all copies of it, unreadable for ever. For a caller
    /// that closes the descriptor while an event loop may still have a copy.
    pub fn disable_ready_fd(&self) {
        if self.port().check_fork().is_ok() {
            self.port().disable_ready_fd();
        }
    }

    /// Closes the link for all clones: operations in flight end with [`Error::Closed`], and the peer is
    /// notified. A receive that the peer is writing to completes when the peer is done; the call waits for
    /// that for up to one second: see [`Link::is_busy`].
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
