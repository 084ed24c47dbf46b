//! The computation on a task, and what it takes.

use std::hint::black_box;
use std::time::Instant;

use memferry::sys::clock;

use crate::bench::measure::compute;

/// How much is computed on a message: several times what a copy of it takes, so that a copy can hide
/// behind it.
pub(super) fn steps_of(bytes: usize) -> u64 {
    const FEWEST: u64 = 1000;
    const BYTES_PER_STEP: u64 = 4;
    FEWEST + bytes as u64 / BYTES_PER_STEP
}

/// Reads the whole message, wherever it may be cached, then computes.
pub(super) fn work(message: &[u8], steps: u64) {
    let (words, rest) = message.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
    black_box(compute(steps));
}

/// The clock on the wall and that of this process, threads in the background included.
pub(super) struct Clocks {
    wall: Instant,
    processor_ns: u64,
}

/// What both have counted.
pub(super) struct Elapsed {
    pub(super) wall_ns: f64,
    pub(super) processor_ns: f64,
}

impl Clocks {
    pub(super) fn now() -> Self {
        Self { wall: Instant::now(), processor_ns: clock::process_cpu_ns() }
    }

    pub(super) fn elapsed(&self) -> Elapsed {
        Elapsed {
            wall_ns: self.wall.elapsed().as_nanos() as f64,
            processor_ns: (clock::process_cpu_ns() - self.processor_ns) as f64,
        }
    }
}
