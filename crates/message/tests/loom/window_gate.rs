//! Closing windows: no access is running when the owner continues.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::model;
use crate::ring::window_gate::{AccessFlag, WindowGate};

const OPEN: u64 = 1;

#[derive(Default)]
struct Window {
    gate: WindowGate,
    visiting: [AccessFlag; 2],
    memory: UnsafeCell<u64>,
}

// SAFETY: the model checks that the two never access the memory at the same time.
unsafe impl Sync for Window {}

impl Window {
    /// One access of an accessor.
    fn window_gate(&self, visitor: usize) -> bool {
        self.visiting[visitor].begin(0);
        let is_open = self.gate.load() & OPEN != 0;
        if is_open {
            // SAFETY: loom fails the test if another thread accesses the memory.
            self.memory.with_mut(|memory| unsafe { *memory += 1 });
        }
        self.visiting[visitor].end();
        is_open
    }

    /// Withdraws the memory as its owner, and uses it.
    fn withdraw(&self, visitors: usize) -> u64 {
        self.gate.close(0);
        while self.visiting[..visitors].iter().any(|visiting| visiting.is_accessing(0)) {
            thread::yield_now();
        }
        // SAFETY: as above.
        self.memory.with_mut(|memory| unsafe { std::mem::replace(&mut *memory, 100) })
    }
}

#[test]
fn nobody_is_in_a_window_that_was_withdrawn() {
    model(4, || {
        let window = Arc::new(Window::default());
        window.gate.open(OPEN);
        let visitor = thread::spawn({
            let window = window.clone();
            move || u64::from(window.window_gate(0)) + u64::from(window.window_gate(0))
        });
        let seen = window.withdraw(1);
        // The owner sees every access that was permitted before, and none is permitted after.
        assert_eq!(visitor.join().unwrap(), seen);
    });
}

#[test]
fn a_gate_shows_a_window_and_never_a_mixture_of_two() {
    model(4, || {
        let (gate, address) = (WindowGate::default(), AtomicU64::new(0));
        let shared = Arc::new((gate, address));
        let owner = thread::spawn({
            let shared = shared.clone();
            move || {
                let (gate, address) = &*shared;
                for generation in [2, 4] {
                    gate.close(generation);
                    address.store(generation, Ordering::Relaxed);
                    gate.open(generation | OPEN);
                }
            }
        });
        let (gate, address) = &*shared;
        let word = gate.load();
        if word & OPEN != 0 {
            let seen = address.load(Ordering::Relaxed);
            if gate.is_unchanged(word) {
                assert_eq!(seen, word & !OPEN);
            }
        }
        owner.join().unwrap();
    });
}
