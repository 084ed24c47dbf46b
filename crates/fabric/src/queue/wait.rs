//! Waiting for stations and for other threads at once, by one descriptor.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::readiness::Readiness;

use crate::abi::FI_EOTHER;
use crate::endpoint::Station;
use crate::guard::{Code, Result};

/// The longest sleep while something is under way that wakes nobody.
const GLANCE: Duration = Duration::from_millis(1);
/// The longest sleep at all: hosts that vanish ring nobody.
const LONGEST: Duration = Duration::from_millis(500);

/// What a queue or counter sleeps on: its bell, and the watched descriptors of its stations.
#[derive(Debug)]
pub(super) struct WaitSet {
    set: Readiness,
    /// Rung by threads of this process: for what does not come from a peer.
    bell: EventFd,
    rung: Mutex<Rung>,
}

/// The bell rings on until everyone has looked: one that has found nothing for itself must not silence
/// it for another.
#[derive(Debug, Default)]
struct Rung {
    /// How often it was rung.
    count: u64,
    /// What the count was when each of those looked who sleep.
    seen: HashMap<u64, u64>,
    next_sleeper: u64,
}

/// Somebody who looks and sleeps in turns.
#[derive(Debug)]
pub(super) struct Sleeper<'a> {
    set: &'a WaitSet,
    number: u64,
}

impl Sleeper<'_> {
    /// Call it after every sleep, and look then at what the bell is rung for.
    pub(super) fn wake(&self) {
        let mut rung = self.set.rung.lock().unwrap();
        let count = rung.count;
        rung.seen.insert(self.number, count);
        self.set.silence_if_seen(&rung);
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        if let Ok(mut rung) = self.set.rung.lock() {
            rung.seen.remove(&self.number);
        }
    }
}

impl WaitSet {
    fn new() -> std::io::Result<Self> {
        let (set, bell) = (Readiness::new()?, EventFd::new()?);
        set.add(bell.as_fd(), false)?;
        Ok(Self { set, bell, rung: Mutex::default() })
    }

    fn add(&self, descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
        self.set.add(descriptor, false)
    }

    fn remove(&self, descriptor: BorrowedFd<'_>) {
        self.set.remove(descriptor);
    }

    pub(super) fn ring(&self) {
        let mut rung = self.rung.lock().unwrap();
        rung.count += 1;
        self.bell.signal();
    }

    /// Forgets that the bell was rung, unless somebody sleeps who has not looked yet. Look afterwards
    /// at what it was rung for.
    pub(super) fn silence(&self) {
        self.silence_if_seen(&self.rung.lock().unwrap());
    }

    fn silence_if_seen(&self, rung: &Rung) {
        if rung.seen.values().all(|seen| *seen == rung.count) {
            self.bell.drain();
        }
    }

    /// Whoever is about to sleep, once or several times.
    pub(super) fn sleeper(&self) -> Sleeper<'_> {
        let mut rung = self.rung.lock().unwrap();
        rung.next_sleeper += 1;
        let (number, count) = (rung.next_sleeper, rung.count);
        rung.seen.insert(number, count);
        self.silence_if_seen(&rung);
        drop(rung);
        Sleeper { set: self, number }
    }

    /// Sleeps until something comes, or until then; only for a moment if something is under way that
    /// does not ring.
    pub(super) fn sleep(&self, end: Option<Instant>, rings: bool) {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = if rings { LONGEST } else { GLANCE };
        self.set.wait(Some(left.map_or(most, |left| left.min(most))));
    }

    /// The number of the descriptor, for programs that wait themselves.
    pub(super) fn descriptor(&self) -> c_int {
        self.set.as_fd().as_raw_fd()
    }
}

/// When a call with this many milliseconds has to return; never, if they are negative.
pub(super) fn deadline(milliseconds: c_int) -> Option<Instant> {
    let milliseconds = u64::try_from(milliseconds).ok()?;
    Some(Instant::now() + Duration::from_millis(milliseconds))
}

/// The wait set of a queue or counter, which is made when somebody first waits: watching stations
/// costs them something in every call.
#[derive(Debug, Default)]
pub(super) struct Sleep(OnceLock<WaitSet>);

impl Sleep {
    /// The set, with these stations. Call it with the lock under which stations come and go.
    pub(super) fn set(&self, stations: &[Arc<Station>]) -> Result<&WaitSet> {
        if self.0.get().is_none() {
            let set = WaitSet::new()?;
            for station in stations {
                set.add(station.watch()?.as_fd())?;
            }
            let _ = self.0.set(set);
        }
        self.0.get().ok_or(Code(FI_EOTHER))
    }

    /// A station has come.
    pub(super) fn add(&self, station: &Station) -> Result {
        if let Some(set) = self.0.get() {
            set.add(station.watch()?.as_fd())?;
        }
        Ok(())
    }

    /// A station goes.
    pub(super) fn remove(&self, station: &Station) {
        if let Some(set) = self.0.get()
            && let Ok(watch) = station.watch()
        {
            set.remove(watch.as_fd());
        }
    }

    /// Wakes whoever sleeps, or is about to.
    pub(super) fn ring(&self) {
        if let Some(set) = self.0.get() {
            set.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_rung(set: &WaitSet) -> bool {
        let descriptor = set.set.as_fd();
        let mut asked = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut asked, Some(&at_once)).unwrap() > 0
    }

    #[test]
    fn the_bell_rings_until_all_sleepers_have_looked() {
        let set = WaitSet::new().unwrap();
        let (one, two) = (set.sleeper(), set.sleeper());
        assert!(!is_rung(&set));
        set.ring();
        one.wake();
        one.wake();
        set.silence();
        assert!(is_rung(&set), "the other has not looked");
        two.wake();
        assert!(!is_rung(&set));
        set.ring();
        drop(two);
        assert!(is_rung(&set));
        one.wake();
        assert!(!is_rung(&set), "who has gone is not waited for");
    }

    #[test]
    fn a_sleep_without_an_end_ends_if_something_does_not_ring() {
        WaitSet::new().unwrap().sleep(None, false);
    }
}
