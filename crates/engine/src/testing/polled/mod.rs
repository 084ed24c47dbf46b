//! A small engine with the limits of a device: no thread, no chunks to claim, a short ring,
//! descriptors that must not cross a page, two operations only, and manual progress. It tests the
//! contract for device engines. With an [`AuditingPinner`] it accesses only memory that is pinned
//! for it, and audits the pins.

mod auditing_pinner;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use memferry_sys::sync::lock;

pub use auditing_pinner::{AuditingPinner, PinAuditCounts};

use crate::contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CopyDirection, CostLine, Descriptor,
    Engine, ExecutionError, Kernel, MemoryKind, MemoryKindSet, Opcode, OpcodeSet, OpenError,
    Pinner, RegistrationMode, Sequence, SubmitError, Submitted,
};
use crate::runtime::FailureLog;
use crate::runtime::execute;

const PAGE: usize = 4096;
const DEFAULT_CAPACITY: usize = 16;

/// The engine. See the module's description.
#[derive(Debug)]
pub struct PolledEngine {
    capabilities: Capabilities,
    pinner: Option<Arc<AuditingPinner>>,
}

impl PolledEngine {
    /// Creates the engine without a pinner.
    pub fn new() -> Self {
        Self {
            capabilities: Capabilities {
                operations: OpcodeSet::of(&[Opcode::Copy, Opcode::Fill]),
                memory: MemoryKindSet::of(&[MemoryKind::Host]),
                max_descriptor_bytes: PAGE,
                preferred_alignment: PAGE,
                boundary_bytes: Some(PAGE),
                registration: RegistrationMode::NotRequired,
                claims_chunks: false,
                infallible: false,
                auto_progress: false,
                writes_notifications: false,
            },
            pinner: None,
        }
    }

    /// Creates the engine with memory pinned by this pinner. Before and after it moves the bytes of
    /// a descriptor, it checks that the pinner has all of them pinned under the tokens of the
    /// descriptor. It supports all operations, so that every kind of pin is checked.
    pub fn pinned_by(pinner: Arc<AuditingPinner>) -> Self {
        let plain = Self::new().capabilities;
        let capabilities = Capabilities {
            operations: OpcodeSet::ALL,
            registration: RegistrationMode::BySubmitter,
            ..plain
        };
        Self { capabilities, pinner: Some(pinner) }
    }
}

impl Default for PolledEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine for PolledEngine {
    fn name(&self) -> &'static str {
        if self.pinner.is_some() { "polled-pinned" } else { "polled" }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, _direction: CopyDirection) -> CostLine {
        CostLine::from_bandwidth(100.0, 5.0)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        self.pinner.clone().map(|pinner| pinner as Arc<dyn Pinner>)
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let capacity = options.capacity.unwrap_or(DEFAULT_CAPACITY).max(1);
        let pinner = self.pinner.clone();
        Ok(Arc::new(PolledChannel { queue: Mutex::default(), capacity, pinner }))
    }
}

#[derive(Debug)]
struct PolledChannel {
    queue: Mutex<PolledQueue>,
    capacity: usize,
    pinner: Option<Arc<AuditingPinner>>,
}

#[derive(Debug, Default)]
struct PolledQueue {
    pending: VecDeque<Descriptor>,
    /// A thread executes the oldest descriptor.
    busy: bool,
    failures: FailureLog,
    closed: bool,
    statistics: ChannelStatistics,
}

impl PolledChannel {
    /// Executes the oldest descriptor; `false` if there is none, or another thread executes one.
    fn step(&self) -> bool {
        let Some(descriptor) = self.begin() else {
            return false;
        };
        let bytes = descriptor.length();
        // Not under the lock: the end of a transfer may submit a dependent transfer to this
        // channel.
        let error = match &self.pinner {
            None => run(descriptor),
            Some(pinner) => run_pinned(descriptor, pinner),
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

    /// Takes the oldest descriptor, unless one is being executed: one at a time, so that sequences
    /// complete in order and only after their descriptors.
    fn begin(&self) -> Option<Descriptor> {
        let mut queue = lock(&self.queue);
        if queue.busy {
            return None;
        }
        let descriptor = queue.pending.pop_front()?;
        queue.busy = true;
        Some(descriptor)
    }
}

/// Executes a descriptor over any memory; returns the error, if there is one.
fn run(descriptor: Descriptor) -> Option<ExecutionError> {
    let reason = match descriptor.operation() {
        Opcode::Copy | Opcode::Fill => limit_violation(&descriptor),
        _ => Some("this operation is not supported"),
    };
    let Some(reason) = reason else {
        descriptor.run();
        return None;
    };
    let error = ExecutionError::Engine { done_bytes: 0, reason };
    descriptor.finish(Err(error.clone()));
    Some(error)
}

/// Executes a descriptor as a device does: only if its memory is pinned, without access to it if
/// not, and with a report of the end. Returns the error, if there is one.
fn run_pinned(descriptor: Descriptor, pinner: &AuditingPinner) -> Option<ExecutionError> {
    let result = match limit_violation(&descriptor).or_else(|| pinner.reject_reason(&descriptor)) {
        Some(reason) => Err(ExecutionError::Engine { done_bytes: 0, reason }),
        None => {
            let (operation, operands) = (descriptor.operation(), descriptor.operands());
            let (length, value) = (descriptor.length(), descriptor.fill_value());
            // SAFETY: the creator of the descriptor guarantees its memory until it is finished, and
            // it is host memory: `limit_violation` checked that.
            let value = unsafe { execute::run(operation, Kernel::Cached, operands, length, value) };
            pinner.audit_after_copy(&descriptor);
            Ok(value)
        }
    };
    let error = result.clone().err();
    descriptor.finish(result);
    error
}

/// The limit that the descriptor violates, if there is one.
fn limit_violation(descriptor: &Descriptor) -> Option<&'static str> {
    let crosses = |address: u64| address % PAGE as u64 + descriptor.length() > PAGE as u64;
    match descriptor.operation() {
        Opcode::Copy
        | Opcode::Move
        | Opcode::Compare
        | Opcode::Crc
        | Opcode::CopyCrc
        | Opcode::Dualcast
            if crosses(descriptor.source()) =>
        {
            Some("the source crosses a page")
        }
        operation if operation != Opcode::Crc && crosses(descriptor.target()) => {
            Some("the target crosses a page")
        }
        _ if descriptor.second_target().is_some_and(crosses) => {
            Some("the second target crosses a page")
        }
        _ if !descriptor.is_host_only() => Some("the engine cannot access device memory"),
        _ => None,
    }
}

// SAFETY: one descriptor at a time is executed and reported before its number is counted.
unsafe impl Channel for PolledChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let first = queue.statistics.submitted + 1;
        let free = self.capacity - queue.pending.len();
        let mut count = 0;
        for descriptor in batch.iter_mut().filter(|entry| entry.is_some()).take(free) {
            queue.pending.extend(descriptor.take());
            count += 1;
        }
        queue.statistics.submitted += count as u64;
        queue.statistics.full += u64::from(batch.iter().any(Option::is_some));
        Ok(Submitted { first, count })
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

    fn close(&self) {
        lock(&self.queue).closed = true;
    }

    fn outstanding_bytes(&self) -> u64 {
        lock(&self.queue).pending.iter().map(Descriptor::length).sum()
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
