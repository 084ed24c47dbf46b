//! Common code of the message tests: random numbers, patterns, guarded memory, other processes.
#![allow(missing_debug_implementations, reason = "tests print none of them")]

pub mod absent;
pub mod crowd;
pub mod filter;
pub mod memory;
pub mod prey;
pub mod process;
pub mod raw_peer;
pub mod stopping;
pub mod talk;
pub mod traces;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memferry_message::{Endpoint, EndpointBuilder, Operation, Peer, Window};

/// A timeout that only a hang reaches, on a busy machine too.
pub const TIMEOUT: Duration = Duration::from_secs(200);

/// A name that no other test and no other process uses.
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Prints a line of the test's output.
#[allow(clippy::print_stdout, reason = "the one place where tests speak")]
pub fn say(words: std::fmt::Arguments<'_>) {
    println!("{words}");
}

/// Runs only one test of a program at a time: for the programs `faults`, whose tests count resources of the process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A deterministic generator of random numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts at a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Seeded from the clock, so that every run differs. The seed is printed, so that a failure can
    /// be repeated; `MEMFERRY_TEST_SEED` sets it.
    pub fn fresh_seed() -> u64 {
        let given = std::env::var("MEMFERRY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64 % 1_000_000_007)
        })
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        crate::pattern::mix(self.0)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// True once in `one_in` times.
    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    /// One of a list.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// Settings of an endpoint or a job whose peers may be slow to start, on a busy machine.
pub fn patient() -> EndpointBuilder {
    EndpointBuilder::new().connect_timeout(TIMEOUT)
}

/// Two connected endpoints of this process.
pub struct Pair {
    /// The side that connects.
    pub here: Endpoint,
    /// The other side.
    pub there: Endpoint,
    /// The peer `there` of `here`.
    pub to_there: Peer,
    /// The peer `here` of `there`.
    pub to_here: Peer,
}

/// Connects two endpoints of this process. There is no progress without calls of the test.
pub fn pair(builder: &EndpointBuilder) -> Pair {
    let (a, b) = (unique("pair-a"), unique("pair-b"));
    let (here, there) = (builder.open(&a).unwrap(), builder.open(&b).unwrap());
    let to_there = here.connect(&b).unwrap();
    let to_here = there.connect(&a).unwrap();
    Pair { here, there, to_there, to_here }
}

impl Pair {
    /// Makes progress on both sides until the operations of either are complete.
    pub fn finish(&self, operations: &mut [&mut Operation]) {
        until("all operations are complete", || {
            self.here.progress();
            self.there.progress();
            operations.iter_mut().all(|operation| operation.test().is_some())
        });
    }

    /// Makes progress on both sides until everything possible is done.
    pub fn settle(&self) {
        let mut quiet = 0;
        while quiet < 20 {
            let moved = self.here.progress() | self.there.progress();
            quiet = if moved { 0 } else { quiet + 1 };
        }
    }
}

/// Polls until a condition holds; panics at the timeout.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "timeout waiting until {what}");
        std::thread::yield_now();
    }
}

/// Withdraws a window that a living peer may be accessing. On a busy machine, the peer may not run for longer than one
/// call waits.
pub fn withdraw<B: Send + 'static>(mut window: Window<B>) -> B {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match window.withdraw() {
            Ok(buffer) => return buffer,
            Err(held) => window = held.window,
        }
        assert!(Instant::now() < deadline, "the peer does not end its access");
    }
}

/// Returns whether a descriptor is readable now.
pub fn is_readable(descriptor: impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut watched = [PollFd::new(&descriptor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut watched, Some(&now)).unwrap() == 1
}
