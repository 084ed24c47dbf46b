//! An open link: the core's link, the program's descriptor for it, and its reads and writes, puts and
//! gets.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry::message::{DisconnectReason, Error, Link, Operation, ReadyFd, ValidationError};
use memferry_sys::sync::lock;

use super::cookie;
use super::op_log::{OperationLog, OperationResult, OperationStatus, try_with, wait_for};
use super::user_fd::UserFd;
use crate::code::{ADMA_ENOMSG, CallError};
use crate::memory;

/// A link of this process.
#[derive(Debug)]
pub(crate) struct OpenLink {
    link: Link,
    ready_fd: ReadyFd,
    user_fd: UserFd,
    pub(super) slot: usize,
    operations: Mutex<OperationLog>,
    /// Our event is signalled. It stays signalled until a check finds nothing. Changes only under
    /// the lock of the operation log.
    is_signalled: AtomicBool,
    /// This process closes the link. Set before any operation is cancelled.
    is_closed: AtomicBool,
}

impl OpenLink {
    /// Opens a link in a slot, with a descriptor for the program.
    pub(super) fn new(link: Link, place: usize) -> Result<Self, CallError> {
        let watch = link.ready_fd()?;
        let descriptor = UserFd::over(watch.as_fd())?;
        Ok(Self {
            link,
            ready_fd: watch,
            user_fd: descriptor,
            slot: place,
            operations: Mutex::new(OperationLog::new(place)),
            is_signalled: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    pub(super) fn number(&self) -> c_int {
        self.user_fd.number()
    }

    /// Whether the program still holds the descriptor.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.user_fd.is_ours(self.ready_fd.as_fd())
    }

    /// The link of the core.
    pub(crate) fn core(&self) -> &Link {
        &self.link
    }

    /// Whether this side has closed it, or is about to.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Cancels everything in flight and notifies the peer.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.link.clone().close();
    }

    /// After the close: whether memory of reads and writes, puts and gets is still in use.
    pub(super) fn is_busy(&self) -> bool {
        self.link.is_busy()
    }

    /// Whether an operation is not complete.
    pub(super) fn is_in_flight(&self, number: u64) -> bool {
        matches!(self.check(number), Ok(None))
    }

    /// Closes the program's descriptor: last, so that its number is reused only after everything
    /// else is released.
    pub(super) fn close_descriptor(&self) {
        self.link.disable_ready_fd();
        self.user_fd.close(self.ready_fd.as_fd());
    }

    /// An access that finds the connection closed cannot tell which side closed it.
    pub(crate) fn map_close_error(&self, error: Error) -> Error {
        match error {
            Error::PeerDisconnected(gone)
                if gone.reason == DisconnectReason::Closed && self.is_closed() =>
            {
                Error::Closed
            }
            other => other,
        }
    }

    /// Writes a message and waits.
    ///
    /// # Safety
    /// The memory must be valid for reads, and not change, until this returns.
    pub(crate) unsafe fn write(&self, address: *const u8, length: usize) -> Result<(), CallError> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &[]
        } else {
            // SAFETY: not null and not too long, which was checked; the caller guarantees the rest.
            unsafe { slice::from_raw_parts(address, length) }
        };
        Ok(self.link.write(bytes)?)
    }

    /// Reads a message, waits, and returns its length.
    ///
    /// # Safety
    /// The memory must be valid for writes, and no other thread may use it, until this returns.
    pub(crate) unsafe fn read(&self, address: *mut u8, length: usize) -> Result<u64, CallError> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &mut []
        } else {
            // SAFETY: as above.
            unsafe { slice::from_raw_parts_mut(address, length) }
        };
        Ok(self.link.read(bytes)?)
    }

    /// Starts a write and returns its cookie.
    ///
    /// # Safety
    /// As for [`OpenLink::write`], until it is complete.
    pub(crate) unsafe fn iwrite(
        &self,
        address: *const u8,
        length: usize,
    ) -> Result<i64, CallError> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        self.start(length, || unsafe { self.link.iwrite_raw(address, length) })
    }

    /// Starts a read and returns its cookie.
    ///
    /// # Safety
    /// As for [`OpenLink::read`], until it is complete.
    pub(crate) unsafe fn iread(&self, address: *mut u8, length: usize) -> Result<i64, CallError> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        self.start(length, || unsafe { self.link.iread_raw(address, length) })
    }

    /// Starts an operation and stores it. The lock keeps the numbers in the order of the link.
    pub(crate) fn start(
        &self,
        length: usize,
        begin: impl Fn() -> Result<Operation, Error>,
    ) -> Result<i64, CallError> {
        let mut ledger = lock(&self.operations);
        cookie::check_numbers_left(self.slot)?;
        let operation = match begin() {
            // Complete operations that were not checked count too, until they are swept.
            Err(Error::Validation(ValidationError::TooManyOperations(_))) => {
                ledger.sweep();
                begin()
            }
            begun => begun,
        }?;
        let cookie = ledger.insert(operation, length as u64);
        if ledger.has_unqueried() && !self.is_signalled.swap(true, Ordering::Relaxed) {
            self.user_fd.event().signal();
        }
        Ok(cookie.to_raw())
    }

    /// The result of an operation; `None` if it is not complete.
    pub(crate) fn check(&self, number: u64) -> Result<Option<OperationResult>, CallError> {
        let (shared, posted) = match lock(&self.operations).find(number)? {
            OperationStatus::InFlight { shared, posted } => (shared, posted),
            OperationStatus::Done(ended) => return Ok(Some(ended)),
        };
        // A thread that waits for it holds its lock, and makes progress on it.
        let Some(Some(outcome)) = try_with(&shared, Operation::test) else {
            self.clear_ready();
            return Ok(None);
        };
        Ok(Some(lock(&self.operations).complete(number, posted, outcome)))
    }

    /// Waits until an operation is complete.
    pub(crate) fn wait(&self, number: u64) -> Result<OperationResult, CallError> {
        let (shared, posted) = match lock(&self.operations).find(number)? {
            OperationStatus::InFlight { shared, posted } => (shared, posted),
            OperationStatus::Done(ended) => return Ok(ended),
        };
        let outcome = wait_for(&shared).map_err(|error| self.map_close_error(error));
        Ok(lock(&self.operations).complete(number, posted, outcome))
    }

    /// The length of the message that the next read will receive, if it has arrived.
    pub(crate) fn peek(&self) -> Result<u64, CallError> {
        if let Some(length) = self.link.peek()? {
            return Ok(length);
        }
        self.clear_ready();
        Err(CallError::new(ADMA_ENOMSG, "no message to read"))
    }

    /// A check found nothing, and the program may sleep on the descriptor next: it must be readable
    /// only if there is a reason.
    fn clear_ready(&self) {
        if !self.is_signalled.load(Ordering::Relaxed) {
            return;
        }
        let ledger = lock(&self.operations);
        if !ledger.has_unqueried() && self.is_signalled.swap(false, Ordering::Relaxed) {
            self.user_fd.event().drain();
        }
    }
}
