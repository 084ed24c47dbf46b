//! Counts of what happens too often for a shared counter: one line of counters for each thread.
//!
//! Threads that live at the same time have different numbers, given back when they end. A thread
//! with a small number is the only writer of its counters, so a load and a store count exactly;
//! the few threads beyond share one set of counters and pay for a locked instruction.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::sync::lock;

use super::counters::ByRoute;
use super::settings::Route;

/// How many threads count without a locked instruction.
const OWN_STRIPES: usize = 63;

/// Hits by route, counted by each thread for itself.
#[derive(Debug)]
pub(crate) struct HitCounts {
    /// The last is shared by all threads beyond [`OWN_STRIPES`].
    stripes: Box<[Stripe]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    hits: [AtomicU64; 2],
}

impl HitCounts {
    pub(crate) fn new() -> Self {
        Self { stripes: (0..=OWN_STRIPES).map(|_| Stripe::default()).collect() }
    }

    #[inline]
    pub(crate) fn count(&self, route: Route) {
        let number = thread_number();
        let hits = &self.stripes[number.min(OWN_STRIPES)].hits[route as usize];
        if number < OWN_STRIPES {
            hits.store(hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        } else {
            hits.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn sum(&self) -> ByRoute<u64> {
        let sum = |route: Route| {
            self.stripes
                .iter()
                .map(|stripe| stripe.hits[route as usize].load(Ordering::Relaxed))
                .sum()
        };
        ByRoute { send: sum(Route::Send), receive: sum(Route::Receive) }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.stripes)
    }
}

/// Nobody's number: the thread has none yet, or none any more.
const NONE: usize = usize::MAX;

thread_local! {
    /// Read by every hit, so it has no destructor, which would cost a check.
    static NUMBER: Cell<usize> = const { Cell::new(NONE) };
    static GIVE_BACK: GiveBack = const { GiveBack };
}

static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { free: BTreeSet::new(), next: 0 });

struct Numbers {
    free: BTreeSet<usize>,
    next: usize,
}

/// Returns the number of an ending thread. The lock orders its last count before the first of the
/// thread that gets the number next.
struct GiveBack;

impl Drop for GiveBack {
    fn drop(&mut self) {
        // What this thread still counts while it ends goes to the shared counters.
        let number = NUMBER.replace(NONE - 1);
        lock(&NUMBERS).free.insert(number);
    }
}

#[inline]
fn thread_number() -> usize {
    match NUMBER.get() {
        NONE => take_number(),
        number => number,
    }
}

#[cold]
fn take_number() -> usize {
    // Touching it makes its destructor run at the thread's end; in a thread that is past that,
    // there is no number to be had.
    if GIVE_BACK.try_with(|_| ()).is_err() {
        return NONE - 1;
    }
    let mut numbers = lock(&NUMBERS);
    let number = numbers.free.pop_first().unwrap_or_else(|| {
        numbers.next += 1;
        numbers.next - 1
    });
    NUMBER.set(number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_stripes_count_exactly() {
        const EACH: u64 = 1000;
        let counts = HitCounts::new();
        let barrier = std::sync::Barrier::new(OWN_STRIPES + 20);
        std::thread::scope(|scope| {
            for _ in 0..OWN_STRIPES + 20 {
                scope.spawn(|| {
                    counts.count(Route::Receive);
                    // All live at once, so that some have no counters of their own.
                    barrier.wait();
                    for _ in 0..EACH {
                        counts.count(Route::Send);
                    }
                });
            }
        });
        let threads = OWN_STRIPES as u64 + 20;
        assert_eq!(counts.sum(), ByRoute { send: threads * EACH, receive: threads });
    }

    #[test]
    fn numbers_of_ended_threads_are_used_again() {
        let counts = HitCounts::new();
        let mut numbers = BTreeSet::new();
        for _ in 0..1000 {
            let one = std::thread::scope(|scope| {
                let count = || {
                    counts.count(Route::Send);
                    NUMBER.get()
                };
                scope.spawn(count).join().unwrap()
            });
            numbers.insert(one);
        }
        assert_eq!(counts.sum().send, 1000);
        // Other tests' threads come and go, but not by the hundreds.
        assert!(numbers.len() < 500, "{numbers:?}");
    }
}
