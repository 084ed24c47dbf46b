//! A counter for frequent events, with one shard for each thread.
//!
//! Threads that exist at the same time have different numbers, which are reused after they end. A
//! thread with a number below [`OWN_SHARDS`] is the only writer of its shard, so a load and a store
//! count exactly; all other threads share one shard and use an atomic addition.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::sync::lock;

use super::config::DataPath;
use super::counters::ByDataPath;

/// Number of threads with a shard of their own.
const OWN_SHARDS: usize = 63;

/// Hits by data path.
#[derive(Debug)]
pub(crate) struct ShardedHitCounter {
    /// The last shard is shared by all threads beyond [`OWN_SHARDS`].
    shards: Box<[CounterShard]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct CounterShard {
    hits: [AtomicU64; 2],
}

impl ShardedHitCounter {
    pub(crate) fn new() -> Self {
        Self { shards: (0..=OWN_SHARDS).map(|_| CounterShard::default()).collect() }
    }

    #[inline]
    pub(crate) fn count(&self, route: DataPath) {
        let number = thread_number();
        let hits = &self.shards[number.min(OWN_SHARDS)].hits[route as usize];
        if number < OWN_SHARDS {
            hits.store(hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        } else {
            hits.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn sum(&self) -> ByDataPath<u64> {
        let sum = |route: DataPath| {
            self.shards.iter().map(|shard| shard.hits[route as usize].load(Ordering::Relaxed)).sum()
        };
        ByDataPath { send: sum(DataPath::Send), receive: sum(DataPath::Receive) }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.shards)
    }
}

/// Value of `NUMBER` before a number is allocated.
const NO_NUMBER: usize = usize::MAX;

thread_local! {
    /// Read by every hit, so it has no destructor, which would cost a check.
    static NUMBER: Cell<usize> = const { Cell::new(NO_NUMBER) };
    static NUMBER_GUARD: NumberGuard = const { NumberGuard };
}

static NUMBERS: Mutex<ThreadNumbers> = Mutex::new(ThreadNumbers { free: BTreeSet::new(), next: 0 });

struct ThreadNumbers {
    free: BTreeSet<usize>,
    next: usize,
}

/// Frees the number of an ending thread. The lock orders the thread's last count before the first
/// one of the next thread with that number.
struct NumberGuard;

impl Drop for NumberGuard {
    fn drop(&mut self) {
        // Counts during the rest of the thread's end go to the shared shard.
        let number = NUMBER.replace(NO_NUMBER - 1);
        lock(&NUMBERS).free.insert(number);
    }
}

#[inline]
fn thread_number() -> usize {
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
        return NO_NUMBER - 1;
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
        let counts = ShardedHitCounter::new();
        let barrier = std::sync::Barrier::new(OWN_SHARDS + 20);
        std::thread::scope(|scope| {
            for _ in 0..OWN_SHARDS + 20 {
                scope.spawn(|| {
                    counts.count(DataPath::Receive);
                    // All threads exist at the same time, so that some have no shard of their own.
                    barrier.wait();
                    for _ in 0..EACH {
                        counts.count(DataPath::Send);
                    }
                });
            }
        });
        let threads = OWN_SHARDS as u64 + 20;
        assert_eq!(counts.sum(), ByDataPath { send: threads * EACH, receive: threads });
    }

    #[test]
    fn numbers_of_ended_threads_are_used_again() {
        let counts = ShardedHitCounter::new();
        let mut numbers = BTreeSet::new();
        for _ in 0..1000 {
            let one = std::thread::scope(|scope| {
                let count = || {
                    counts.count(DataPath::Send);
                    NUMBER.get()
                };
                scope.spawn(count).join().unwrap()
            });
            numbers.insert(one);
        }
        assert_eq!(counts.sum().send, 1000);
        // Other tests start threads concurrently, but not hundreds of them.
        assert!(numbers.len() < 500, "{numbers:?}");
    }
}
