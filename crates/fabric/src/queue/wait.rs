//! Waiting for stations and for other threads at once, by one descriptor.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::readiness::Readiness;

use crate::abi::FI_EOTHER;
use crate::endpoint::Station;
use crate::guard::{Code, Result};

/// What a queue or counter sleeps on: its bell, and the watched descriptors of its stations.
#[derive(Debug)]
pub(super) struct WaitSet {
    set: Readiness,
    /// Rung by threads of this process: for what does not come from a peer.
    bell: EventFd,
}

impl WaitSet {
    fn new() -> std::io::Result<Self> {
        let (set, bell) = (Readiness::new()?, EventFd::new()?);
        set.add(bell.as_fd(), false)?;
        Ok(Self { set, bell })
    }

    fn add(&self, descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
        self.set.add(descriptor, false)
    }

    fn remove(&self, descriptor: BorrowedFd<'_>) {
        self.set.remove(descriptor);
    }

    pub(super) fn ring(&self) {
        self.bell.signal();
    }

    /// Forgets that the bell was rung. Look afterwards at what it was rung for.
    pub(super) fn silence(&self) {
        self.bell.drain();
    }

    /// Sleeps until something comes, or until then.
    pub(super) fn sleep(&self, end: Option<Instant>) {
        self.set.wait(end.map(|end| end.saturating_duration_since(Instant::now())));
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
