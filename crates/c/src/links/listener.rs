//! A name that processes connect to, with the program's descriptor for it.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memferry::message::{Error, Link, Listener, ReadyFd};

use super::user_fd::{UserFd, wait_readable};
use crate::code::CallError;

/// Spurious wakeups in a row after which the listener sleeps before it checks again.
const MAX_EMPTY_WAKEUPS: u32 = 10;
const EMPTY_WAKEUP_SLEEP: Duration = Duration::from_millis(1);

/// A listener of this process.
#[derive(Debug)]
pub(super) struct OpenListener {
    listener: Listener,
    ready_fd: ReadyFd,
    user_fd: UserFd,
    is_closed: AtomicBool,
}

impl OpenListener {
    pub(super) fn bind(name: &str) -> Result<Self, CallError> {
        let listener = Listener::bind(name)?;
        let watch = listener.ready_fd()?;
        let descriptor = UserFd::over(watch.as_fd())?;
        Ok(Self {
            listener,
            ready_fd: watch,
            user_fd: descriptor,
            is_closed: AtomicBool::new(false),
        })
    }

    pub(super) fn number(&self) -> c_int {
        self.user_fd.number()
    }

    /// Whether the program still holds the descriptor.
    pub(super) fn is_held(&self) -> bool {
        self.user_fd.is_ours(self.ready_fd.as_fd())
    }

    /// Waits for the next process that connects; calls `look` at every event.
    pub(super) fn accept(&self, on_wakeup: impl Fn()) -> Result<Link, CallError> {
        let mut in_vain = 0;
        loop {
            on_wakeup();
            if self.is_closed.load(Ordering::Acquire) {
                return Err(Error::Closed.into());
            }
            if let Some(link) = self.listener.poll_accept()? {
                return Ok(link);
            }
            // Without free descriptors no connection can be accepted, and the listener stays
            // readable.
            if in_vain > MAX_EMPTY_WAKEUPS {
                std::thread::sleep(EMPTY_WAKEUP_SLEEP);
            }
            in_vain += u32::from(wait_readable(&self.ready_fd, self.user_fd.event()));
        }
    }

    /// Wakes the waiting threads; the name is free when the last of them has returned.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.listener.disable_ready_fd();
        self.user_fd.close(self.ready_fd.as_fd());
        self.user_fd.event().signal();
    }
}
