//! Common code of the message tests: random numbers, patterns, guarded memory, other processes.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod absent;
pub(crate) mod crowd;
pub(crate) mod filter;
pub(crate) mod memory;
pub(crate) mod prey;
pub(crate) mod process;
pub(crate) mod raw_peer;
pub(crate) mod stopping;
pub(crate) mod talk;
pub(crate) mod traces;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memferry_message::{Endpoint, EndpointBuilder, Operation, Peer};

/// A timeout that only a hang reaches, on a busy machine too.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A name that no other test and no other process uses.
pub(crate) fn unique(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Prints a line of the test's output.
#[allow(clippy::print_stdout, reason = "the one place where tests speak")]
pub(crate) fn say(words: std::fmt::Arguments<'_>) {
    println!("{words}");
}

/// Runs only one test of this file at a time: for tests that count resources of the whole process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A deterministic generator of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Seeded from the clock, so that every run differs. The seed is printed, so that a failure can
    /// be repeated; `MEMFERRY_TEST_SEED` sets it.
    pub(crate) fn fresh_seed() -> u64 {
        let given = std::env::var("MEMFERRY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64 % 1_000_000_007)
        })
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        memory::mix(self.0)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True once in `one_in` times.
    pub(crate) fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// Two connected endpoints of this process.
pub(crate) struct Pair {
    pub(crate) here: Endpoint,
    pub(crate) there: Endpoint,
    /// The peer `there` of `here`, and the reverse.
    pub(crate) to_there: Peer,
    pub(crate) to_here: Peer,
}

/// Connects two endpoints of this process. There is no progress without calls of the test.
pub(crate) fn pair(builder: &EndpointBuilder) -> Pair {
    let (a, b) = (unique("pair-a"), unique("pair-b"));
    let (here, there) = (builder.open(&a).unwrap(), builder.open(&b).unwrap());
    let answering = there.clone();
    let to_there = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| here.connect(&b).unwrap());
        until("the other side has connected", || answering.peers().len() == 1);
        connecting.join().unwrap()
    });
    let to_here = there.connect(&a).unwrap();
    Pair { here, there, to_there, to_here }
}

impl Pair {
    /// Makes progress on both sides until the operations of either are complete.
    pub(crate) fn finish(&self, operations: &mut [&mut Operation]) {
        until("all operations are complete", || {
            self.here.progress();
            self.there.progress();
            operations.iter_mut().all(|operation| operation.test().is_some())
        });
    }

    /// Makes progress on both sides until everything possible is done.
    pub(crate) fn settle(&self) {
        let mut quiet = 0;
        while quiet < 20 {
            let moved = self.here.progress() | self.there.progress();
            quiet = if moved { 0 } else { quiet + 1 };
        }
    }
}

/// Polls until a condition holds; panics at the timeout.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "timeout waiting until {what}");
        std::thread::yield_now();
    }
}

/// Returns whether a descriptor is readable now.
pub(crate) fn is_readable(descriptor: impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut watched = [PollFd::new(&descriptor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut watched, Some(&now)).unwrap() == 1
}
