//! Endpoints: one process's address for tagged messages with many peers.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_copy::{OwnedSource, OwnedTarget};
use memferry_memory::lookup::{Counters, MemoryUse};
use memferry_sys::readiness::Readiness;

use crate::buffers::{IntoPieces, IntoPiecesMut, Source};
use crate::builder::Builder;
use crate::connect::listener::Listener;
use crate::connect::parse_name;
use crate::connect::reach::Reach;
use crate::envelope::Wanted;
use crate::error::{ConnectError, Error};
use crate::operation::{self, Failed, Operation, OwnedOperation, Scope};
use crate::pieces::Piece;
use crate::port::{Peer, Port, Received};
use crate::window::{RawMemory, RemoteWindow, Rights, Window, WindowHandle};

/// All bits of a tag count.
pub const TAG_ALL: u64 = u64::MAX;
/// No bit of a tag counts: any tag will do.
pub const TAG_ANY: u64 = 0;

/// One process's address for tagged messages with many peers. Cheap to clone; clones are the same
/// endpoint, which closes when the last of them is dropped.
///
/// ```
/// use memferry_message::{Endpoint, TAG_ALL};
///
/// let here = Endpoint::open("doc-here")?;
/// let there = Endpoint::open("doc-there")?;
/// # let there_name = "doc-there";
/// let task = std::thread::spawn(move || {
///     let mut buffer = [0; 5];
///     let received = there.recv(memferry_message::Source::Any, 7, TAG_ALL, &mut buffer)?;
///     assert_eq!((received.length, &buffer), (5, b"hello"));
///     Ok::<_, memferry_message::Error>(())
/// });
/// let peer = here.connect("doc-there")?;
/// here.send(peer, 7, b"hello")?;
/// task.join().unwrap()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    port: Arc<Port>,
    name: String,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { port, name } = &*self.inner;
        f.debug_struct("Endpoint").field("name", name).field("port", port).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.port.close();
    }
}

impl Builder {
    /// Opens an endpoint under a name that others connect to. A name with a slash is a path in the
    /// file system; any other vanishes with the process.
    pub fn open(&self, name: &str) -> Result<Endpoint, Error> {
        let settings = self.settings()?;
        let listener = Listener::bind(&parse_name(name)?, settings.allowed.clone())?;
        let background = settings.background;
        let port = Port::new(settings, name.to_owned(), Some(listener));
        // Every connection will need it.
        port.enter().board().map_err(ConnectError::system("making shared memory"))?;
        if background {
            port.run_in_background()?;
        }
        Ok(Endpoint { inner: Arc::new(Inner { port, name: name.to_owned() }) })
    }
}

impl Endpoint {
    /// Opens an endpoint with the usual settings.
    pub fn open(name: &str) -> Result<Self, Error> {
        Builder::new().open(name)
    }

    /// An endpoint with settings.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// The name that others connect to.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    pub(crate) fn port(&self) -> &Arc<Port> {
        &self.inner.port
    }

    /// Connects to another endpoint by its name. If it is connected already, by either side and by
    /// whatever name of its socket, that connection is used. The name leads to the process that
    /// listens there, not to a peer that only says so.
    pub fn connect(&self, name: &str) -> Result<Peer, Error> {
        self.port().connect(name)
    }

    /// This endpoint as a peer of itself.
    pub fn myself(&self) -> Result<Peer, Error> {
        self.port().check_fork()?;
        Ok(self.port().enter().peer_to_self()?)
    }

    /// All connected peers, those included that connected to this endpoint.
    pub fn peers(&self) -> Vec<Peer> {
        if self.port().check_fork().is_err() {
            return Vec::new();
        }
        let mut state = self.port().enter();
        state.check_peers(true);
        state.all_peers()
    }

    /// The name under which a peer listens, or listened while it was there: the one that it was
    /// called by, or that it gave when it called. A peer of another user that is not the process
    /// which listens there has none.
    pub fn name_of(&self, peer: Peer) -> Result<String, Error> {
        self.port().check_fork()?;
        self.port().enter().name_of(peer)
    }

    /// What this process can do with the memory of a peer, and what stands in the way if it cannot.
    pub fn reach(&self, peer: Peer) -> Result<Reach, Error> {
        self.port().check_fork()?;
        Ok(self.port().enter().facts_of(peer)?.reach)
    }

    /// Sends a buffer, or several pieces as one message, and returns when the memory may be used
    /// again.
    pub fn send<'a>(&self, to: Peer, tag: u64, buffer: impl IntoPieces<'a>) -> Result<(), Error> {
        let pieces = buffer.into_pieces();
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        unsafe { self.port().send(to, tag, pieces.as_slice()) }
    }

    /// Receives a message into a buffer, or into several pieces. Only bits of the tag that are set
    /// in the mask count ([`TAG_ALL`], [`TAG_ANY`]).
    pub fn recv<'a>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: impl IntoPiecesMut<'a>,
    ) -> Result<Received, Error> {
        let pieces = buffer.into_pieces_mut();
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        unsafe { self.port().receive(from.into(), tag, mask, pieces.as_slice()) }
    }

    /// Begins sending an owned buffer, which comes back at the end.
    pub fn isend<B: OwnedSource>(
        &self,
        to: Peer,
        tag: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.isend_raw(to, tag, address, length) }
        })
    }

    /// Begins receiving into an owned buffer, which comes back at the end.
    pub fn irecv<B: OwnedTarget>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, true, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.irecv_raw(from, tag, mask, address, length) }
        })
    }

    /// Runs `f` with a scope in which borrowed memory can be sent and received into. Returns when
    /// `f` has returned and every message of the scope is over. Sends are waited for; receives that
    /// no message has met by then are cancelled.
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
    ) -> R {
        operation::scope(self.port(), f)
    }

    /// Begins sending `length` bytes of raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid and unchanged. Dropping the handle
    /// changes nothing of this.
    pub unsafe fn isend_raw(
        &self,
        to: Peer,
        tag: u64,
        address: *const u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        unsafe { self.isend_pieces(to, tag, &[Piece::source(address, length)]) }
    }

    /// Begins sending several pieces of raw memory as one message.
    ///
    /// # Safety
    /// As for [`Endpoint::isend_raw`], for every piece.
    pub unsafe fn isend_pieces(
        &self,
        to: Peer,
        tag: u64,
        pieces: &[Piece],
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.port().begin_send(to, tag, pieces) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Begins receiving into raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid for writes, and nobody else may
    /// access it. Dropping the handle changes nothing of this.
    pub unsafe fn irecv_raw(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        unsafe { self.irecv_pieces(from, tag, mask, &[Piece::target(address, length)]) }
    }

    /// Begins receiving one message into several pieces of raw memory.
    ///
    /// # Safety
    /// As for [`Endpoint::irecv_raw`], for every piece.
    pub unsafe fn irecv_pieces(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        pieces: &[Piece],
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.port().begin_receive(from.into(), tag, mask, pieces) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Exposes the memory of a buffer to peers, who put to it and get from it as `rights` say,
    /// without a word from this process. In a [`ShareableBuffer`](crate::ShareableBuffer) they need
    /// no system call. The buffer comes back from [`Window::withdraw`].
    pub fn expose<B: OwnedTarget>(
        &self,
        buffer: B,
        rights: Rights,
    ) -> Result<Window<B>, Failed<B>> {
        self.port().expose(buffer, rights, None)
    }

    /// Exposes raw memory.
    ///
    /// # Safety
    /// The memory must be valid for reads and writes until the window is withdrawn or dropped.
    /// Whoever accesses it meanwhile must expect that peers do too.
    pub unsafe fn expose_raw(
        &self,
        address: *mut u8,
        length: usize,
        rights: Rights,
    ) -> Result<Window<RawMemory>, Error> {
        // SAFETY: passed on.
        let memory = unsafe { RawMemory::new(address, length) };
        self.port().expose(memory, rights, None).map_err(|failed| failed.error)
    }

    /// Attaches a window that a peer has exposed. Connected peers alone can; putting and getting
    /// needs nothing from the peer.
    pub fn attach(&self, peer: Peer, handle: WindowHandle) -> Result<RemoteWindow, Error> {
        self.port().attach(peer, handle)
    }

    /// What the lookup of windows has counted so far; `None` before the first was attached.
    pub fn lookup_counters(&self) -> Option<Counters> {
        self.port().lookup_counters()
    }

    /// The memory that the lookup of windows takes; `None` before the first was attached.
    pub fn lookup_memory(&self) -> Option<MemoryUse> {
        self.port().lookup_memory()
    }

    /// The first message that a receive would take, if one has arrived or waits at its sender.
    pub fn iprobe(
        &self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
    ) -> Result<Option<Received>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().enter();
        state.look_around();
        state.probe(&Wanted::tagged(from, tag, mask))
    }

    /// Waits for a message that a receive would take.
    pub fn probe(&self, from: impl Into<Source>, tag: u64, mask: u64) -> Result<Received, Error> {
        self.port().check_fork()?;
        let wanted = Wanted::tagged(from, tag, mask);
        let found = self.port().block(true, None, |state| state.probe(&wanted).transpose());
        found.expect("without a deadline it ends")
    }

    /// Moves messages on; returns whether anything moved. Calls that wait, test or probe do this
    /// too; those that begin a message only take in what came.
    pub fn progress(&self) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        self.port().enter().look_around()
    }

    /// Moves messages on until something moves, at most so long.
    pub fn progress_timeout(&self, timeout: Duration) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        let deadline = Instant::now().checked_add(timeout);
        let state = self.port().enter();
        let before = state.moves();
        let moved = |state: &mut crate::port::State| (state.moves() != before).then_some(());
        self.port().block_entered(state, true, deadline, moved).is_some()
    }

    /// A descriptor for event loops: readable while there is something to do or to take, which
    /// [`Endpoint::progress`], a test or a receive then does.
    pub fn watch(&self) -> Result<Watch, Error> {
        self.port().check_fork()?;
        self.port().watch().map(Watch)
    }

    /// Closes the endpoint for all clones: operations under way end as closed, peers are told.
    /// A receive that a peer is writing to ends when it is done, which is waited for for a moment:
    /// see [`Endpoint::is_busy`].
    pub fn close(self) {
        self.port().close();
    }

    /// After a close: whether memory of operations is in use although they have ended. A peer that
    /// was stopped while it wrote there may go on, or an access to a peer's memory has not come back.
    /// Raw memory must stay valid until this says no.
    pub fn is_busy(&self) -> bool {
        self.port().is_busy()
    }
}

/// A descriptor that is readable while an endpoint or link has something to do.
#[derive(Debug, Clone)]
pub struct Watch(pub(crate) Arc<Readiness>);

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
