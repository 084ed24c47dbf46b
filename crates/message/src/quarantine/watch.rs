//! The thread that polls the claims on memory of operations: a stopped peer rings no doorbell when
//! it continues or is killed. The thread exits when no operation waits for a claim.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use memferry_sys::fork::OwnerProcess;

use super::lock;
use crate::port::Port;

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

struct WatchedPorts {
    /// Ports with operations that may wait for a claim.
    ports: Vec<Weak<Port>>,
    /// The process in which the thread runs: a forked child has no such thread.
    runs_in: Option<OwnerProcess>,
}

static WATCHED_PORTS: Mutex<WatchedPorts> =
    Mutex::new(WatchedPorts { ports: Vec::new(), runs_in: None });

/// Starts to poll the quiescing operations of a port, until none is left. Returns `false` if no
/// thread can be started.
pub(crate) fn watch(port: &Weak<Port>) -> bool {
    let Some(mut watched) = lock(&WATCHED_PORTS) else { return false };
    if !watched.runs_in.is_some_and(OwnerProcess::is_current) {
        if memferry_sys::thread::spawn("memferry-held", run).is_err() {
            return false;
        }
        // The ports that the parent process watched are not the child's.
        *watched = WatchedPorts { ports: Vec::new(), runs_in: Some(OwnerProcess::current()) };
    }
    watched.add(port.clone());
    true
}

impl WatchedPorts {
    fn add(&mut self, port: Weak<Port>) {
        if !self.ports.iter().any(|known| known.ptr_eq(&port)) {
            self.ports.push(port);
        }
    }
}

fn run() {
    loop {
        std::thread::sleep(POLL_INTERVAL);
        // Removed before they are polled, so that a port that is added during the poll is polled
        // again.
        let Some(ports) =
            lock(&WATCHED_PORTS).map(|mut watched| std::mem::take(&mut watched.ports))
        else {
            continue;
        };
        // Without the lock: wakers are code of the application, and a port may be dropped here.
        let is_quiescing = |port: &Weak<Port>| {
            let Some(port) = port.upgrade() else { return false };
            catch_unwind(AssertUnwindSafe(|| port.finish_quiesced())).unwrap_or(true)
        };
        let quiescing: Vec<_> = ports.into_iter().filter(is_quiescing).collect();
        // A thread that holds the lock is about to add a port, so this one blocks.
        let mut watched = memferry_sys::sync::lock(&WATCHED_PORTS);
        quiescing.into_iter().for_each(|port| watched.add(port));
        if watched.ports.is_empty() {
            watched.runs_in = None;
            return;
        }
    }
}
