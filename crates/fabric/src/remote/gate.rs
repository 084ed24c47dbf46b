//! The gate of libfabric's unloading: when libfabric unloads its providers, no thread may be in
//! one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The gate of the inner library.
pub(crate) static UNLOAD_GATE: UnloadGate = UnloadGate::new();

/// How long a close waits for threads inside: one of them may be the closing thread.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// A gate that threads enter before they call another provider.
#[derive(Debug)]
pub(crate) struct UnloadGate {
    is_closed: AtomicBool,
    users: AtomicUsize,
}

/// While this guard exists, the library stays loaded.
#[derive(Debug)]
pub(super) struct UnloadGuard<'a>(&'a UnloadGate);

impl Drop for UnloadGuard<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

impl UnloadGate {
    const fn new() -> Self {
        Self { is_closed: AtomicBool::new(false), users: AtomicUsize::new(0) }
    }

    /// Enters, unless the gate is closed.
    pub(super) fn enter(&self) -> Option<UnloadGuard<'_>> {
        // In this order: the closing thread does the two steps in the reverse order.
        self.users.fetch_add(1, Ordering::SeqCst);
        let inside = UnloadGuard(self);
        (!self.is_closed.load(Ordering::SeqCst)).then_some(inside)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Closes the gate, and waits until all threads have left.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let end = Instant::now() + CLOSE_TIMEOUT;
        while self.users.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_inside_once_it_is_closed() {
        let gate = UnloadGate::new();
        drop(gate.enter().unwrap());
        let is_out = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let inside = gate.enter().unwrap();
            let closing = scope.spawn(|| {
                gate.close();
                is_out.load(Ordering::SeqCst)
            });
            while !gate.is_closed() {
                std::thread::yield_now();
            }
            is_out.store(true, Ordering::SeqCst);
            drop(inside);
            assert!(closing.join().unwrap());
        });
        assert!(gate.enter().is_none());
    }
}
