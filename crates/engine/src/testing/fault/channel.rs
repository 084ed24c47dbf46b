//! A channel that submits to another channel and then reports what the script says.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use memferry_sys::sync::lock;

use super::{Fault, FaultScript};
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, Sequence, SubmitError, Submitted,
};
use crate::runtime::FailureLog;

#[derive(Debug)]
pub(super) struct FaultChannel {
    inner: Arc<dyn Channel>,
    script: Arc<Mutex<FaultScript>>,
    capacity: usize,
    queue: Mutex<FaultQueue>,
}

#[derive(Debug, Default)]
struct FaultQueue {
    pending: VecDeque<PendingDescriptor>,
    /// A thread is reporting the oldest descriptor.
    busy: bool,
    failures: FailureLog,
    closed: bool,
    statistics: ChannelStatistics,
}

/// A descriptor whose bytes the inner channel moves.
#[derive(Debug)]
struct PendingDescriptor {
    descriptor: Descriptor,
    /// The sequence of the inner descriptor; 0 if there was nothing to move.
    inner: Sequence,
    fault: Fault,
    not_before: Option<Instant>,
}

impl FaultChannel {
    pub(super) fn new(
        inner: Arc<dyn Channel>,
        script: Arc<Mutex<FaultScript>>,
        capacity: usize,
    ) -> Self {
        Self { inner, script, capacity, queue: Mutex::default() }
    }

    /// Reports the oldest descriptor if it is complete and its delay has passed.
    fn step(&self) -> bool {
        self.inner.poll();
        let Some(PendingDescriptor { descriptor, inner, fault, .. }) = self.begin() else {
            return false;
        };
        let length = descriptor.length();
        let result = match self.inner.error_of(inner) {
            Some(error) => Err(error),
            None => outcome(&descriptor, fault),
        };
        // Not under the lock: the report may submit dependent transfers to this channel.
        match result.clone() {
            // The inner descriptor reported its value, of a compare or a CRC, to no completion: a
            // processor computes it again.
            Ok(()) if descriptor.operation().has_value() => {
                descriptor.run();
            }
            result => descriptor.finish(result.map(|()| None)),
        }
        let mut queue = lock(&self.queue);
        queue.busy = false;
        queue.statistics.completed += 1;
        match result {
            Ok(()) => queue.statistics.bytes += length,
            Err(error) => {
                queue.statistics.failed += 1;
                queue.statistics.bytes += error.done_bytes();
                let sequence = queue.statistics.completed;
                queue.failures.push(sequence, error);
            }
        }
        true
    }

    /// Takes the oldest descriptor if it is ready and no other is being reported: one at a time, so
    /// that sequences complete in order and only after their descriptors.
    fn begin(&self) -> Option<PendingDescriptor> {
        let mut queue = lock(&self.queue);
        if queue.busy {
            return None;
        }
        let oldest = queue.pending.front()?;
        let is_delayed = oldest.not_before.is_some_and(|at| Instant::now() < at);
        if is_delayed || self.inner.completed() < oldest.inner {
            return None;
        }
        queue.busy = true;
        queue.pending.pop_front()
    }
}

/// The outcome of a descriptor by the script.
fn outcome(descriptor: &Descriptor, fault: Fault) -> Result<(), ExecutionError> {
    let done_bytes = moved_bytes(descriptor, fault);
    match fault {
        Fault::None | Fault::Delay(_) => Ok(()),
        Fault::Partial { .. } if done_bytes == descriptor.length() => Ok(()),
        Fault::Partial { .. } => {
            Err(ExecutionError::Engine { done_bytes, reason: "injected: stopped half-way" })
        }
        Fault::EngineFault { .. } => {
            Err(ExecutionError::Engine { done_bytes, reason: "injected: engine fault" })
        }
        Fault::BadMemory { .. } => {
            let address = descriptor.target() + done_bytes;
            Err(ExecutionError::BadMemory { address, done_bytes })
        }
    }
}

/// The number of bytes that are moved before the fault. An overlapping copy cannot be resumed
/// half-way, so a fault occurs before its first byte.
fn moved_bytes(descriptor: &Descriptor, fault: Fault) -> u64 {
    let whole = descriptor.length();
    match fault {
        Fault::None | Fault::Delay(_) => whole,
        Fault::Partial { done_bytes } if done_bytes >= whole => whole,
        _ if descriptor.operation() == crate::Opcode::Move => 0,
        Fault::Partial { done_bytes }
        | Fault::EngineFault { done_bytes }
        | Fault::BadMemory { done_bytes } => done_bytes.min(whole),
    }
}

// SAFETY: a descriptor is reported, by the script or by the inner channel's status, before its
// number is counted, and the inner descriptor over its memory is complete by then.
unsafe impl Channel for FaultChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let mut script = lock(&self.script);
        if script.next_full() {
            queue.statistics.full += 1;
            return Ok(Submitted::NONE);
        }
        let first = queue.statistics.submitted + 1;
        let mut count = 0;
        for entry in batch.iter_mut().filter(|entry| entry.is_some()) {
            let Some(descriptor) = entry.as_ref() else {
                continue;
            };
            if queue.pending.len() == self.capacity {
                queue.statistics.full += 1;
                break;
            }
            let fault = script.descriptors.front().copied().unwrap_or(Fault::None);
            let moved = moved_bytes(descriptor, fault);
            let mut inner = 0;
            if moved > 0 {
                // SAFETY: the original is finished only after the inner channel has finished this.
                let copy = unsafe { descriptor.unreported_copy(moved) };
                match self.inner.submit(&mut [Some(copy)]) {
                    Ok(accepted) if accepted.count > 0 => inner = accepted.last(),
                    // Descriptors that were accepted before must be reported.
                    Err(closed) if count == 0 => return Err(closed),
                    _ => {
                        queue.statistics.full += 1;
                        break;
                    }
                }
            }
            script.next_fault();
            let not_before = match fault {
                Fault::Delay(delay) => Some(Instant::now() + delay),
                _ => None,
            };
            let descriptor = entry.take().expect("the entry was checked above");
            queue.pending.push_back(PendingDescriptor { descriptor, inner, fault, not_before });
            count += 1;
        }
        queue.statistics.submitted += count as u64;
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

    fn wake(&self) {
        self.inner.wake();
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
        // The inner channel keeps its descriptors and is closed when this one is dropped.
    }

    fn outstanding_bytes(&self) -> u64 {
        lock(&self.queue).pending.iter().map(|pending| pending.descriptor.length()).sum()
    }

    fn statistics(&self) -> ChannelStatistics {
        lock(&self.queue).statistics
    }
}

impl Drop for FaultChannel {
    fn drop(&mut self) {
        while !lock(&self.queue).pending.is_empty() {
            if !self.step() {
                std::thread::yield_now();
            }
        }
    }
}
