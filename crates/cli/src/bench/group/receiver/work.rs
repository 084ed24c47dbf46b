//! The computation on a task, and what it takes.

use std::hint::black_box;
use std::time::Instant;

use memferry::sys::clock;

use crate::bench::group::order::{Timing, warm_up_of};
use crate::bench::measure::compute;

/// Tasks behind the last timed one, so that as many are in flight at the end as at the start.
const TAIL: u64 = 3;

/// Times tasks in the middle of a stream, and what of it was not computation.
pub(super) struct Watch {
    steps: u64,
    warm_up: u64,
    iterations: u64,
    count: u64,
    begin: Clocks,
    with: Option<Elapsed>,
}

impl Watch {
    pub(super) fn new(bytes: usize, iterations: u64) -> Self {
        let (steps, warm_up) = (steps_of(bytes), warm_up_of(iterations));
        Self { steps, warm_up, iterations, count: 0, begin: Clocks::now(), with: None }
    }

    /// How many tasks there are to be in the stream.
    pub(super) fn tasks(&self) -> u64 {
        self.warm_up + self.iterations + TAIL
    }

    /// Does the next task.
    pub(super) fn task(&mut self, message: &[u8]) {
        work(message, self.steps);
        self.count += 1;
        if self.count == self.warm_up {
            self.begin = Clocks::now();
        } else if self.count == self.warm_up + self.iterations {
            self.with = Some(self.begin.elapsed());
        }
    }

    /// The time of the tasks, and how much more it is than that of the computation alone; `None` if
    /// there were none. The computation is timed now, by `computing_ns` before and after it.
    pub(super) fn timing(self, message: &[u8], computing_ns: impl Fn() -> u64) -> Option<Timing> {
        let with = self.with?;
        // In the caches of this core, whoever brought it there in the stream.
        work(message, self.steps);
        // A computation alone takes no other time than the processor's: that of the wall would be
        // this and whatever else runs on the machine.
        let begin = computing_ns();
        (0..self.iterations).for_each(|_| work(message, self.steps));
        let alone_ns = (computing_ns() - begin) as f64;
        Some(Timing {
            total_ns: with.wall_ns,
            messages_ns: with.wall_ns - alone_ns,
            processor_ns: with.processor_ns - alone_ns,
        })
    }
}

/// How much is computed on a message: several times what a copy of it takes, so that a copy can hide
/// behind it.
fn steps_of(bytes: usize) -> u64 {
    const FEWEST: u64 = 1000;
    const BYTES_PER_STEP: u64 = 4;
    FEWEST + bytes as u64 / BYTES_PER_STEP
}

/// Reads the whole message, wherever it may be cached, then computes.
fn work(message: &[u8], steps: u64) {
    let (words, rest) = message.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
    black_box(compute(steps));
}

/// The clock on the wall and that of this process, threads in the background included.
struct Clocks {
    wall: Instant,
    processor_ns: u64,
}

/// What both have counted.
struct Elapsed {
    wall_ns: f64,
    processor_ns: f64,
}

impl Clocks {
    fn now() -> Self {
        Self { wall: Instant::now(), processor_ns: clock::process_cpu_ns() }
    }

    fn elapsed(&self) -> Elapsed {
        Elapsed {
            wall_ns: self.wall.elapsed().as_nanos() as f64,
            processor_ns: (clock::process_cpu_ns() - self.processor_ns) as f64,
        }
    }
}
