//! The thread that polls the claims on memory of operations: a stopped peer rings no doorbell when
//! it continues or is killed. The thread exits when no operation waits for a claim.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use memferry_sys::fork::PerProcess;

use crate::port::Port;

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Default)]
struct WatchedPorts {
    /// Ports with operations that may wait for a claim.
    ports: Vec<Weak<Port>>,
    /// Whether the thread runs.
    is_polled: bool,
}

/// Those of this process, which has the thread.
static WATCHED_PORTS: PerProcess<Mutex<WatchedPorts>> = PerProcess::new();

/// Starts to poll the quiescing operations of a port, until none is left. Returns `false` if no
/// thread can be started.
pub(crate) fn watch(port: &Weak<Port>) -> bool {
    let mut watched = WATCHED_PORTS.lock();
    if !watched.is_polled {
        if memferry_sys::thread::spawn("memferry-held", run).is_err() {
            return false;
        }
        watched.is_polled = true;
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
        let ports = std::mem::take(&mut WATCHED_PORTS.lock().ports);
        // Without the lock: wakers are code of the application, and a port may be dropped here.
        let is_quiescing = |port: &Weak<Port>| {
            let Some(port) = port.upgrade() else { return false };
            catch_unwind(AssertUnwindSafe(|| port.finish_quiesced())).unwrap_or(true)
        };
        let quiescing: Vec<_> = ports.into_iter().filter(is_quiescing).collect();
        let mut watched = WATCHED_PORTS.lock();
        quiescing.into_iter().for_each(|port| watched.add(port));
        if watched.ports.is_empty() {
            watched.is_polled = false;
            return;
        }
    }
}
