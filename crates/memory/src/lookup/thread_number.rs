//! Small numbers of threads: threads that exist at the same time have different numbers, which are
//! reused after they end.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memferry_sys::fork::PerProcess;

/// Value of `NUMBER` before a number is allocated.
const NO_NUMBER: usize = usize::MAX;

/// The number of a thread that is ending and has none any more: larger than all others.
const ENDING: usize = NO_NUMBER - 1;

thread_local! {
    /// Read by every hit, so it has no destructor, which would cost a check.
    static NUMBER: Cell<usize> = const { Cell::new(NO_NUMBER) };
    static NUMBER_GUARD: NumberGuard = const { NumberGuard };
}

/// The numbers of threads that have ended. A forked child does not reuse those of its parent.
static FREE: PerProcess<Mutex<BTreeSet<usize>>> = PerProcess::new();

/// The lowest number that no thread has had. A child inherits it, as the thread that forked keeps its number.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Frees the number of an ending thread. The lock orders the thread's last write before the first
/// one of the next thread with that number.
struct NumberGuard;

impl Drop for NumberGuard {
    fn drop(&mut self) {
        let number = NUMBER.replace(ENDING);
        FREE.lock().insert(number);
    }
}

/// The number of the calling thread.
#[inline(always)]
pub(crate) fn thread_number() -> usize {
    match NUMBER.get() {
        NO_NUMBER => allocate_number(),
        number => number,
    }
}

#[cold]
fn allocate_number() -> usize {
    // The access makes the destructor run at the thread's end. A thread that is past that gets no
    // number.
    if NUMBER_GUARD.try_with(|_| ()).is_err() {
        return ENDING;
    }
    let free = FREE.lock().pop_first();
    let number = free.unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.set(number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_ended_threads_are_used_again() {
        let mut numbers = BTreeSet::new();
        for _ in 0..1000 {
            numbers.insert(std::thread::spawn(thread_number).join().unwrap());
        }
        // Other tests start threads concurrently, but not hundreds of them.
        assert!(numbers.len() < 500, "{numbers:?}");
    }

    #[test]
    fn threads_that_exist_at_the_same_time_have_different_numbers() {
        let barrier = std::sync::Barrier::new(20);
        let numbers: BTreeSet<_> = std::thread::scope(|scope| {
            let number = || {
                let number = thread_number();
                barrier.wait();
                number
            };
            let threads: Vec<_> = (0..20).map(|_| scope.spawn(number)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(numbers.len(), 20);
    }
}
