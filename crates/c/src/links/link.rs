//! An open link: the core's link, the program's descriptor for it, and its reads and writes, puts and
//! gets.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry::message::{Error, Gone, Link, Operation, ValidationError, Watch};
use memferry_sys::sync::lock;

use super::cookie;
use super::descriptor::Descriptor;
use super::ledger::{Ended, Known, Ledger, try_hold, wait_for};
use crate::code::{ADMA_ENOMSG, Failure};
use crate::memory;

/// A link of this process.
#[derive(Debug)]
pub(crate) struct OpenLink {
    link: Link,
    watch: Watch,
    descriptor: Descriptor,
    pub(super) place: usize,
    ledger: Mutex<Ledger>,
    /// Our event is signalled. It is left so until somebody asks in vain: then it matters. Changes
    /// only while the ledger is locked.
    is_signalled: AtomicBool,
    /// This side closes it. Set before anything is ended.
    is_closed: AtomicBool,
}

impl OpenLink {
    /// A link in a place, with a descriptor for the program.
    pub(super) fn new(link: Link, place: usize) -> Result<Self, Failure> {
        let watch = link.watch()?;
        let descriptor = Descriptor::over(watch.as_fd())?;
        Ok(Self {
            link,
            watch,
            descriptor,
            place,
            ledger: Mutex::new(Ledger::new(place)),
            is_signalled: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    pub(super) fn number(&self) -> c_int {
        self.descriptor.number()
    }

    /// Whether the program still holds the descriptor.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.descriptor.is_ours(self.watch.as_fd())
    }

    /// The link of the core.
    pub(crate) fn core(&self) -> &Link {
        &self.link
    }

    /// Whether this side has closed it, or is about to.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Ends everything under way and tells the other side.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.link.clone().close();
    }

    /// After the close: whether memory of reads and writes, puts and gets is still in use.
    pub(super) fn is_busy(&self) -> bool {
        self.link.is_busy()
    }

    /// Whether an operation is not over.
    pub(super) fn is_underway(&self, number: u64) -> bool {
        matches!(self.check(number), Ok(None))
    }

    /// Closes what the program holds: last, so that its number is free only when nothing is left
    /// behind it.
    pub(super) fn close_descriptor(&self) {
        self.link.unwatch();
        self.descriptor.close(self.watch.as_fd());
    }

    /// Accesses that find the connection ended do not know who ended it.
    pub(crate) fn whose_end(&self, error: Error) -> Error {
        match error {
            Error::PeerGone(Gone::Closed) if self.is_closed() => Error::Closed,
            other => other,
        }
    }

    /// Writes and waits.
    ///
    /// # Safety
    /// The memory must be valid for reads, and not change, until this returns.
    pub(crate) unsafe fn write(&self, address: *const u8, length: usize) -> Result<(), Failure> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &[]
        } else {
            // SAFETY: not null and not too long, which was checked; the caller vouches for the rest.
            unsafe { slice::from_raw_parts(address, length) }
        };
        Ok(self.link.write(bytes)?)
    }

    /// Reads and waits; the length of the message.
    ///
    /// # Safety
    /// The memory must be valid for writes, and nobody else may use it, until this returns.
    pub(crate) unsafe fn read(&self, address: *mut u8, length: usize) -> Result<u64, Failure> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &mut []
        } else {
            // SAFETY: as above.
            unsafe { slice::from_raw_parts_mut(address, length) }
        };
        Ok(self.link.read(bytes)?)
    }

    /// Starts a write; its cookie.
    ///
    /// # Safety
    /// As for [`OpenLink::write`], until it is over.
    pub(crate) unsafe fn iwrite(&self, address: *const u8, length: usize) -> Result<i64, Failure> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        self.start(length, || unsafe { self.link.iwrite_raw(address, length) })
    }

    /// Starts a read; its cookie.
    ///
    /// # Safety
    /// As for [`OpenLink::read`], until it is over.
    pub(crate) unsafe fn iread(&self, address: *mut u8, length: usize) -> Result<i64, Failure> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        self.start(length, || unsafe { self.link.iread_raw(address, length) })
    }

    /// Starts an operation and keeps it. The lock makes numbers follow the order on the link.
    pub(crate) fn start(
        &self,
        length: usize,
        begin: impl Fn() -> Result<Operation, Error>,
    ) -> Result<i64, Failure> {
        let mut ledger = lock(&self.ledger);
        cookie::check_room(self.place)?;
        let operation = match begin() {
            // Those that are over and that nobody has asked about count too: not any longer.
            Err(Error::Validation(ValidationError::TooManyOperations(_))) => {
                ledger.sweep();
                begin()
            }
            begun => begun,
        }?;
        let cookie = ledger.insert(operation, length as u64);
        if ledger.has_unasked() && !self.is_signalled.swap(true, Ordering::Relaxed) {
            self.descriptor.event().signal();
        }
        Ok(cookie.to_raw())
    }

    /// How an operation ended; `None` if it is not over.
    pub(crate) fn check(&self, number: u64) -> Result<Option<Ended>, Failure> {
        let (shared, posted) = match lock(&self.ledger).find(number)? {
            Known::Underway { shared, posted } => (shared, posted),
            Known::Over(ended) => return Ok(Some(ended)),
        };
        // Without the lock another thread waits for it, and moves it on too.
        let Some(Some(outcome)) = try_hold(&shared, Operation::test) else {
            self.quiet();
            return Ok(None);
        };
        Ok(Some(lock(&self.ledger).settle(number, posted, outcome)))
    }

    /// Waits until an operation is over.
    pub(crate) fn wait(&self, number: u64) -> Result<Ended, Failure> {
        let (shared, posted) = match lock(&self.ledger).find(number)? {
            Known::Underway { shared, posted } => (shared, posted),
            Known::Over(ended) => return Ok(ended),
        };
        let outcome = wait_for(&shared).map_err(|error| self.whose_end(error));
        Ok(lock(&self.ledger).settle(number, posted, outcome))
    }

    /// The length of the message that the next read will get, if it waits.
    pub(crate) fn peek(&self) -> Result<u64, Failure> {
        if let Some(length) = self.link.peek()? {
            return Ok(length);
        }
        self.quiet();
        Err(Failure::new(ADMA_ENOMSG, "no message waits to be read"))
    }

    /// Somebody has asked in vain and may sleep on the descriptor next: it must be readable only if
    /// there is a reason.
    fn quiet(&self) {
        if !self.is_signalled.load(Ordering::Relaxed) {
            return;
        }
        let ledger = lock(&self.ledger);
        if !ledger.has_unasked() && self.is_signalled.swap(false, Ordering::Relaxed) {
            self.descriptor.event().drain();
        }
    }
}
