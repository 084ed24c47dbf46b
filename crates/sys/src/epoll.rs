//! A set of descriptors (epoll) that is itself a descriptor: readable when any member is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fault::{Call, call};

/// An epoll set.
#[derive(Debug)]
pub struct EpollSet(OwnedFd);

impl EpollSet {
    /// Creates an empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Self(call(Call::EpollCreate, || epoll::create(epoll::CreateFlags::CLOEXEC))?))
    }

    /// Adds a descriptor, which stays in the set until it is closed. With `edge`, it is reported
    /// once per signal, whether or not it has been read (`EPOLLET`).
    pub fn add(&self, descriptor: BorrowedFd<'_>, edge: bool) -> io::Result<()> {
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if edge {
            flags |= epoll::EventFlags::ET;
        }
        let data = epoll::EventData::new_u64(0);
        Ok(call(Call::EpollAdd, || epoll::add(&self.0, descriptor, data, flags))?)
    }

    /// Removes a descriptor.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.0, descriptor);
    }

    /// Waits until a member is readable, for at most `timeout`. Returns whether one is.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut descriptors = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        call(Call::Poll, || poll(&mut descriptors, timeout.as_ref())).is_ok_and(|ready| ready > 0)
    }

    /// Consumes the reported edges, so that the set is readable again only for new signals and for
    /// members that stay readable.
    pub fn drain(&self) {
        let mut events: [std::mem::MaybeUninit<epoll::Event>; 16] =
            [const { std::mem::MaybeUninit::uninit() }; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = call(Call::EpollWait, || epoll::wait(&self.0, &mut events, Some(&now)));
    }
}

impl AsFd for EpollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::EventFd;

    #[test]
    fn a_set_is_readable_once_for_each_signal_of_an_edge() {
        let (set, event) = (EpollSet::new().unwrap(), EventFd::new().unwrap());
        set.add(event.as_fd(), true).unwrap();
        let now = Some(Duration::ZERO);
        assert!(!set.wait(now));
        for _ in 0..3 {
            event.signal();
            assert!(set.wait(now));
            set.drain();
            assert!(!set.wait(now));
        }
    }
}
