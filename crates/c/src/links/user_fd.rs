//! The descriptor that the program holds for a link or listener.
//!
//! It is a copy of the core's epoll descriptor, so `poll` and `epoll` accept it, and an event of
//! ours is added to the set that makes it readable. The program may close it with `close(2)` by
//! mistake, and the system may reuse its number: before it is used or closed, it is compared with
//! the core's own descriptor.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use memferry_sys::EventFd;

use crate::code::CallError;

/// Queries whether two descriptors are copies of each other; in Linux since 6.10.
const F_DUPFD_QUERY: c_int = 1024 + 3;

/// The program's descriptor, and our event in it.
#[derive(Debug)]
pub(super) struct UserFd {
    number: c_int,
    event: EventFd,
}

impl UserFd {
    /// A descriptor for the program that is readable when `watched`, an epoll, is. Closed on exec.
    pub(super) fn over(watched: BorrowedFd<'_>) -> Result<Self, CallError> {
        let event = EventFd::new()?;
        let copy = watched.try_clone_to_owned()?;
        control(copy.as_raw_fd(), libc::EPOLL_CTL_ADD, &event)?;
        Ok(Self { number: copy.into_raw_fd(), event })
    }

    /// The number of the descriptor.
    pub(super) fn number(&self) -> c_int {
        self.number
    }

    /// Our event: while it is signalled, the descriptor is readable.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Whether the number still is the copy of `watched` that was made for it.
    #[inline]
    pub(super) fn is_ours(&self, watched: BorrowedFd<'_>) -> bool {
        // SAFETY: compares two numbers; one that is not open is an error.
        match unsafe { libc::fcntl(self.number, F_DUPFD_QUERY, watched.as_raw_fd()) } {
            0 => false,
            1 => true,
            _ => self.has_our_event(),
        }
    }

    /// The same for older kernels: only our epoll set contains our event. Changes nothing: the
    /// event keeps its interest mask.
    #[cold]
    fn has_our_event(&self) -> bool {
        control(self.number, libc::EPOLL_CTL_MOD, &self.event).is_ok()
    }

    /// Closes the program's descriptor, if it still is ours, and removes our event from it. An
    /// event loop of the program watches it until the last copy is closed, and the core holds one:
    /// after the close it must not become readable.
    pub(super) fn close(&self, watched: BorrowedFd<'_>) {
        let is_ours = self.is_ours(watched);
        let _ = control(watched.as_raw_fd(), libc::EPOLL_CTL_DEL, &self.event);
        if is_ours {
            // SAFETY: it is the copy that was made for the program, which gives up ownership by
            // closing.
            drop(unsafe { OwnedFd::from_raw_fd(self.number) });
        }
    }
}

fn control(set: c_int, operation: c_int, event: &EventFd) -> std::io::Result<()> {
    let mut interest = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: the interest is valid; a number that is no epoll descriptor is an error.
    match unsafe { libc::epoll_ctl(set, operation, event.as_raw_fd(), &raw mut interest) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Sleeps until a descriptor is readable or an event is signalled, or for a short timeout: without
/// a free descriptor no event reports a failed accept. Returns whether it is readable or signalled.
pub(super) fn wait_readable(watched: &impl AsFd, event: &EventFd) -> bool {
    let fds = [watched.as_fd(), event.as_fd()];
    let mut both =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    const RECHECK_MS: c_int = 100;
    // SAFETY: two valid entries. After an interrupt or timeout the caller checks and calls again.
    unsafe { libc::poll(both.as_mut_ptr(), 2, RECHECK_MS) > 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memferry_sys::epoll::EpollSet;

    fn is_readable(number: c_int) -> bool {
        let mut one = libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&raw mut one, 1, 0) == 1 }
    }

    #[test]
    fn a_number_that_stands_for_something_else_is_not_ours() {
        let (watched, other) = (EpollSet::new().unwrap(), EpollSet::new().unwrap());
        let descriptor = UserFd::over(watched.as_fd()).unwrap();
        let (number, watched) = (descriptor.number(), watched.as_fd());
        assert!(descriptor.is_ours(watched) && descriptor.has_our_event());
        // Another epoll, a file, and nothing at all, under the same number.
        let file = std::fs::File::open("/dev/null").unwrap();
        for stranger in [other.as_fd(), file.as_fd()] {
            // SAFETY: replaces the descriptor that this test made.
            assert_eq!(unsafe { libc::dup2(stranger.as_raw_fd(), number) }, number);
            assert!(!descriptor.is_ours(watched) && !descriptor.has_our_event());
            descriptor.close(watched);
        }
        // SAFETY: closes the descriptor that the test put there.
        unsafe { libc::close(number) };
        assert!(!descriptor.is_ours(watched) && !descriptor.has_our_event());
    }

    #[test]
    fn an_event_makes_it_readable() {
        let watched = EpollSet::new().unwrap();
        let descriptor = UserFd::over(watched.as_fd()).unwrap();
        assert!(!is_readable(descriptor.number()));
        descriptor.event().signal();
        assert!(descriptor.has_our_event() && is_readable(descriptor.number()));
        descriptor.event().drain();
        assert!(!is_readable(descriptor.number()));
        descriptor.close(watched.as_fd());
    }
}
