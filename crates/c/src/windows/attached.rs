//! A window of the peer of a link, as the C program accesses it.

use std::slice;
use std::sync::Arc;

use memferry::message::{Error, PutNotification, RemoteWindow, WindowHandle};

use crate::code::{ADMA_EBADMSG, CallError};
use crate::links::OpenLink;
use crate::memory;

/// A window of the peer.
#[derive(Debug)]
pub(crate) struct AttachedWindow {
    link: Arc<OpenLink>,
    remote: RemoteWindow,
}

impl AttachedWindow {
    /// Attaches the window of a handle, if the bytes are one.
    pub(super) fn new(link: Arc<OpenLink>, handle: [u8; 16]) -> Result<Self, CallError> {
        let handle = WindowHandle::from_bytes(handle).map_err(|error| {
            CallError::new(ADMA_EBADMSG, format!("these bytes are no handle of a window: {error}"))
        })?;
        let remote = link.core().attach(handle)?;
        Ok(Self { link, remote })
    }

    pub(super) fn is_of(&self, link: &Arc<OpenLink>) -> bool {
        Arc::ptr_eq(&self.link, link)
    }

    pub(super) fn link(&self) -> &OpenLink {
        &self.link
    }

    /// Its length in bytes.
    pub(super) fn length(&self) -> u64 {
        self.remote.len()
    }

    /// Puts data and waits.
    ///
    /// # Safety
    /// The memory must be valid for reads, and not change, until this returns.
    pub(crate) unsafe fn put(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<PutNotification>,
    ) -> Result<(), CallError> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &[]
        } else {
            // SAFETY: not null and not too long, which was checked; the caller guarantees the rest.
            unsafe { slice::from_raw_parts(address, length) }
        };
        self.outcome(match notify {
            Some(notify) => self.remote.put_notify(offset, bytes, notify),
            None => self.remote.put(offset, bytes),
        })
    }

    /// Gets data and waits.
    ///
    /// # Safety
    /// The memory must be valid for writes, and no other thread may use it, until this returns.
    pub(crate) unsafe fn get(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<(), CallError> {
        memory::check(address, length)?;
        let bytes = if length == 0 {
            &mut []
        } else {
            // SAFETY: as above.
            unsafe { slice::from_raw_parts_mut(address, length) }
        };
        self.outcome(self.remote.get(offset, bytes))
    }

    /// Starts a put and returns its cookie.
    ///
    /// # Safety
    /// As for [`AttachedWindow::put`], until it is complete.
    pub(crate) unsafe fn iput(
        &self,
        offset: u64,
        address: *const u8,
        length: usize,
        notify: Option<PutNotification>,
    ) -> Result<i64, CallError> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        let begin = || unsafe { self.remote.iput_raw(offset, address, length, notify) };
        self.link.start(length, begin)
    }

    /// Starts a get and returns its cookie.
    ///
    /// # Safety
    /// As for [`AttachedWindow::get`], until it is complete.
    pub(crate) unsafe fn iget(
        &self,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Result<i64, CallError> {
        memory::check(address, length)?;
        // SAFETY: passed on.
        self.link.start(length, || unsafe { self.remote.iget_raw(offset, address, length) })
    }

    /// Waits until everything that was started before, on any window of the link, is complete.
    pub(crate) fn fence(&self) -> Result<(), CallError> {
        self.outcome(self.remote.fence())
    }

    fn outcome(&self, outcome: Result<(), Error>) -> Result<(), CallError> {
        outcome.map_err(|error| self.link.map_close_error(error).into())
    }
}
