//! The owner's side of a window: exposing memory, using it, waiting for notifications, and
//! withdrawing it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_copy::OwnedTarget;
use memferry_memory::handle::BufferHandle;
use memferry_sys::copy;
use memferry_sys::shared_memory::Protection;

use super::window_table::{OpenWindowError, WindowId, WindowInfo, WindowTable};
use super::{Rights, WindowHandle};
use crate::error::{ConnectError, Error, ValidationError};
use crate::operation::InFlightBuffer;
use crate::port::{Peer, Port};
use crate::quarantine;
use crate::region;
use crate::segments::Segment;

/// How long a withdrawal waits for a peer to finish the current step of its access.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a drop waits: the memory can then wait for the peer in quarantine.
const DROP_TIMEOUT: Duration = Duration::from_millis(10);

/// Yields of a thread that waits for the end of an access, before it sleeps: the peer may be stopped.
const CLOSE_YIELDS: u32 = 100;

/// Interval between two looks at an access that does not end soon.
const CLOSE_INTERVAL: Duration = Duration::from_micros(200);

/// The record of an exposed window in the port, for peers that connect later.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExposedRange {
    pub(crate) id: WindowId,
    pub(crate) segment: Segment,
    pub(crate) access: Protection,
}

/// A variable of a window that a thread waits for, and its last value that any thread has seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WatchedWord {
    address: *const AtomicU64,
    last_value: u64,
    waiter: u64,
}

// SAFETY: the variable lies in a window that the waiting thread borrows until it removes this
// entry.
unsafe impl Send for WatchedWord {}

impl WatchedWord {
    /// Returns whether the value has changed since the last call.
    pub(crate) fn take_change(&mut self) -> bool {
        let now = self.load();
        now != std::mem::replace(&mut self.last_value, now)
    }

    fn load(&self) -> u64 {
        // SAFETY: as above. Acquire: a thread that reads the value also reads the data before it.
        unsafe { (*self.address).load(Ordering::Acquire) }
    }
}

/// Memory that is exposed to peers. They put and get without a call of this process.
///
/// Dropping it withdraws the window.
///
/// ```
/// use memferry::message::{Endpoint, Rights};
///
/// let owner = Endpoint::open("doc-window")?;
/// let window = owner.expose(vec![7u8; 64], Rights::READ)?;
/// let mut data = [0; 2];
/// window.read(10, &mut data);
/// assert_eq!(data, [7; 2]);
/// let buffer = window.withdraw()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Window<B: Send + 'static = Vec<u8>> {
    port: Arc<Port>,
    table: Arc<WindowTable>,
    id: WindowId,
    handle: WindowHandle,
    address: *mut u8,
    length: usize,
    buffer: Option<InFlightBuffer<B>>,
}

// SAFETY: the address is that of the buffer, which is `Send`.
unsafe impl<B: Send + 'static> Send for Window<B> {}
// SAFETY: the memory is shared with other processes from the moment it is exposed, so no reference
// to its bytes is ever made: it is accessed by raw copies and atomics, whose result under
// contention is a mix of bytes. Two threads of this process that copy to the same bytes at the same
// time are like a thread and a peer that do.
unsafe impl<B: Send + 'static> Sync for Window<B> {}

impl<B: Send + 'static> fmt::Debug for Window<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("name", &self.id)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// Memory behind a raw pointer, for [`crate::Endpoint::expose_raw`].
///
/// ```
/// use memferry::message::{Endpoint, RawMemory, Rights, Window};
///
/// let owner = Endpoint::open("doc-raw-memory")?;
/// let mut memory = [0u8; 64];
/// // SAFETY: the array outlives the window.
/// let window: Window<RawMemory> =
///     unsafe { owner.expose_raw(memory.as_mut_ptr(), 64, Rights::READ_WRITE) }?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RawMemory {
    address: *mut u8,
    length: usize,
}

// SAFETY: the creator guarantees that the memory is valid on every thread.
unsafe impl Send for RawMemory {}

// SAFETY: the creator guarantees that the memory does not move.
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

/// A window that a peer was still accessing after the timeout: the peer is stopped in the middle of
/// a copy. No peer can start another access, but the memory is not free yet.
///
/// ```
/// use memferry::message::{Window, WindowBusy};
///
/// fn withdraw(window: Window<Vec<u8>>) -> Option<Vec<u8>> {
///     match window.withdraw() {
///         Ok(buffer) => Some(buffer),
///         Err(busy) => {
///             println!("{busy}");
///             None
///         }
///     }
/// }
/// ```
pub struct WindowBusy<B: Send + 'static> {
    /// The peer that accesses the window, if it is still connected.
    pub peer: Option<Peer>,
    /// The window, to be withdrawn again later.
    pub window: Window<B>,
}

impl<B: Send + 'static> fmt::Debug for WindowBusy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B: Send + 'static> fmt::Display for WindowBusy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a peer ({:?}) is stopped in the middle of an access: continue or end it, then \
             withdraw the window again",
            self.peer
        )
    }
}

impl<B: Send + 'static> std::error::Error for WindowBusy<B> {}

impl Port {
    /// Exposes the memory of a buffer.
    pub(crate) fn expose<B: OwnedTarget>(
        self: &Arc<Self>,
        buffer: B,
        rights: Rights,
        key: Option<u64>,
    ) -> Result<Window<B>, crate::FailedOperation<B>> {
        let mut in_flight = InFlightBuffer::new(buffer);
        let (address, length) = in_flight.get_mut().target();
        match self.expose_memory(address, length, rights, key) {
            Ok((table, id, handle)) => Ok(Window {
                port: self.clone(),
                table,
                id,
                handle,
                address,
                length,
                buffer: Some(in_flight),
            }),
            Err(error) => {
                Err(crate::FailedOperation { error, buffer: Some(in_flight.into_inner()) })
            }
        }
    }

    fn expose_memory(
        &self,
        address: *mut u8,
        length: usize,
        rights: Rights,
        key: Option<u64>,
    ) -> Result<(Arc<WindowTable>, WindowId, WindowHandle), Error> {
        self.check_fork()?;
        if address.is_null() && length > 0 {
            return Err(ValidationError::NullPointer(length).into());
        }
        let access = if rights.include(Rights::WRITE) {
            Protection::ReadWrite
        } else {
            Protection::ReadOnly
        };
        let segment = Segment::target(address, length);
        let mut state = self.lock();
        if state.is_closed() {
            return Err(Error::Closed);
        }
        let table = state.windows.table().map_err(ConnectError::system("making shared memory"))?;
        let region = region::find(address, length).map_or(0, |region| region.id);
        let (start, bytes) = (address as u64, length as u64);
        let info = WindowInfo { address: start, length: bytes, region, rights, key };
        let id = table.open(info).map_err(|error| match error {
            OpenWindowError::Full => Error::from(ValidationError::TooManyWindows),
            OpenWindowError::System(error) => {
                ConnectError::system("making shared memory")(error).into()
            }
        })?;
        state.expose_range(ExposedRange { id, segment, access });
        let process = state.own_process_handle();
        let handle =
            BufferHandle::new(process, id.index, id.generation).expect("generations start at 1");
        Ok((table, id, WindowHandle(handle)))
    }
}

impl<B: Send + 'static> Window<B> {
    /// The handle of the window, to be sent to peers.
    pub fn handle(&self) -> WindowHandle {
        self.handle
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of the first byte. Peers may change the memory at any time, as their rights
    /// permit.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Copies out of the window. A concurrent put of a peer may be visible in part.
    ///
    /// # Panics
    /// When the range is outside the window.
    pub fn read(&self, offset: usize, buffer: &mut [u8]) {
        self.check_inside(offset, buffer.len());
        // SAFETY: the range is inside the window's memory, which lives as long as self, and does
        // not overlap the borrowed buffer.
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

    /// Loads the variable at an offset. A thread that reads a value set by a peer's notification
    /// also reads the data that was put before it.
    ///
    /// # Panics
    /// When the variable is outside the window or not aligned to eight bytes.
    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Stores to the variable at an offset.
    ///
    /// # Panics
    /// As [`Window::load`].
    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Waits until a variable has a value that `is_it` accepts; returns `None` at the timeout.
    /// Polls first, then sleeps. `is_it` must not call the endpoint or link. When the last
    /// connected peer disconnects, or the peer of a link has disconnected, no peer can set the
    /// variable: [`Error::PeerDisconnected`].
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
        let word = self.word(offset);
        let waiter = NEXT.fetch_add(1, Ordering::Relaxed);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.port.lock();
        let seen = word.load(Ordering::Acquire);
        if is_it(seen) {
            return Ok(Some(seen));
        }
        state.windows.watched_words.push(WatchedWord { address: word, last_value: seen, waiter });
        // A link has one peer. An endpoint without peers waits, because others may connect.
        let mut had_peers = !state.protocol.peers.accepts_connections();
        let found = self.port.block_locked(state, true, deadline, |state| {
            let variable = state.windows.watched_words.iter_mut().find(|v| v.waiter == waiter)?;
            variable.last_value = variable.load();
            let seen = variable.last_value;
            // A panic is resumed after the entry is removed: no thread may read the variable after
            // the window is dropped.
            match catch_unwind(AssertUnwindSafe(|| is_it(seen))) {
                Ok(true) => Some(Ok(Ok(seen))),
                Ok(false) if state.is_closed() => Some(Ok(Err(Error::Closed))),
                Ok(false) => {
                    let last = state.protocol.peers.last_disconnect();
                    had_peers |= last.is_none();
                    last.filter(|_| had_peers).map(|error| Ok(Err(error)))
                }
                Err(panic) => Some(Err(panic)),
            }
        });
        self.port.lock().windows.watched_words.retain(|variable| variable.waiter != waiter);
        match found {
            Some(Err(panic)) => resume_unwind(panic),
            Some(Ok(found)) => found.map(Some),
            None => Ok(None),
        }
    }

    /// Returns whether a peer is accessing the window.
    pub fn is_accessed(&self) -> bool {
        self.port.check_fork().is_ok() && self.port.lock().active_accessor(self.id).is_some()
    }

    /// Withdraws the window. No peer can start an access after this; a peer that is in a step of an
    /// access is waited for, and finds the window closed at its next step. Returns the buffer.
    pub fn withdraw(mut self) -> Result<B, Box<WindowBusy<B>>> {
        match self.close(WITHDRAW_TIMEOUT) {
            Ok(()) => Ok(self.buffer.take().expect("the buffer is taken once").into_inner()),
            Err(peer) => Err(Box::new(WindowBusy { peer, window: self })),
        }
    }

    /// Closes the window and waits for running accesses. The error names the peer that does not
    /// finish.
    fn close(&mut self, timeout: Duration) -> Result<(), Option<Peer>> {
        if self.port.check_fork().is_err() {
            // In a forked child the window and its table belong to the parent; the memory is a
            // copy.
            return Ok(());
        }
        self.table.close(self.id);
        let started = Instant::now();
        let mut looks = 0u32;
        loop {
            let accessor = self.port.lock().active_accessor(self.id);
            let Some(accessor) = accessor else { break };
            if started.elapsed() > timeout {
                return Err(accessor);
            }
            looks += 1;
            match looks {
                0..=CLOSE_YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(CLOSE_INTERVAL),
            }
        }
        self.port.lock().windows.exposed_ranges.remove(&self.id.index);
        self.table.release(self.id);
        Ok(())
    }

    fn check_inside(&self, offset: usize, length: usize) {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.length),
            "{length} bytes at {offset} are outside a window of {} bytes",
            self.length
        );
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.check_inside(offset, 8);
        let word = self.address.wrapping_add(offset).cast::<AtomicU64>();
        assert!(word.is_aligned(), "the variable at {offset} is not aligned to eight bytes");
        // SAFETY: inside the window's memory, aligned, alive as long as self; accessed as atomics.
        unsafe { &*word }
    }
}

impl<B: Send + 'static> Drop for Window<B> {
    fn drop(&mut self) {
        if self.buffer.is_none() || self.close(DROP_TIMEOUT).is_ok() {
            return;
        }
        let mut state = self.port.lock();
        state.windows.exposed_ranges.remove(&self.id.index);
        let accesses = state.active_accesses(self.id);
        drop(state);
        let (table, id) = (self.table.clone(), self.id);
        quarantine::hold(
            accesses,
            Box::new(DroppedWindow { _buffer: self.buffer.take(), table, id }),
        );
    }
}

/// The memory of a window that was dropped during a peer's access.
struct DroppedWindow<B> {
    _buffer: Option<InFlightBuffer<B>>,
    table: Arc<WindowTable>,
    id: WindowId,
}

impl<B> Drop for DroppedWindow<B> {
    fn drop(&mut self) {
        self.table.release(self.id);
    }
}
