//! One descriptor that stands for many: readable when any of them is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fault::{Call, call};

/// A set of watched descriptors, itself a descriptor.
#[derive(Debug)]
pub struct Readiness(OwnedFd);

impl Readiness {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Self(call(Call::EpollCreate, || epoll::create(epoll::CreateFlags::CLOEXEC))?))
    }

    /// Watches a descriptor until it is closed. `edge`: readable once for each signal, whether or
    /// not it was read.
    pub fn add(&self, descriptor: BorrowedFd<'_>, edge: bool) -> io::Result<()> {
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if edge {
            flags |= epoll::EventFlags::ET;
        }
        let data = epoll::EventData::new_u64(0);
        Ok(call(Call::EpollAdd, || epoll::add(&self.0, descriptor, data, flags))?)
    }

    /// Stops watching a descriptor.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.0, descriptor);
    }

    /// Waits until something is readable, at most `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut watched = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        call(Call::Poll, || poll(&mut watched, timeout.as_ref())).is_ok_and(|ready| ready > 0)
    }

    /// Forgets signals that were seen, so that the descriptor is readable again only for new ones
    /// and for what stays readable.
    pub fn drain(&self) {
        let mut events: [std::mem::MaybeUninit<epoll::Event>; 16] =
            [const { std::mem::MaybeUninit::uninit() }; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = call(Call::EpollWait, || epoll::wait(&self.0, &mut events, Some(&now)));
    }
}

impl AsFd for Readiness {
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
        let (set, event) = (Readiness::new().unwrap(), EventFd::new().unwrap());
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
