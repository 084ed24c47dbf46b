//! A name that others connect to, with the program's descriptor for it.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memferry::message::{Error, Link, Listener, Watch};

use super::descriptor::{Descriptor, wait_readable};
use crate::code::Failure;

/// Wake-ups for nothing before the next is not believed at once.
const MOST_IN_VAIN: u32 = 10;
const NAP: Duration = Duration::from_millis(1);

/// A listener of this process.
#[derive(Debug)]
pub(super) struct OpenListener {
    listener: Listener,
    watch: Watch,
    descriptor: Descriptor,
    is_closed: AtomicBool,
}

impl OpenListener {
    pub(super) fn bind(name: &str) -> Result<Self, Failure> {
        let listener = Listener::bind(name)?;
        let watch = listener.watch()?;
        let descriptor = Descriptor::over(watch.as_fd())?;
        Ok(Self { listener, watch, descriptor, is_closed: AtomicBool::new(false) })
    }

    pub(super) fn number(&self) -> c_int {
        self.descriptor.number()
    }

    /// Whether the program still holds the descriptor.
    pub(super) fn is_held(&self) -> bool {
        self.descriptor.is_ours(self.watch.as_fd())
    }

    /// Waits for the next process that connects; calls `look` whenever something has happened.
    pub(super) fn accept(&self, look: impl Fn()) -> Result<Link, Failure> {
        let mut in_vain = 0;
        loop {
            look();
            if self.is_closed.load(Ordering::Acquire) {
                return Err(Error::Closed.into());
            }
            if let Some(link) = self.listener.poll_accept()? {
                return Ok(link);
            }
            // Without descriptors to spare nobody can be let in, and the name stays readable.
            if in_vain > MOST_IN_VAIN {
                std::thread::sleep(NAP);
            }
            in_vain += u32::from(wait_readable(&self.watch, self.descriptor.event()));
        }
    }

    /// Wakes those who wait; the name is free again when the last of them has left.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.listener.unwatch();
        self.descriptor.close(self.watch.as_fd());
        self.descriptor.event().signal();
    }
}
