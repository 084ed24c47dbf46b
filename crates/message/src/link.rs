//! Links: two connected processes that post reads and writes, matched in order.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use memferry_copy::{OwnedSource, OwnedTarget};

use crate::buffers::{IntoPieces, IntoPiecesMut, Source};
use crate::builder::Builder;
use crate::connect::hello::{Identity, Refusal};
use crate::connect::listener::Listener as Ear;
use crate::connect::parse_name;
use crate::endpoint::Watch;
use crate::envelope::Wanted;
use crate::error::{ConnectError, Error};
use crate::operation::{self, Failed, Operation, OwnedOperation};
use crate::pieces::Piece;
use crate::port::{Begun, Peer, Port, Settings};
use crate::quarantine;
use crate::window::{RawMemory, RemoteWindow, Rights, Window, WindowHandle};

/// A name that others connect links to.
pub struct Listener {
    ear: std::sync::Mutex<Ear>,
    settings: Settings,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

impl Builder {
    /// Takes a name for links. A name with a slash is a path in the file system; any other
    /// vanishes with the process.
    pub fn listen(&self, name: &str) -> Result<Listener, Error> {
        let settings = self.settings()?;
        let ear = Ear::bind(&parse_name(name)?, settings.allowed.clone())?;
        Ok(Listener { ear: std::sync::Mutex::new(ear), settings })
    }

    /// Connects a link to a name that another process listens on.
    pub fn connect_link(&self, name: &str) -> Result<Link, Error> {
        let port = Port::new(self.settings()?, String::new(), None);
        let peer = port.connect(name)?;
        Link::over(port, peer)
    }
}

impl Listener {
    /// Takes a name with the usual settings.
    pub fn bind(name: &str) -> Result<Self, Error> {
        Builder::new().listen(name)
    }

    /// Waits for the next process that connects.
    pub fn accept(&self) -> Result<Link, Error> {
        let watch = self.watch()?;
        loop {
            if let Some(link) = self.poll_accept()? {
                return Ok(link);
            }
            watch.0.wait(Some(Duration::from_millis(100)));
        }
    }

    /// The next process that has connected, if one has.
    pub fn poll_accept(&self) -> Result<Option<Link>, Error> {
        let port = Port::new(self.settings.clone(), String::new(), None);
        let identity: Identity = port.enter().own_identity();
        let mut ear = memferry_sys::sync::lock(&self.ear);
        let Some(caller) = ear.poll(identity, self.settings.cross_memory) else { return Ok(None) };
        drop(ear);
        if quarantine::has_many_ended(caller.pid()) {
            caller.refuse(identity, Refusal::Full);
            return Ok(None);
        }
        let board = port.enter().board();
        let board = match board {
            Ok(board) => board,
            Err(error) => {
                caller.refuse(identity, Refusal::for_memory(&error));
                return Err(ConnectError::system("making shared memory")(error).into());
            }
        };
        let Some(met) = caller.welcome(identity, board.as_fd()) else { return Ok(None) };
        let peer = port.enter().add(met)?;
        Link::over(port, peer).map(Some)
    }

    /// A descriptor for event loops: readable when a process may have connected.
    pub fn watch(&self) -> Result<Watch, Error> {
        let readiness = memferry_sys::sync::lock(&self.ear).watch();
        Ok(readiness.map(Watch).map_err(ConnectError::system("watching a listener"))?)
    }

    /// The descriptor of [`Listener::watch`] is never readable again, and no copy of it is.
    pub fn unwatch(&self) {
        memferry_sys::sync::lock(&self.ear).unwatch();
    }
}

/// Two connected processes: the n-th write of one meets the n-th read of the other. Cheap to
/// clone; closes when the last clone is dropped.
#[derive(Clone)]
pub struct Link {
    inner: Arc<Inner>,
}

struct Inner {
    port: Arc<Port>,
    peer: Peer,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("port", self.port()).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.port.close();
    }
}

/// A link has one kind of message.
const TAG: u64 = 0;

impl Link {
    /// Connects to a name with the usual settings.
    pub fn connect(name: &str) -> Result<Self, Error> {
        Builder::new().connect_link(name)
    }

    fn over(port: Arc<Port>, peer: Peer) -> Result<Self, Error> {
        if port.enter().wants_background() {
            port.run_in_background()?;
        }
        Ok(Self { inner: Arc::new(Inner { port, peer }) })
    }

    fn port(&self) -> &Arc<Port> {
        &self.inner.port
    }

    fn source(&self) -> Source {
        Source::Peer(self.inner.peer)
    }

    /// Writes a buffer, or several pieces as one message, and returns when the memory may be used
    /// again.
    pub fn write<'a>(&self, buffer: impl IntoPieces<'a>) -> Result<(), Error> {
        let pieces = buffer.into_pieces();
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        unsafe { self.port().send(self.inner.peer, TAG, pieces.as_slice()) }
    }

    /// Reads what the matching write of the other side wrote; returns its length. A buffer that
    /// is too short gets what fits and [`Error::Truncated`].
    pub fn read<'a>(&self, buffer: impl IntoPiecesMut<'a>) -> Result<u64, Error> {
        let pieces = buffer.into_pieces_mut();
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        let received =
            unsafe { self.port().receive(self.source(), TAG, u64::MAX, pieces.as_slice()) };
        received.map(|received| received.length)
    }

    unsafe fn begin_write(&self, pieces: &[Piece]) -> Result<Begun, Error> {
        // SAFETY: passed on.
        unsafe { self.port().begin_send(self.inner.peer, TAG, pieces) }
    }

    unsafe fn begin_read(&self, pieces: &[Piece]) -> Result<Begun, Error> {
        // SAFETY: passed on.
        unsafe { self.port().begin_receive(self.source(), TAG, u64::MAX, pieces) }
    }

    /// Begins writing an owned buffer, which comes back at the end.
    pub fn iwrite<B: OwnedSource>(&self, buffer: B) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.iwrite_raw(address, length) }
        })
    }

    /// Begins reading into an owned buffer, which comes back at the end.
    pub fn iread<B: OwnedTarget>(&self, buffer: B) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, true, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.iread_raw(address, length) }
        })
    }

    /// Begins writing raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid and unchanged. Dropping the handle
    /// changes nothing of this.
    pub unsafe fn iwrite_raw(&self, address: *const u8, length: usize) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.begin_write(&[Piece::source(address, length)]) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Begins reading into raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid for writes, and nobody else may
    /// access it. Dropping the handle changes nothing of this.
    pub unsafe fn iread_raw(&self, address: *mut u8, length: usize) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.begin_read(&[Piece::target(address, length)]) }?;
        Ok(Operation::new(self.port(), begun))
    }

    /// Runs `f` with a scope in which borrowed memory can be handed over: `isend` to
    /// [`Link::peer`] is a write, `irecv` from it a read.
    pub fn scope<'env, R>(
        &self,
        f: impl for<'scope> FnOnce(&'scope operation::Scope<'scope, 'env>) -> R,
    ) -> R {
        operation::scope(self.port(), f)
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

    /// Attaches a window that the other side has exposed.
    pub fn attach(&self, handle: WindowHandle) -> Result<RemoteWindow, Error> {
        self.port().attach(self.inner.peer, handle)
    }

    /// The other side.
    pub fn peer(&self) -> Peer {
        self.inner.peer
    }

    /// The length of the message that the next read will get, if it waits already; moves messages
    /// on, and takes nothing.
    pub fn peek(&self) -> Result<Option<u64>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().enter();
        state.look_around();
        let found = state.probe(&Wanted::tagged(self.inner.peer, TAG, u64::MAX))?;
        Ok(found.map(|message| message.length))
    }

    /// Moves messages on; returns whether anything moved. Calls that wait, test or probe do this
    /// too; those that begin a message only take in what came.
    pub fn progress(&self) -> bool {
        if self.port().check_fork().is_err() {
            return false;
        }
        self.port().enter().look_around()
    }

    /// A descriptor for event loops: readable while there is something to do or to take.
    pub fn watch(&self) -> Result<Watch, Error> {
        self.port().check_fork()?;
        self.port().watch().map(Watch)
    }

    /// The descriptor of [`Link::watch`] is never readable again, and no copy of it is: for whoever closes
    /// it while an event loop may still know a copy.
    pub fn unwatch(&self) {
        if self.port().check_fork().is_ok() {
            self.port().unwatch();
        }
    }

    /// Closes the link for all clones: operations under way end as closed, the other side is told.
    /// A receive that the other side is writing to ends when it is done, which is waited for for a
    /// moment: see [`Link::is_busy`].
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
