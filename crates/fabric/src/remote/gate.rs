//! The end of libfabric in this process: when it unloads its providers, nobody may be inside of one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The gate to the inner library.
pub(crate) static GATE: Gate = Gate::new();

/// How long those who are inside are waited for: one may be the thread that waits.
const PATIENCE: Duration = Duration::from_millis(500);

/// Threads pass it before they call another provider.
#[derive(Debug)]
pub(crate) struct Gate {
    is_closed: AtomicBool,
    inside: AtomicUsize,
}

/// While it is there, the library is.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Gate {
    const fn new() -> Self {
        Self { is_closed: AtomicBool::new(false), inside: AtomicUsize::new(0) }
    }

    /// Goes in, unless it is closed.
    pub(super) fn pass(&self) -> Option<Inside<'_>> {
        // In this order: whoever closes it looks in the other.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        (!self.is_closed.load(Ordering::SeqCst)).then_some(inside)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Lets nobody in any more, and waits until all are out.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let end = Instant::now() + PATIENCE;
        while self.inside.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_inside_once_it_is_closed() {
        let gate = Gate::new();
        drop(gate.pass().unwrap());
        let is_out = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let inside = gate.pass().unwrap();
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
        assert!(gate.pass().is_none());
    }
}
