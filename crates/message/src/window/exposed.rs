//! The owner's side of a window: exposing memory, using it meanwhile, waiting for notifications,
//! and taking it back.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_copy::OwnedTarget;
use memferry_memory::handle::BufferHandle;
use memferry_sys::copy;
use memferry_sys::shared_memory::Access;

use super::board::{Board, Entry, Name, NoRecord};
use super::{Rights, WindowHandle};
use crate::error::{ConnectError, Error, ValidationError};
use crate::operation::Held;
use crate::pieces::Piece;
use crate::port::{Peer, Port};
use crate::quarantine;
use crate::region;

/// How long a peer may take to finish the piece that it copies when a window is withdrawn.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same when it is dropped: its memory can wait for the peer without anybody.
const DROP_PATIENCE: Duration = Duration::from_millis(10);

/// An exposed window as the port remembers it, for peers that connect later.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exposure {
    pub(crate) name: Name,
    pub(crate) piece: Piece,
    pub(crate) access: Access,
}

/// A variable of a window that a thread waits for, and the value that was last seen by anybody.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variable {
    address: *const AtomicU64,
    seen: u64,
    waiter: u64,
}

// SAFETY: the variable lies in a window that the waiting thread borrows until it takes this back.
unsafe impl Send for Variable {}

impl Variable {
    /// Whether it has changed since it was last looked at.
    pub(crate) fn take_change(&mut self) -> bool {
        let now = self.load();
        now != std::mem::replace(&mut self.seen, now)
    }

    fn load(&self) -> u64 {
        // SAFETY: as above; Acquire: whoever sees the value sees the data that came before it.
        unsafe { (*self.address).load(Ordering::Acquire) }
    }
}

/// Memory that is exposed to peers. They put and get while this process does what it likes.
///
/// Dropping it withdraws the window.
pub struct Window<B: Send + 'static = Vec<u8>> {
    port: Arc<Port>,
    board: Arc<Board>,
    name: Name,
    handle: WindowHandle,
    address: *mut u8,
    length: usize,
    held: Option<Held<B>>,
}

// SAFETY: the address is that of the buffer, which is `Send`.
unsafe impl<B: Send + 'static> Send for Window<B> {}
// SAFETY: the memory is shared with other processes from the moment it is exposed, so no reference to
// its bytes is ever made: it is reached by raw copies and atomics, whose result under contention is
// bytes of both. Threads of this process that copy to the same bytes at the same time are in no other
// position than a peer that does.
unsafe impl<B: Send + 'static> Sync for Window<B> {}

impl<B: Send + 'static> fmt::Debug for Window<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("name", &self.name)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// Memory behind a raw pointer, for [`crate::Endpoint::expose_raw`].
#[derive(Debug)]
pub struct RawMemory {
    address: *mut u8,
    length: usize,
}

// SAFETY: whoever made it vouches for the memory, wherever it is used.
unsafe impl Send for RawMemory {}

// SAFETY: whoever made it vouches that the memory stays where it is.
unsafe impl OwnedTarget for RawMemory {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.address, self.length)
    }
}

impl RawMemory {
    /// # Safety
    /// The memory must be valid for reads and writes until the window is withdrawn.
    pub(crate) unsafe fn new(address: *mut u8, length: usize) -> Self {
        Self { address, length }
    }
}

/// A window that a peer did not let go of in time: it is stopped in the middle of a copy. Nobody
/// can begin another access, but the memory is not free yet.
pub struct StillAccessed<B: Send + 'static> {
    /// The peer.
    pub peer: Option<Peer>,
    /// The window, to be withdrawn again later.
    pub window: Window<B>,
}

impl<B: Send + 'static> fmt::Debug for StillAccessed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B: Send + 'static> fmt::Display for StillAccessed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a peer ({:?}) is stopped in the middle of an access: let it run or end it, then \
             withdraw the window again",
            self.peer
        )
    }
}

impl<B: Send + 'static> std::error::Error for StillAccessed<B> {}

impl Port {
    /// Exposes the memory of a buffer.
    pub(crate) fn expose<B: OwnedTarget>(
        self: &Arc<Self>,
        buffer: B,
        rights: Rights,
        key: Option<u64>,
    ) -> Result<Window<B>, crate::Failed<B>> {
        let mut held = Held::new(buffer);
        let (address, length) = held.get_mut().target();
        match self.expose_memory(address, length, rights, key) {
            Ok((board, name, handle)) => Ok(Window {
                port: self.clone(),
                board,
                name,
                handle,
                address,
                length,
                held: Some(held),
            }),
            Err(error) => Err(crate::Failed { error, buffer: Some(held.into_inner()) }),
        }
    }

    fn expose_memory(
        &self,
        address: *mut u8,
        length: usize,
        rights: Rights,
        key: Option<u64>,
    ) -> Result<(Arc<Board>, Name, WindowHandle), Error> {
        self.check_fork()?;
        if address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        let access = if rights.include(Rights::WRITE) { Access::Write } else { Access::Read };
        let piece = Piece::target(address, length);
        let mut state = self.enter();
        if state.is_closed() {
            return Err(Error::Closed);
        }
        let board = state.board().map_err(ConnectError::system("making shared memory"))?;
        let region = region::find(address, length).map_or(0, |region| region.number);
        let (start, bytes) = (address as u64, length as u64);
        let entry = Entry { address: start, length: bytes, region, rights, key };
        let name = board.open(entry).map_err(|error| match error {
            NoRecord::Full => Error::from(ValidationError::TooManyWindows),
            NoRecord::System(error) => ConnectError::system("making shared memory")(error).into(),
        })?;
        state.show_to_peers(Exposure { name, piece, access });
        let process = state.own_public_number();
        let handle = BufferHandle::new(process, name.number, name.generation)
            .expect("a board begins with generation one");
        Ok((board, name, WindowHandle(handle)))
    }
}

impl<B: Send + 'static> Window<B> {
    /// The name of the window, to be sent to peers.
    pub fn handle(&self) -> WindowHandle {
        self.handle
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The first byte. Peers may change what is there at any time that their rights permit.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Copies out of the window. What peers put meanwhile may be in it in part.
    ///
    /// # Panics
    /// When the range is outside the window.
    pub fn read(&self, offset: usize, buffer: &mut [u8]) {
        self.check_inside(offset, buffer.len());
        // SAFETY: inside the window's memory, which lives as long as self, and apart from the
        // buffer, which is borrowed.
        unsafe { copy::cached(buffer.as_mut_ptr(), self.address.add(offset), buffer.len()) };
    }

    /// Copies into the window.
    ///
    /// # Panics
    /// When the range is outside the window.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.check_inside(offset, data.len());
        // SAFETY: as in `read`.
        unsafe { copy::cached(self.address.add(offset), data.as_ptr(), data.len()) };
    }

    /// The variable at an offset. Whoever sees a value that a peer's notification has set sees the
    /// data that was put before it.
    ///
    /// # Panics
    /// When it is outside the window or not on a boundary of eight.
    pub fn load(&self, offset: usize) -> u64 {
        self.variable(offset).load(Ordering::Acquire)
    }

    /// Sets the variable at an offset.
    ///
    /// # Panics
    /// As [`Window::load`].
    pub fn store(&self, offset: usize, value: u64) {
        self.variable(offset).store(value, Ordering::Release);
    }

    /// Waits until a variable has a value that `is_it` accepts, at most so long; `None` if it has
    /// not by then. Looks for a while, then sleeps. `is_it` must not call the endpoint or link.
    /// When the last connected peer goes, or the peer of a link is gone, nobody is left to set it:
    /// [`Error::PeerGone`].
    ///
    /// # Panics
    /// As [`Window::load`].
    pub fn wait(
        &self,
        offset: usize,
        timeout: Option<Duration>,
        mut is_it: impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        self.port.check_fork()?;
        let word = self.variable(offset);
        let waiter = NEXT.fetch_add(1, Ordering::Relaxed);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.port.enter();
        let seen = word.load(Ordering::Acquire);
        if is_it(seen) {
            return Ok(Some(seen));
        }
        state.variables.push(Variable { address: word, seen, waiter });
        // A link has one peer; to an endpoint others may come while it has none.
        let mut had_peers = !state.takes_callers();
        let found = self.port.block_entered(state, true, deadline, |state| {
            let variable = state.variables.iter_mut().find(|v| v.waiter == waiter)?;
            variable.seen = variable.load();
            let seen = variable.seen;
            // A panic goes on when everything is as it was before: nobody may look at the variable
            // when this window is gone.
            match catch_unwind(AssertUnwindSafe(|| is_it(seen))) {
                Ok(true) => Some(Ok(Ok(seen))),
                Ok(false) if state.is_closed() => Some(Ok(Err(Error::Closed))),
                Ok(false) => {
                    let last = state.last_gone();
                    had_peers |= last.is_none();
                    last.filter(|_| had_peers).map(|gone| Ok(Err(Error::PeerGone(gone))))
                }
                Err(panic) => Some(Err(panic)),
            }
        });
        self.port.enter().variables.retain(|variable| variable.waiter != waiter);
        match found {
            Some(Err(panic)) => resume_unwind(panic),
            Some(Ok(found)) => found.map(Some),
            None => Ok(None),
        }
    }

    /// Whether a peer is in the middle of an access.
    pub fn is_accessed(&self) -> bool {
        self.port.check_fork().is_ok() && self.port.enter().visitor(self.name).is_some()
    }

    /// Takes the window back. From now on nobody can access it; whoever is in the middle of a piece
    /// of an access is waited for, and finds the window closed after that. Returns the buffer.
    pub fn withdraw(mut self) -> Result<B, Box<StillAccessed<B>>> {
        match self.close(PATIENCE) {
            Ok(()) => Ok(self.held.take().expect("it is taken once").into_inner()),
            Err(peer) => Err(Box::new(StillAccessed { peer, window: self })),
        }
    }

    /// Closes the window and waits for accesses under way. The error says who does not end.
    fn close(&mut self, patience: Duration) -> Result<(), Option<Peer>> {
        if self.port.check_fork().is_err() {
            // The window is the parent's, and so is its board; the memory here is a copy.
            return Ok(());
        }
        self.board.close(self.name);
        let began = Instant::now();
        loop {
            let visitor = self.port.enter().visitor(self.name);
            let Some(visitor) = visitor else { break };
            if began.elapsed() > patience {
                return Err(visitor);
            }
            std::thread::yield_now();
        }
        self.port.enter().exposures.retain(|exposure| exposure.name != self.name);
        self.board.give_back(self.name);
        Ok(())
    }

    fn check_inside(&self, offset: usize, length: usize) {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.length),
            "{length} bytes at {offset} are outside a window of {} bytes",
            self.length
        );
    }

    fn variable(&self, offset: usize) -> &AtomicU64 {
        self.check_inside(offset, 8);
        let word = self.address.wrapping_add(offset).cast::<AtomicU64>();
        assert!(word.is_aligned(), "the variable at {offset} is not on a boundary of eight bytes");
        // SAFETY: inside the window's memory, aligned, alive as long as self; shared as atomics.
        unsafe { &*word }
    }
}

impl<B: Send + 'static> Drop for Window<B> {
    fn drop(&mut self) {
        if self.held.is_none() || self.close(DROP_PATIENCE).is_ok() {
            return;
        }
        let mut state = self.port.enter();
        state.exposures.retain(|exposure| exposure.name != self.name);
        let visits = state.visits(self.name);
        drop(state);
        let (board, name) = (self.board.clone(), self.name);
        quarantine::keep(visits, Box::new(Left { _held: self.held.take(), board, name }));
    }
}

/// The memory of a window that was dropped while a peer was inside.
struct Left<B> {
    _held: Option<Held<B>>,
    board: Arc<Board>,
    name: Name,
}

impl<B> Drop for Left<B> {
    fn drop(&mut self) {
        self.board.give_back(self.name);
    }
}
