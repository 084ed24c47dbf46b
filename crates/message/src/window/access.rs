//! The calls on a window of a peer: put, get, and their order.

use std::sync::Arc;

use memferry_copy::{OwnedSource, OwnedTarget};

use super::board::{Entry, Name};
use super::carry::{Direction, Job, Patience};
use super::peer_memory::PeerMemory;
use super::windows::Windows;
use super::{Rights, WindowHandle};
use crate::error::{Error, ValidationError};
use crate::operation::{Failed, Operation, OwnedOperation};
use crate::pieces::Piece;
use crate::port::{Begun, Peer, Port, State};
use crate::report::{Ending, Report, ReportKind};

/// An access up to this size that finds its translation is carried out when it is begun.
const AT_ONCE_BYTES: usize = 16 << 10;

/// A variable of a window that is set when the data of a put is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notify {
    /// Where it is in the window: eight bytes, on a boundary of eight in the owner's memory.
    pub offset: u64,
    /// What it is set to.
    pub value: u64,
}

/// A window of a peer. Accesses to one peer are carried out in the order in which they were begun;
/// the peer need not call anything. Cheap to clone.
#[derive(Clone)]
pub struct RemoteWindow {
    pub(crate) port: Arc<Port>,
    windows: Arc<Windows>,
    memory: Arc<PeerMemory>,
    peer: Peer,
    name: Name,
    entry: Entry,
}

impl std::fmt::Debug for RemoteWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteWindow")
            .field("peer", &self.peer.index)
            .field("name", &self.name)
            .field("length", &self.entry.length)
            .field("rights", &self.entry.rights)
            .finish_non_exhaustive()
    }
}

impl Port {
    /// Attaches a window of a peer.
    pub(crate) fn attach(
        self: &Arc<Self>,
        peer: Peer,
        handle: WindowHandle,
    ) -> Result<RemoteWindow, Error> {
        self.attach_found(peer, |state, _| {
            if handle.0.process() != state.public_number(peer)? {
                return Err(ValidationError::ForeignHandle.into());
            }
            Ok(handle.name())
        })
    }

    /// Attaches the window of a peer that its owner calls by a key.
    pub(crate) fn attach_key(
        self: &Arc<Self>,
        peer: Peer,
        key: u64,
    ) -> Result<RemoteWindow, Error> {
        self.attach_found(peer, |_, memory| memory.board.find(key).ok_or(Error::Withdrawn))
    }

    fn attach_found(
        self: &Arc<Self>,
        peer: Peer,
        find: impl FnOnce(&State, &PeerMemory) -> Result<Name, Error>,
    ) -> Result<RemoteWindow, Error> {
        self.check_fork()?;
        let windows = self.windows()?;
        let mut state = self.enter();
        // What the owner has shared by now.
        state.hear();
        let memory = state.peer_memory(peer, &windows)?;
        let name = find(&state, &memory);
        drop(state);
        let name = match name {
            Err(Error::Withdrawn) => return memory.check_now().and(Err(Error::Withdrawn)),
            name => name?,
        };
        let Some((entry, is_new)) = memory.cover(name) else {
            return memory.check_now().and(Err(Error::Withdrawn));
        };
        if !memory.can_reach(entry.region) {
            return Err(memory.unreachable());
        }
        if is_new && !windows.look_up_anew(&memory, entry.address, entry.length) {
            return Err(Error::Unreachable(None));
        }
        Ok(RemoteWindow { port: self.clone(), windows, memory, peer, name, entry })
    }
}

impl RemoteWindow {
    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.entry.length
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entry.length == 0
    }

    /// Where it begins in the owner's memory.
    pub fn address(&self) -> u64 {
        self.entry.address
    }

    /// Whether its owner has not withdrawn it, as far as can be said from here.
    pub fn is_open(&self) -> bool {
        self.memory.board.read(self.name).is_some()
    }

    /// What may be done with it.
    pub fn rights(&self) -> Rights {
        self.entry.rights
    }

    /// Whose it is.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Copies data into the window, and returns when it is there.
    pub fn put(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let job = self.put_job(offset, data.as_ptr(), data.len(), None)?;
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        unsafe { self.carry(job) }
    }

    /// Copies data into the window, then sets a variable of it: whoever sees the value sees the
    /// data. The owner can sleep until then: [`crate::Window::wait`].
    pub fn put_notify(&self, offset: u64, data: &[u8], notify: Notify) -> Result<(), Error> {
        let job = self.put_job(offset, data.as_ptr(), data.len(), Some(notify))?;
        // SAFETY: as in `put`.
        unsafe { self.carry(job) }
    }

    /// Copies out of the window, and returns when the data is here.
    pub fn get(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let job = self.get_job(offset, buffer.as_mut_ptr(), buffer.len())?;
        // SAFETY: the memory is borrowed until this returns, which is after the end.
        unsafe { self.carry(job) }
    }

    /// Begins a put of an owned buffer, which comes back at the end.
    pub fn iput<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        self.iput_owned(offset, buffer, None)
    }

    /// The same, with a variable that is set at the end.
    pub fn iput_notify<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
        notify: Notify,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        self.iput_owned(offset, buffer, Some(notify))
    }

    fn iput_owned<B: OwnedSource>(
        &self,
        offset: u64,
        buffer: B,
        notify: Option<Notify>,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.source();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.iput_raw(offset, address, length, notify) }
        })
    }

    /// Begins a get into an owned buffer, which comes back at the end.
    pub fn iget<B: OwnedTarget>(
        &self,
        offset: u64,
        buffer: B,
    ) -> Result<OwnedOperation<B>, Failed<B>> {
        OwnedOperation::begin(buffer, false, |buffer| {
            let (address, length) = buffer.target();
            // SAFETY: the operation owns the buffer and gives it back only after the end.
            unsafe { self.iget_raw(offset, address, length) }
        })
    }

    /// Begins a put of raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid and unchanged. Dropping the handle
    /// changes nothing of this.
    pub unsafe fn iput_raw(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<Notify>,
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.begin_put(offset, address, length, notify) }?;
        Ok(Operation::new(&self.port, begun))
    }

    /// Begins a get into raw memory.
    ///
    /// # Safety
    /// Until the operation is over, the memory must stay valid for writes, and nobody else may
    /// access it. Dropping the handle changes nothing of this.
    pub unsafe fn iget_raw(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Operation, Error> {
        // SAFETY: passed on.
        let begun = unsafe { self.begin_get(offset, address, length) }?;
        Ok(Operation::new(&self.port, begun))
    }

    /// Begins a put that ends in a report of the endpoint, or at once, in this one (nothing for a
    /// quiet one that ended well).
    ///
    /// # Safety
    /// As for [`RemoteWindow::iput_raw`].
    pub unsafe fn post_put(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        ending: Ending,
    ) -> Result<Option<Report>, Error> {
        let job = self.put_job(offset, address, length, None)?;
        // SAFETY: passed on.
        let begun = unsafe { self.begin(job, Some(ending)) }?;
        Ok(self.reported(ReportKind::Put, begun, length, ending))
    }

    /// Begins a get that ends in a report, as [`RemoteWindow::post_put`] does.
    ///
    /// # Safety
    /// As for [`RemoteWindow::iget_raw`].
    pub unsafe fn post_get(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
        ending: Ending,
    ) -> Result<Option<Report>, Error> {
        let job = self.get_job(offset, address, length)?;
        // SAFETY: passed on.
        let begun = unsafe { self.begin(job, Some(ending)) }?;
        Ok(self.reported(ReportKind::Get, begun, length, ending))
    }

    fn reported(
        &self,
        kind: ReportKind,
        begun: Begun,
        length: usize,
        ending: Ending,
    ) -> Option<Report> {
        let Begun::Over(outcome) = begun else { return None };
        let is_told = outcome.is_err() || !ending.quiet;
        is_told.then(|| Report {
            peer: Some(self.peer),
            length: length as u64,
            ..Report::new(kind, ending.context, outcome.map(drop))
        })
    }

    /// # Safety
    /// As for [`RemoteWindow::iput_raw`].
    pub(crate) unsafe fn begin_put(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<Notify>,
    ) -> Result<Begun, Error> {
        let job = self.put_job(offset, address, length, notify)?;
        // SAFETY: passed on.
        unsafe { self.begin(job, None) }
    }

    /// # Safety
    /// As for [`RemoteWindow::iget_raw`].
    pub(crate) unsafe fn begin_get(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<Begun, Error> {
        let job = self.get_job(offset, address, length)?;
        // SAFETY: passed on.
        unsafe { self.begin(job, None) }
    }

    /// Waits until everything that was begun before, on any window of this peer, is over: puts are
    /// in the owner's memory. How each ended, its own handle says.
    pub fn fence(&self) -> Result<(), Error> {
        let job = self.job(Direction::Get, 0, Piece::source(std::ptr::null(), 0), None);
        // SAFETY: no memory.
        unsafe { self.carry(job) }
    }

    fn job(&self, direction: Direction, offset: u64, local: Piece, notify: Option<Notify>) -> Job {
        Job { window: self.name, direction, offset, local, done: 0, notify, number: None }
    }

    fn put_job(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<Notify>,
    ) -> Result<Job, Error> {
        self.check(Direction::Put, offset, address, length)?;
        if let Some(notify) = notify {
            self.check_inside(notify.offset, 8)?;
            if !self.entry.address.wrapping_add(notify.offset).is_multiple_of(8) {
                return Err(ValidationError::MisalignedVariable(notify.offset).into());
            }
        }
        Ok(self.job(Direction::Put, offset, Piece::source(address, length), notify))
    }

    fn get_job(&self, offset: u64, address: *mut u8, length: usize) -> Result<Job, Error> {
        self.check(Direction::Get, offset, address, length)?;
        Ok(self.job(Direction::Get, offset, Piece::target(address, length), None))
    }

    /// What can be said before anything is begun.
    fn check(
        &self,
        direction: Direction,
        offset: u64,
        address: *const u8,
        length: usize,
    ) -> Result<(), Error> {
        let (asked, given) = (direction.right(), self.entry.rights);
        if !given.include(asked) {
            return Err(Error::NotPermitted { asked, given });
        }
        if address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        self.check_inside(offset, length as u64)
    }

    fn check_inside(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        let window_bytes = self.entry.length;
        if offset.checked_add(bytes).is_none_or(|end| end > window_bytes) {
            return Err(ValidationError::OutsideWindow { offset, bytes, window_bytes }.into());
        }
        Ok(())
    }

    /// # Safety
    /// The job's memory must be valid until this returns.
    unsafe fn carry(&self, job: Job) -> Result<(), Error> {
        self.port.check_fork()?;
        // SAFETY: passed on.
        match unsafe { self.windows.carry_now(&self.memory, job, Patience::Waits) } {
            Ok(outcome) => outcome,
            Err(job) => Operation::new(&self.port, self.enqueue(job, None)?).wait().map(drop),
        }
    }

    /// # Safety
    /// The job's memory must be valid until the operation is over.
    unsafe fn begin(&self, mut job: Job, ending: Option<Ending>) -> Result<Begun, Error> {
        self.port.check_fork()?;
        if job.local.length <= AT_ONCE_BYTES {
            let length = job.local.length as u64;
            // SAFETY: passed on.
            match unsafe { self.windows.carry_now(&self.memory, job, Patience::Never) } {
                Ok(Ok(())) => {
                    let received = crate::Received { source: self.peer, tag: 0, length };
                    return Ok(Begun::Over(Ok(received)));
                }
                Ok(Err(error)) => return Ok(Begun::Over(Err(error))),
                Err(back) => job = back,
            }
        }
        self.enqueue(job, ending)
    }

    fn enqueue(&self, mut job: Job, ending: Option<Ending>) -> Result<Begun, Error> {
        let number = self.port.enter().begin_access(job.direction.kind(), ending)?;
        job.number = Some(number);
        if let Err(error) = self.windows.enqueue(&self.port, self.peer, &self.memory, job) {
            self.port.enter().operations.remove(number);
            return Err(error);
        }
        Ok(Begun::Underway(number))
    }
}
