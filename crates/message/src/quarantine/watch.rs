//! A thread that polls for the end of claims on memory of operations, since a peer that is stopped does
//! not ring when it goes on or is killed. It ends when no operation is held.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use memferry_sys::fork;

use super::lock;
use crate::port::Port;

/// How often it polls.
const INTERVAL: Duration = Duration::from_millis(20);

struct Watched {
    /// Those with operations whose memory may be held.
    ports: Vec<Weak<Port>>,
    /// The thread is there, in the process of this generation: a forked child has none.
    runs_in: Option<u64>,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { ports: Vec::new(), runs_in: None });

/// Ends the held operations of a port soon after their memory is free, until none is held. Returns
/// `false` if no thread can be started.
pub(crate) fn watch(port: &Weak<Port>) -> bool {
    let Some(mut watched) = lock(&WATCHED) else { return false };
    let generation = fork::generation();
    if watched.runs_in != Some(generation) {
        if memferry_sys::thread::spawn("memferry-held", run).is_err() {
            return false;
        }
        // What the parent of a forked child watched is not the child's.
        *watched = Watched { ports: Vec::new(), runs_in: Some(generation) };
    }
    watched.add(port.clone());
    true
}

impl Watched {
    fn add(&mut self, port: Weak<Port>) {
        if !self.ports.iter().any(|known| known.ptr_eq(&port)) {
            self.ports.push(port);
        }
    }
}

fn run() {
    loop {
        std::thread::sleep(INTERVAL);
        // Taken out before they are looked at: one that is added meanwhile is looked at again.
        let Some(ports) = lock(&WATCHED).map(|mut watched| std::mem::take(&mut watched.ports))
        else {
            continue;
        };
        // Without the lock: wakers are code of the application's, and a port may end here.
        let is_held = |port: &Weak<Port>| {
            let Some(port) = port.upgrade() else { return false };
            catch_unwind(AssertUnwindSafe(|| port.release_held())).unwrap_or(true)
        };
        let held: Vec<_> = ports.into_iter().filter(is_held).collect();
        // Whoever has the lock for long is about to add something, and is waited for.
        let mut watched = memferry_sys::sync::lock(&WATCHED);
        held.into_iter().for_each(|port| watched.add(port));
        if watched.ports.is_empty() {
            watched.runs_in = None;
            return;
        }
    }
}
