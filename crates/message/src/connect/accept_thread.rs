//! The thread that accepts connections, so that processes connect while the owner of the name computes.
//!
//! One thread for each name that is listened on. It sleeps until a process connects, does what the
//! next call of the owner would do, and makes no progress otherwise.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::epoll::EpollSet;
use memferry_sys::fault::{Call, call};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::thread::OwnedThread;

/// Interval of polls while a handshake is not complete or no connection can be accepted.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// What a listener needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcceptState {
    /// Nothing before the next event.
    Idle,
    /// A handshake is not complete: it times out without an event.
    Pending,
    /// Connections cannot be accepted now, for lack of a resource or at a limit, and stay readable.
    Stalled,
    /// The listener is closed.
    Closed,
}

/// A thread that accepts connections.
#[derive(Debug)]
pub(crate) struct AcceptThread {
    thread: OwnedThread,
    stop: Arc<EventFd>,
}

impl AcceptThread {
    /// Starts a thread that calls `accept` whenever `readiness` is readable.
    pub(crate) fn start(
        readiness: Arc<EpollSet>,
        mut accept: impl FnMut() -> AcceptState + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new()?);
        let stopped = stop.clone();
        let run = move || {
            let mut state = AcceptState::Idle;
            while state != AcceptState::Closed && !wait(&stopped, &readiness, state) {
                state = accept();
            }
        };
        Ok(Self { thread: OwnedThread::start("memferry-accept", run)?, stop })
    }

    /// Stops the thread, and waits for it as [`OwnedThread::join`] does.
    pub(crate) fn join(self) {
        // A forked child has a copy of the event of its parent's thread.
        if self.thread.is_of_this_process() {
            self.stop.signal();
            self.thread.join();
        }
    }
}

/// Waits until there is something to accept or to poll. Returns whether the thread must end.
fn wait(stop: &EventFd, readiness: &EpollSet, state: AcceptState) -> bool {
    let timeout = (state != AcceptState::Idle).then_some(&POLL_INTERVAL);
    let mut descriptors =
        [stop.as_fd(), readiness.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let watched = if state == AcceptState::Stalled { 1 } else { 2 };
    let polled = call(Call::Poll, || poll(&mut descriptors[..watched], timeout));
    if polled.is_err() {
        // A signal, or no memory for the call. It must not keep a core busy.
        std::thread::sleep(Duration::from_millis(1));
    }
    !descriptors[0].revents().is_empty()
}
