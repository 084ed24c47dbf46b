//! The kernel's part of waiting, for the model checker.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Condvar, Mutex};

/// A word that threads sleep on. Compare and sleep are one step, as in the kernel.
#[derive(Debug)]
pub(crate) struct Futex {
    queue: Mutex<()>,
    sleepers: Condvar,
}

impl Futex {
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::new(()), sleepers: Condvar::new() }
    }

    pub(crate) fn wait(&self, word: &AtomicU32, expected: u32) {
        let guard = self.queue.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            drop(self.sleepers.wait(guard).unwrap());
        }
    }

    pub(crate) fn wake(&self) {
        let _guard = self.queue.lock().unwrap();
        self.sleepers.notify_all();
    }
}

/// A socket that carries only wake packets: it keeps them until a thread reads them.
#[derive(Debug)]
pub(crate) struct Socket {
    packets: Mutex<u32>,
    watchers: Condvar,
}

impl Socket {
    pub(crate) fn new() -> Self {
        Self { packets: Mutex::new(0), watchers: Condvar::new() }
    }

    pub(crate) fn send(&self) {
        *self.packets.lock().unwrap() += 1;
        self.watchers.notify_all();
    }

    /// Sleeps until there are packets, and takes them.
    pub(crate) fn wait_and_drain(&self) {
        let mut packets = self.packets.lock().unwrap();
        while *packets == 0 {
            packets = self.watchers.wait(packets).unwrap();
        }
        *packets = 0;
    }
}
