//! A thread of an endpoint, link or listener.

use std::io;
use std::mem::ManuallyDrop;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memferry_sys::fork::OwnerProcess;

/// A thread that its owner asks to end and then joins. Without a join, it ends by itself.
#[derive(Debug)]
pub(crate) struct OwnedThread {
    handle: ManuallyDrop<JoinHandle<()>>,
    owner: OwnerProcess,
}

impl OwnedThread {
    /// Starts a thread.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let handle = ManuallyDrop::new(memferry_sys::thread::spawn(name, run)?);
        Ok(Self { handle, owner: OwnerProcess::current() })
    }

    /// Whether this process started the thread.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.owner.is_current()
    }

    /// Waits up to one second for the thread to end. Does not wait for the calling thread itself. A
    /// thread that is blocked by memory of a peer, or by code of the application, ends by itself
    /// later.
    pub(crate) fn join(self) {
        const JOIN_TIMEOUT: Duration = Duration::from_secs(1);
        const JOIN_POLL_SLEEP: Duration = Duration::from_micros(50);
        if !self.owner.is_current() || self.handle.thread().id() == std::thread::current().id() {
            return;
        }
        let began = Instant::now();
        while !self.handle.is_finished() && began.elapsed() < JOIN_TIMEOUT {
            std::thread::sleep(JOIN_POLL_SLEEP);
        }
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        // A forked child has no such thread: its handle names memory that may be freed.
        if self.owner.is_current() {
            // SAFETY: dropped once, here, and not used afterwards.
            let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
            if handle.is_finished() {
                let _ = handle.join();
            }
        }
    }
}
