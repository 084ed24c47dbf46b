//! The computation on a task, and the overhead of receiving.

use std::hint::black_box;
use std::time::Instant;

use memferry::sys::clock;

use crate::harness::compute;
use crate::harness::{Sample, warm_up_iterations};

/// Tasks after the last timed one, so that as many are in flight at the end as at the start.
const TAIL_TASKS: u64 = 3;

/// Measures the time of tasks in the middle of a stream, and the part of it that is not
/// computation.
pub(super) struct OverheadTimer {
    steps: u64,
    warm_up: u64,
    iterations: u64,
    count: u64,
    begin: Clocks,
    elapsed: Option<Elapsed>,
}

impl OverheadTimer {
    pub(super) fn new(bytes: usize, iterations: u64) -> Self {
        let (steps, warm_up) = (compute_steps(bytes), warm_up_iterations(iterations));
        Self { steps, warm_up, iterations, count: 0, begin: Clocks::now(), elapsed: None }
    }

    /// Number of tasks in the stream.
    pub(super) fn tasks(&self) -> u64 {
        self.warm_up + self.iterations + TAIL_TASKS
    }

    /// Computes on the next task.
    pub(super) fn run_task(&mut self, message: &[u8]) {
        process_message(message, self.steps);
        self.count += 1;
        if self.count == self.warm_up {
            self.begin = Clocks::now();
        } else if self.count == self.warm_up + self.iterations {
            self.elapsed = Some(self.begin.elapsed());
        }
    }

    /// Returns the time of the tasks, and its difference from the time of the computation alone;
    /// `None` if there were not enough tasks. The computation alone is measured here, with the
    /// clock `computing_ns`.
    pub(super) fn finish(self, message: &[u8], computing_ns: impl Fn() -> u64) -> Option<Sample> {
        let with = self.elapsed?;
        // Loads the message into the caches of this core, whichever core copied it in the stream.
        process_message(message, self.steps);
        // Processor time, because the wall-clock time of the computation would include other
        // processes on the machine.
        let begin = computing_ns();
        (0..self.iterations).for_each(|_| process_message(message, self.steps));
        let alone_ns = (computing_ns() - begin) as f64;
        Some(Sample {
            total_ns: with.wall_ns,
            messages_ns: with.wall_ns - alone_ns,
            cpu_ns: with.cpu_ns - alone_ns,
        })
    }
}

/// Steps of computation per message: several times as long as a copy of it, so that the computation
/// can hide a copy.
fn compute_steps(bytes: usize) -> u64 {
    const MIN_STEPS: u64 = 1000;
    const BYTES_PER_STEP: u64 = 4;
    MIN_STEPS + bytes as u64 / BYTES_PER_STEP
}

/// Reads the complete message, then computes.
fn process_message(message: &[u8], steps: u64) {
    let (words, rest) = message.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
    black_box(compute(steps));
}

/// Wall clock, and processor clock of this process including background threads.
struct Clocks {
    wall: Instant,
    cpu_ns: u64,
}

/// Differences of both clocks.
struct Elapsed {
    wall_ns: f64,
    cpu_ns: f64,
}

impl Clocks {
    fn now() -> Self {
        Self { wall: Instant::now(), cpu_ns: clock::process_cpu_ns() }
    }

    fn elapsed(&self) -> Elapsed {
        Elapsed {
            wall_ns: self.wall.elapsed().as_nanos() as f64,
            cpu_ns: (clock::process_cpu_ns() - self.cpu_ns) as f64,
        }
    }
}
