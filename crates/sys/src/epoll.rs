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

/// What makes a member of a set ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It is readable, or its other end is closed.
    Readable,
    /// Its other end is closed.
    HungUp,
}

/// Number of members that one call reports.
const REPORTED_MEMBERS: usize = 64;

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
        self.add_with(descriptor, 0, flags)
    }

    /// Adds a descriptor with a key, by which [`EpollSet::ready_keys`] reports it.
    pub fn add_keyed(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        readiness: Readiness,
    ) -> io::Result<()> {
        let readable = match readiness {
            Readiness::Readable => epoll::EventFlags::IN,
            Readiness::HungUp => epoll::EventFlags::empty(),
        };
        self.add_with(descriptor, key, readable | epoll::EventFlags::RDHUP)
    }

    fn add_with(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        let data = epoll::EventData::new_u64(key);
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
        let _ = self.ready_keys();
    }

    /// The keys of members that are ready now, at most 64 of them. The kernel takes turns: the next
    /// call reports others. The list may be short of members after a failed system call.
    pub fn ready_keys(&self) -> impl Iterator<Item = u64> + use<> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; REPORTED_MEMBERS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut keys = [0; REPORTED_MEMBERS];
        let mut count = 0;
        if let Ok((ready, _)) =
            call(Call::EpollWait, || epoll::wait(&self.0, &mut events, Some(&now)))
        {
            count = ready.len();
            let found = ready.iter().map(|event| event.data.u64());
            keys.iter_mut().zip(found).for_each(|(key, found)| *key = found);
        }
        keys.into_iter().take(count)
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

    #[test]
    fn members_are_reported_by_their_keys_while_they_are_ready() {
        let set = EpollSet::new().unwrap();
        let events: Vec<_> = (0..100).map(|_| EventFd::new().unwrap()).collect();
        for (event, key) in events.iter().zip(0..) {
            set.add_keyed(event.as_fd(), key, Readiness::Readable).unwrap();
        }
        assert_eq!(set.ready_keys().count(), 0);
        events[7].signal();
        events[90].signal();
        let mut ready: Vec<_> = set.ready_keys().collect();
        ready.sort_unstable();
        assert_eq!(ready, [7, 90]);
        // More than one call reports: none is left out for ever.
        events.iter().for_each(EventFd::signal);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..4 {
            seen.extend(set.ready_keys());
        }
        assert_eq!(seen.len(), 100);
    }

    #[test]
    fn a_member_that_is_watched_for_its_end_is_not_reported_for_its_data() {
        use std::io::Write;
        let set = EpollSet::new().unwrap();
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        set.add_keyed(ours.as_fd(), 5, Readiness::HungUp).unwrap();
        theirs.write_all(b"data").unwrap();
        assert_eq!(set.ready_keys().count(), 0);
        drop(theirs);
        assert_eq!(set.ready_keys().collect::<Vec<_>>(), [5]);
    }
}
