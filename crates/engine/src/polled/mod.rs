//! A tiny engine that is everything the processor engine is not: no thread, no chunks to claim, a
//! short ring, descriptors that may not cross a page, two operations only, and it moves on only
//! when it is polled. It keeps the contract honest for device engines, and shows how small an
//! engine can be.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_sys::sync::lock;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Direction,
    Engine, ExecutionError, FailureLog, MemoryKind, MemoryKinds, OpenError, Operation, Operations,
    Registration, Sequence, SubmitError, Taken, park_by_polling,
};

const PAGE: usize = 4096;
const DEFAULT_CAPACITY: usize = 16;

/// The engine. See the module's description.
#[derive(Debug)]
pub struct PolledEngine {
    capabilities: Capabilities,
}

impl PolledEngine {
    /// The engine; it needs nothing.
    pub fn new() -> Self {
        Self {
            capabilities: Capabilities {
                operations: Operations::of(&[Operation::Copy, Operation::Fill]),
                memory: MemoryKinds::of(&[MemoryKind::Host]),
                largest_descriptor_bytes: PAGE,
                preferred_alignment: PAGE,
                boundary_bytes: Some(PAGE),
                registration: Registration::NotNeeded,
                claims_chunks: false,
                never_fails: false,
                self_driving: false,
            },
        }
    }
}

impl Default for PolledEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine for PolledEngine {
    fn name(&self) -> &'static str {
        "polled"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: Direction) -> CostLine {
        CostLine::from_bandwidth(100.0, 5.0)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let capacity = options.capacity.unwrap_or(DEFAULT_CAPACITY).max(1);
        Ok(Arc::new(PolledChannel { queue: Mutex::default(), capacity }))
    }
}

#[derive(Debug)]
struct PolledChannel {
    queue: Mutex<Queue>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Descriptor>,
    /// A thread is at work on the descriptor that waited longest.
    busy: bool,
    failures: FailureLog,
    closed: bool,
    statistics: ChannelStatistics,
}

impl PolledChannel {
    /// Carries out the oldest descriptor; `false` if there was none, or another thread is at it.
    fn step(&self) -> bool {
        let Some(descriptor) = self.begin() else {
            return false;
        };
        let bytes = descriptor.length();
        let error = refusal(&descriptor);
        // Not under the lock: the end of a transfer may launch a follower into this very channel.
        match &error {
            None => _ = descriptor.run(),
            Some(error) => descriptor.finish(Err(error.clone())),
        }
        let mut queue = lock(&self.queue);
        queue.busy = false;
        queue.statistics.completed += 1;
        match error {
            None => queue.statistics.bytes += bytes,
            Some(error) => {
                queue.statistics.failed += 1;
                let sequence = queue.statistics.completed;
                queue.failures.push(sequence, error);
            }
        }
        true
    }

    /// Takes the oldest descriptor, unless there is one in work: one at a time, so that numbers
    /// are completed in order and only after what they stand for.
    fn begin(&self) -> Option<Descriptor> {
        let mut queue = lock(&self.queue);
        if queue.busy {
            return None;
        }
        let descriptor = queue.waiting.pop_front()?;
        queue.busy = true;
        Some(descriptor)
    }
}

/// Why this engine cannot carry out a descriptor, if it cannot.
fn refusal(descriptor: &Descriptor) -> Option<ExecutionError> {
    let crosses = |address: u64| address % PAGE as u64 + descriptor.length() > PAGE as u64;
    let reason = match descriptor.operation() {
        Operation::Move | Operation::Compare => "this operation is not supported",
        Operation::Copy if crosses(descriptor.source()) => "the source crosses a page",
        _ if crosses(descriptor.target()) => "the target crosses a page",
        _ if !descriptor.is_host_only() => "device memory is out of reach",
        _ => return None,
    };
    Some(ExecutionError::Engine { done_bytes: 0, reason })
}

// SAFETY: one descriptor at a time is carried out and reported before its number is counted.
unsafe impl Channel for PolledChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let first = queue.statistics.submitted + 1;
        let room = self.capacity - queue.waiting.len();
        let mut count = 0;
        for descriptor in batch.iter_mut().filter(|entry| entry.is_some()).take(room) {
            queue.waiting.extend(descriptor.take());
            count += 1;
        }
        queue.statistics.submitted += count as u64;
        queue.statistics.full += u64::from(batch.iter().any(Option::is_some));
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
        lock(&self.queue).closed = true;
    }

    fn outstanding_bytes(&self) -> u64 {
        lock(&self.queue).waiting.iter().map(Descriptor::length).sum()
    }

    fn statistics(&self) -> ChannelStatistics {
        lock(&self.queue).statistics
    }
}

impl Drop for PolledChannel {
    fn drop(&mut self) {
        while self.step() {}
    }
}
