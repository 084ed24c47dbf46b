//! A channel without a thread, for processes that may start none: whoever submits carries out.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use memferry_sys::sync::lock;

use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, FailureLog, Sequence, SubmitError,
    Taken, park_by_polling,
};

/// The channel. What is submitted while another thread is at work is carried out by that thread.
#[derive(Debug, Default)]
pub(super) struct CallerChannel {
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Descriptor>,
    /// A thread is at work, and does not leave before nothing waits.
    is_busy: bool,
    outstanding_bytes: u64,
    failures: FailureLog,
    is_closed: bool,
    statistics: ChannelStatistics,
}

impl CallerChannel {
    /// Carries out the oldest descriptor; `false` if there was none, or another thread is at work.
    fn step(&self) -> bool {
        let mut queue = lock(&self.queue);
        if queue.is_busy {
            return false;
        }
        let Some(descriptor) = queue.waiting.pop_front() else { return false };
        queue.is_busy = true;
        // Not under the lock: the end of a transfer may launch a follower into this very channel.
        drop(queue);
        let bytes = descriptor.length();
        let (moved, error) = carry_out(descriptor);
        let mut queue = lock(&self.queue);
        queue.is_busy = false;
        queue.outstanding_bytes -= bytes;
        queue.statistics.completed += 1;
        queue.statistics.bytes += moved;
        if let Some(error) = error {
            queue.statistics.failed += 1;
            let sequence = queue.statistics.completed;
            queue.failures.push(sequence, error);
        }
        true
    }
}

/// Carries out a descriptor. Returns how many bytes were moved, and why not all, if not all.
fn carry_out(descriptor: Descriptor) -> (u64, Option<ExecutionError>) {
    if descriptor.is_host_only() {
        return (descriptor.run(), None);
    }
    let reason = "a processor cannot reach device memory";
    let error = ExecutionError::Engine { done_bytes: 0, reason };
    descriptor.finish(Err(error.clone()));
    (0, Some(error))
}

// SAFETY: one descriptor at a time is carried out and reported before its number is counted, in
// the order of their numbers.
unsafe impl Channel for CallerChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            return Err(SubmitError::Closed);
        }
        let first = queue.statistics.submitted + 1;
        let mut count = 0;
        for descriptor in batch.iter_mut().filter_map(Option::take) {
            queue.outstanding_bytes += descriptor.length();
            queue.waiting.push_back(descriptor);
            count += 1;
        }
        queue.statistics.submitted += count as u64;
        drop(queue);
        while self.step() {}
        Ok(Taken { first, count })
    }

    fn completed(&self) -> Sequence {
        lock(&self.queue).statistics.completed
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        lock(&self.queue).failures.find(sequence)
    }

    fn poll(&self) -> bool {
        self.step()
    }

    fn park(&self, sequence: Sequence, timeout: Duration) -> bool {
        park_by_polling(self, sequence, timeout)
    }

    fn wake(&self) {}

    fn close(&self) {
        lock(&self.queue).is_closed = true;
    }

    fn outstanding_bytes(&self) -> u64 {
        lock(&self.queue).outstanding_bytes
    }

    fn statistics(&self) -> ChannelStatistics {
        lock(&self.queue).statistics
    }
}
