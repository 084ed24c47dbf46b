//! The descriptor that the program holds for a link or listener.
//!
//! It is a copy of the descriptor that the core watches with, so `poll` and `epoll` understand it,
//! and an event of our own is added to what makes it readable. The program may close it with
//! `close(2)` by mistake, and the system may give its number to something else: before it is used
//! or closed, it is compared with the one that the core has kept.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use memferry_sys::EventFd;

use crate::code::CallError;

/// Asks whether two descriptors are copies of each other; known to Linux since 6.10.
const F_DUPFD_QUERY: c_int = 1024 + 3;

/// The number that the program knows, and our event in it.
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

    /// What the program calls it.
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
        // SAFETY: asks about two numbers; one that is not open is an error.
        match unsafe { libc::fcntl(self.number, F_DUPFD_QUERY, watched.as_raw_fd()) } {
            0 => false,
            1 => true,
            _ => self.has_our_event(),
        }
    }

    /// The same for older systems: only our set has our event in it. Changes nothing: the event is
    /// watched for what it was watched for before.
    #[cold]
    fn has_our_event(&self) -> bool {
        control(self.number, libc::EPOLL_CTL_MOD, &self.event).is_ok()
    }

    /// Closes the program's descriptor, if it still is ours, and takes our event out of it. An event loop
    /// of the program knows it until the last copy is closed, and the core has one: once it was closed, it
    /// must not be readable.
    pub(super) fn close(&self, watched: BorrowedFd<'_>) {
        let is_ours = self.is_ours(watched);
        let _ = control(watched.as_raw_fd(), libc::EPOLL_CTL_DEL, &self.event);
        if is_ours {
            // SAFETY: it is the copy that was made for the program, which gives it up by this.
            drop(unsafe { OwnedFd::from_raw_fd(self.number) });
        }
    }
}

fn control(set: c_int, operation: c_int, event: &EventFd) -> std::io::Result<()> {
    let mut interest = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: the interest is valid; a number that is no epoll is an error.
    match unsafe { libc::epoll_ctl(set, operation, event.as_raw_fd(), &raw mut interest) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Sleeps until a descriptor is readable or an event is signalled, or for a moment: without a descriptor left,
/// nobody signals that a caller was tried. Says whether it is readable or signalled.
pub(super) fn wait_readable(watched: &impl AsFd, event: &EventFd) -> bool {
    let fds = [watched.as_fd(), event.as_fd()];
    let mut both =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    const RECHECK_MS: c_int = 100;
    // SAFETY: two valid entries. When it is interrupted or over, the caller looks and comes again.
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
        // SAFETY: closes what the test put there.
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
