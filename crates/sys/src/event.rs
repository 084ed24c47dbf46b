//! An eventfd: the completion of a transfer as a descriptor that `poll` and `epoll` understand.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::fault::{Call, call};

/// A descriptor that becomes readable when it is signalled and stays readable until it is drained.
///
/// ```
/// use memferry::{EventFd, Ferry};
///
/// let transfer = Ferry::new()?.icopy(vec![7u8; 1 << 20], vec![0u8; 1 << 20])?;
/// let event: std::sync::Arc<EventFd> = transfer.event()?; // for `poll` or `epoll`
/// transfer.wait()?;
/// assert!(event.drain() > 0);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a descriptor that is not readable, non-blocking and close-on-exec.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(call(Call::Eventfd, || eventfd(0, flags))?))
    }

    /// Makes the descriptor readable. The only possible error is an overflow of the counter, and
    /// then the descriptor is readable already.
    pub fn signal(&self) {
        crate::fault::step();
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Sleeps until the descriptor is readable, for at most `timeout`; returns whether it is. Signals
    /// stay counted.
    pub fn wait(&self, timeout: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut descriptors = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        call(Call::Poll, || poll(&mut descriptors, Some(&timeout))).is_ok_and(|ready| ready > 0)
    }

    /// Makes the descriptor unreadable; returns how often it was signalled.
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        match call(Call::EventfdRead, || rustix::io::read(&self.0, &mut count)) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

/// An event that a thread sleeps in: an [`EventFd`], or what stands for it in a model of threads.
pub trait SleepEvent: std::fmt::Debug + Send + Sync {
    /// As [`EventFd::signal`].
    fn signal(&self);
    /// As [`EventFd::wait`].
    fn wait(&self, timeout: Duration) -> bool;
    /// As [`EventFd::drain`].
    fn drain(&self) -> u64;
}

impl SleepEvent for EventFd {
    fn signal(&self) {
        EventFd::signal(self);
    }

    fn wait(&self, timeout: Duration) -> bool {
        EventFd::wait(self, timeout)
    }

    fn drain(&self) -> u64 {
        EventFd::drain(self)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_counted_until_it_is_drained() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.drain(), 0);
        event.signal();
        event.signal();
        assert_eq!(event.drain(), 2);
        assert_eq!(event.drain(), 0);
    }

    #[test]
    fn a_wait_ends_with_a_signal_or_by_its_timeout() {
        let event = EventFd::new().unwrap();
        assert!(!event.wait(Duration::ZERO));
        assert!(!event.wait(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| event.signal());
            assert!(event.wait(Duration::from_secs(60)));
        });
        assert!(event.wait(Duration::ZERO), "a wait does not drain");
        assert_eq!(event.drain(), 1);
    }
}
