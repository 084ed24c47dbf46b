//! Waiting for endpoints and for other threads at the same time, by one descriptor.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::epoll::EpollSet;

use crate::abi::FI_EOTHER;
use crate::endpoint::EndpointCore;
use crate::guard::{FiError, Result};

/// Maximum sleep while something in flight wakes no thread.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum sleep in any case: hosts that vanish ring no doorbell.
const MAX_SLEEP: Duration = Duration::from_millis(500);

/// The set that a queue or counter sleeps on: its eventfd, and the ready descriptors of its
/// endpoints.
#[derive(Debug)]
pub(super) struct WaitSet {
    set: EpollSet,
    /// Signalled by threads of this process, for events that do not come from a peer.
    event: EventFd,
    epoch: Mutex<WakeEpoch>,
}

/// The eventfd stays signalled until every sleeper has polled: a sleeper that found nothing must
/// not clear it for another.
#[derive(Debug, Default)]
struct WakeEpoch {
    /// The number of signals.
    count: u64,
    /// The count that each sleeper has seen.
    seen: HashMap<u64, u64>,
    next_sleeper: u64,
}

/// A thread that polls and sleeps alternately.
#[derive(Debug)]
pub(super) struct SleeperToken<'a> {
    set: &'a WaitSet,
    number: u64,
}

impl SleeperToken<'_> {
    /// Records that the sleeper is awake. Call it after every sleep, and poll after it.
    pub(super) fn wake(&self) {
        let mut epoch = self.set.epoch.lock().unwrap();
        let count = epoch.count;
        epoch.seen.insert(self.number, count);
        self.set.clear_if_seen(&epoch);
    }
}

impl Drop for SleeperToken<'_> {
    fn drop(&mut self) {
        if let Ok(mut epoch) = self.set.epoch.lock() {
            epoch.seen.remove(&self.number);
        }
    }
}

impl WaitSet {
    fn new() -> std::io::Result<Self> {
        let (set, event) = (EpollSet::new()?, EventFd::new()?);
        set.add(event.as_fd(), false)?;
        Ok(Self { set, event, epoch: Mutex::default() })
    }

    fn add(&self, descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
        self.set.add(descriptor, false)
    }

    fn remove(&self, descriptor: BorrowedFd<'_>) {
        self.set.remove(descriptor);
    }

    pub(super) fn signal(&self) {
        let mut epoch = self.epoch.lock().unwrap();
        epoch.count += 1;
        self.event.signal();
    }

    /// Clears the eventfd, unless a sleeper has not polled since the last signal. Poll after it.
    pub(super) fn clear(&self) {
        self.clear_if_seen(&self.epoch.lock().unwrap());
    }

    fn clear_if_seen(&self, epoch: &WakeEpoch) {
        if epoch.seen.values().all(|seen| *seen == epoch.count) {
            self.event.drain();
        }
    }

    /// Registers a thread that is about to sleep, once or several times.
    pub(super) fn sleeper(&self) -> SleeperToken<'_> {
        let mut epoch = self.epoch.lock().unwrap();
        epoch.next_sleeper += 1;
        let (number, count) = (epoch.next_sleeper, epoch.count);
        epoch.seen.insert(number, count);
        self.clear_if_seen(&epoch);
        drop(epoch);
        SleeperToken { set: self, number }
    }

    /// Sleeps until an event or the deadline; at most [`POLL_INTERVAL`] if something in flight does
    /// not wake the thread.
    pub(super) fn sleep(&self, end: Option<Instant>, can_block: bool) {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let max = if can_block { MAX_SLEEP } else { POLL_INTERVAL };
        self.set.wait(Some(left.map_or(max, |left| left.min(max))));
    }

    /// The descriptor number, for programs that wait themselves.
    pub(super) fn descriptor(&self) -> c_int {
        self.set.as_fd().as_raw_fd()
    }
}

/// The deadline of a call with a timeout in milliseconds; none if it is negative.
pub(super) fn deadline(milliseconds: c_int) -> Option<Instant> {
    let milliseconds = u64::try_from(milliseconds).ok()?;
    Some(Instant::now() + Duration::from_millis(milliseconds))
}

/// The wait set of a queue or counter, created on the first wait: armed ready descriptors cost the
/// endpoints time in every call.
#[derive(Debug, Default)]
pub(super) struct LazyWaitSet(OnceLock<WaitSet>);

impl LazyWaitSet {
    /// The set, with these endpoints. Must be called with the lock under which endpoints are added
    /// and removed.
    pub(super) fn set(&self, cores: &[Arc<EndpointCore>]) -> Result<&WaitSet> {
        if self.0.get().is_none() {
            let set = WaitSet::new()?;
            for core in cores {
                set.add(core.ready_fd()?.as_fd())?;
            }
            let _ = self.0.set(set);
        }
        self.0.get().ok_or(FiError(FI_EOTHER))
    }

    /// Adds an endpoint.
    pub(super) fn add(&self, core: &EndpointCore) -> Result {
        if let Some(set) = self.0.get() {
            set.add(core.ready_fd()?.as_fd())?;
        }
        Ok(())
    }

    /// Removes an endpoint.
    pub(super) fn remove(&self, core: &EndpointCore) {
        if let Some(set) = self.0.get()
            && let Ok(watch) = core.ready_fd()
        {
            set.remove(watch.as_fd());
        }
    }

    /// Wakes every sleeping thread, and those about to sleep.
    pub(super) fn signal(&self) {
        if let Some(set) = self.0.get() {
            set.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_signalled(set: &WaitSet) -> bool {
        let descriptor = set.set.as_fd();
        let mut polled = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&zero)).unwrap() > 0
    }

    #[test]
    fn the_bell_rings_until_all_sleepers_have_looked() {
        let set = WaitSet::new().unwrap();
        let (one, two) = (set.sleeper(), set.sleeper());
        assert!(!is_signalled(&set));
        set.signal();
        one.wake();
        one.wake();
        set.clear();
        assert!(is_signalled(&set), "the other sleeper has not polled");
        two.wake();
        assert!(!is_signalled(&set));
        set.signal();
        drop(two);
        assert!(is_signalled(&set));
        one.wake();
        assert!(!is_signalled(&set), "a dropped sleeper is not waited for");
    }

    #[test]
    fn a_sleep_without_an_end_ends_if_something_does_not_ring() {
        WaitSet::new().unwrap().sleep(None, false);
    }
}
