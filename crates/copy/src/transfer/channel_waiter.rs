//! Waiting for a sequence of a channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_engine::{Channel, Completion, Sequence};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::stats;

/// The wait settings, shared by all transfers of a ferry.
#[derive(Debug)]
pub(crate) struct WaitConfig {
    /// The time in nanoseconds to spin before sleeping.
    pub(crate) spin_ns: u64,
    /// The process in which the channels' threads exist.
    pub(crate) owner: OwnerProcess,
    /// Chunks that waiting callers executed.
    pub(crate) caller_chunks: AtomicU64,
}

impl WaitConfig {
    pub(crate) fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }
}

/// A channel and its wait settings in one allocation, so that a handle costs one reference count.
#[derive(Debug)]
pub(crate) struct ChannelWaiter {
    pub(crate) channel: Arc<dyn Channel>,
    pub(crate) config: Arc<WaitConfig>,
}

impl ChannelWaiter {
    /// Spins, then sleeps, until the descriptor of a sequence is complete or the deadline passes.
    /// Returns whether it is complete. `assists`: executes descriptors that are queued meanwhile.
    pub(crate) fn wait(
        &self,
        sequence: Sequence,
        assists: bool,
        deadline: Option<Instant>,
    ) -> bool {
        const POLLS_PER_CLOCK: u32 = 64;
        const PARK_TIMEOUT: Duration = Duration::from_millis(100);
        let mut start = None;
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                if self.channel.is_complete(sequence) {
                    return true;
                }
                if assists && self.assist(sequence) {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return self.channel.is_complete(sequence);
                    }
                    continue;
                }
                std::hint::spin_loop();
            }
            let start = *start.get_or_insert_with(Instant::now);
            if start.elapsed().as_nanos() >= u128::from(self.config.spin_ns) {
                break;
            }
        }
        stats::thread(|counters| counters.sleeps.add(1));
        while !self.config.is_forked() {
            let left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return false,
                Some(left) => left.min(PARK_TIMEOUT),
                None => PARK_TIMEOUT,
            };
            if self.channel.park(sequence, left) {
                return true;
            }
        }
        false
    }

    /// Executes descriptors that are queued in the channel; returns whether there were any.
    fn assist(&self, sequence: Sequence) -> bool {
        let executed = self.channel.help(sequence);
        if executed > 0 {
            self.config.caller_chunks.fetch_add(executed, Ordering::Relaxed);
        }
        executed > 0
    }

    /// Returns a completion that is done when the channel reaches a sequence. The call takes no
    /// slot in the channel and does not block.
    pub(crate) fn completion_of(&self, sequence: Sequence) -> Arc<Completion> {
        let completion = self.channel.completion_of(sequence);
        completion.expect("only channels that tell of their numbers are used by them")
    }
}
