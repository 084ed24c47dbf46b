//! A tiny engine that is everything the processor engine is not: no thread, no chunks to claim, a
//! short ring, descriptors that may not cross a page, two operations only, and it moves on only
//! when it is polled. It keeps the contract honest for device engines, and shows how small an
//! engine can be. With a [`PinLedger`] it is also an engine that touches no memory but what is
//! pinned for it, and looks closely.

mod ledger;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_sys::sync::lock;

pub use ledger::{LedgerCounts, PinLedger};

use crate::contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Direction,
    Engine, ExecutionError, FailureLog, Kernel, MemoryKind, MemoryKinds, OpenError, Operation,
    Operations, Pinner, Registration, Sequence, SubmitError, Taken, park_by_polling,
};
use crate::execute;

const PAGE: usize = 4096;
const DEFAULT_CAPACITY: usize = 16;

/// The engine. See the module's description.
#[derive(Debug)]
pub struct PolledEngine {
    capabilities: Capabilities,
    ledger: Option<Arc<PinLedger>>,
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
                notifies: false,
            },
            ledger: None,
        }
    }

    /// The engine as one that needs its memory pinned, by this ledger. Before and after it moves
    /// the bytes of a descriptor it looks whether all of them are in the ledger under the tokens
    /// that the descriptor carries. It knows all operations, so that every kind of pin is seen.
    pub fn pinned_by(ledger: Arc<PinLedger>) -> Self {
        let plain = Self::new().capabilities;
        let capabilities = Capabilities {
            operations: Operations::of(&[
                Operation::Copy,
                Operation::Move,
                Operation::Fill,
                Operation::Compare,
            ]),
            registration: Registration::ByMemoryLayer,
            ..plain
        };
        Self { capabilities, ledger: Some(ledger) }
    }
}

impl Default for PolledEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine for PolledEngine {
    fn name(&self) -> &'static str {
        if self.ledger.is_some() { "polled-pinned" } else { "polled" }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: Direction) -> CostLine {
        CostLine::from_bandwidth(100.0, 5.0)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        self.ledger.clone().map(|ledger| ledger as Arc<dyn Pinner>)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let capacity = options.capacity.unwrap_or(DEFAULT_CAPACITY).max(1);
        let ledger = self.ledger.clone();
        Ok(Arc::new(PolledChannel { queue: Mutex::default(), capacity, ledger }))
    }
}

#[derive(Debug)]
struct PolledChannel {
    queue: Mutex<Queue>,
    capacity: usize,
    ledger: Option<Arc<PinLedger>>,
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
        // Not under the lock: the end of a transfer may launch a follower into this very channel.
        let error = match &self.ledger {
            None => run(descriptor),
            Some(ledger) => run_pinned(descriptor, ledger),
        };
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

/// Carries out a descriptor over any memory. Returns why not, if not.
fn run(descriptor: Descriptor) -> Option<ExecutionError> {
    let reason = match descriptor.operation() {
        Operation::Move | Operation::Compare => Some("this operation is not supported"),
        _ => beyond_limits(&descriptor),
    };
    let Some(reason) = reason else {
        descriptor.run();
        return None;
    };
    let error = ExecutionError::Engine { done_bytes: 0, reason };
    descriptor.finish(Err(error.clone()));
    Some(error)
}

/// Carries out a descriptor as a device would: only if its memory is pinned, without touching a
/// byte if it is not, and reporting the end itself. Returns why not, if not.
fn run_pinned(descriptor: Descriptor, ledger: &PinLedger) -> Option<ExecutionError> {
    let result = match beyond_limits(&descriptor).or_else(|| ledger.objection(&descriptor)) {
        Some(reason) => Err(ExecutionError::Engine { done_bytes: 0, reason }),
        None => {
            let (source, target) = (descriptor.source(), descriptor.target());
            let (length, value) = (descriptor.length(), descriptor.fill_value());
            // SAFETY: whoever made the descriptor vouched for its memory until it is finished, and
            // it is the host's: `beyond_limits` looked.
            let difference = unsafe {
                execute::run(descriptor.operation(), Kernel::Cached, source, target, length, value)
            };
            ledger.count_if_gone(&descriptor);
            Ok(difference)
        }
    };
    let error = result.clone().err();
    descriptor.finish(result);
    error
}

/// What is wrong with the addresses of a descriptor, if anything is.
fn beyond_limits(descriptor: &Descriptor) -> Option<&'static str> {
    let crosses = |address: u64| address % PAGE as u64 + descriptor.length() > PAGE as u64;
    match descriptor.operation() {
        Operation::Copy | Operation::Move | Operation::Compare if crosses(descriptor.source()) => {
            Some("the source crosses a page")
        }
        _ if crosses(descriptor.target()) => Some("the target crosses a page"),
        _ if !descriptor.is_host_only() => Some("device memory is out of reach"),
        _ => None,
    }
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
