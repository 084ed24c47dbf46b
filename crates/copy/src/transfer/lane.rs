//! A channel as transfers see it: something to wait for a number on.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use memferry_engine::{Channel, Completion, Sequence};
use memferry_sys::fork;

/// How waiting is done: the same for all transfers of a ferry.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// How long to spin before sleeping.
    pub(crate) spin_ns: u64,
    /// The channels' threads exist only in the process that started them.
    pub(crate) fork_generation: u64,
    /// Chunks carried out by waiting callers.
    pub(crate) helped_chunks: AtomicU64,
}

impl Waiting {
    pub(crate) fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }
}

/// A channel and how to wait for it, in one allocation, so that a handle costs one count.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) channel: Arc<dyn Channel>,
    pub(crate) waiting: Arc<Waiting>,
}

impl Lane {
    /// Spins, then sleeps, until the channel has come to a number, or until the deadline. Returns
    /// whether it has come there.
    pub(crate) fn wait(&self, sequence: Sequence, deadline: Option<Instant>) -> bool {
        const LOOKS_PER_CLOCK: u32 = 64;
        const NAP: Duration = Duration::from_millis(100);
        let mut start = None;
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.channel.completed() >= sequence {
                    return true;
                }
                std::hint::spin_loop();
            }
            let start = *start.get_or_insert_with(Instant::now);
            if start.elapsed().as_nanos() >= u128::from(self.waiting.spin_ns) {
                break;
            }
        }
        while !self.waiting.is_forked() {
            let left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                Some(left) => left.min(NAP),
                None => NAP,
            };
            if self.channel.park(sequence, left) {
                return true;
            }
        }
        false
    }

    /// A completion that ends when the channel has come to a number. Neither takes room in the channel
    /// nor waits.
    pub(crate) fn completion_of(&self, sequence: Sequence) -> Arc<Completion> {
        let completion = self.channel.completion_of(sequence);
        completion.expect("only channels that tell of their numbers are used by them")
    }
}
