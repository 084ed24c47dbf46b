//! A channel that lets another do the work and then reports what the script says.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_sys::sync::lock;

use super::{Fault, Script};
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, FailureLog, Sequence, SubmitError,
    Taken, park_by_polling,
};

#[derive(Debug)]
pub(super) struct FaultChannel {
    inner: Arc<dyn Channel>,
    script: Arc<Mutex<Script>>,
    capacity: usize,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    pending: VecDeque<Pending>,
    /// A thread is reporting the descriptor that waited longest.
    busy: bool,
    failures: FailureLog,
    closed: bool,
    statistics: ChannelStatistics,
}

/// A descriptor whose bytes the inner channel moves.
#[derive(Debug)]
struct Pending {
    descriptor: Descriptor,
    /// The number of the inner order; 0 if there was nothing to move.
    inner: Sequence,
    fault: Fault,
    not_before: Option<Instant>,
}

impl FaultChannel {
    pub(super) fn new(
        inner: Arc<dyn Channel>,
        script: Arc<Mutex<Script>>,
        capacity: usize,
    ) -> Self {
        Self { inner, script, capacity, queue: Mutex::default() }
    }

    /// Reports the oldest descriptor if its time has come.
    fn step(&self) -> bool {
        self.inner.poll();
        let Some(Pending { descriptor, inner, fault, .. }) = self.begin() else {
            return false;
        };
        let length = descriptor.length();
        let result = match self.inner.error_of(inner) {
            Some(error) => Err(error),
            None => outcome(&descriptor, fault),
        };
        // Reporting may launch followers into this very channel: not under its lock.
        match result.clone() {
            // A compare's answer is the completion's business, and the inner order reported to
            // nobody: let a processor look again.
            Ok(()) if descriptor.operation() == crate::Operation::Compare => {
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

    /// Takes the oldest descriptor if its time has come and no other is being reported: one at a
    /// time, so that numbers are completed in order and only after what they stand for.
    fn begin(&self) -> Option<Pending> {
        let mut queue = lock(&self.queue);
        if queue.busy {
            return None;
        }
        let oldest = queue.pending.front()?;
        let early = oldest.not_before.is_some_and(|at| Instant::now() < at);
        if early || self.inner.completed() < oldest.inner {
            return None;
        }
        queue.busy = true;
        queue.pending.pop_front()
    }
}

/// What the script says became of a descriptor.
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

/// How much of a descriptor is really moved before the fault. An overlapping copy cannot be
/// resumed half-way, so a fault comes before its first byte.
fn moved_bytes(descriptor: &Descriptor, fault: Fault) -> u64 {
    let whole = descriptor.length();
    match fault {
        Fault::None | Fault::Delay(_) => whole,
        Fault::Partial { done_bytes } if done_bytes >= whole => whole,
        _ if descriptor.operation() == crate::Operation::Move => 0,
        Fault::Partial { done_bytes }
        | Fault::EngineFault { done_bytes }
        | Fault::BadMemory { done_bytes } => done_bytes.min(whole),
    }
}

// SAFETY: a descriptor is reported, by the script or by the inner channel's word, before its number is
// counted, and the inner order over its memory is over by then.
unsafe impl Channel for FaultChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        let mut script = lock(&self.script);
        if script.next_full() {
            queue.statistics.full += 1;
            return Ok(Taken::NONE);
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
                let order = unsafe { descriptor.unreported_copy(moved) };
                match self.inner.submit(&mut [Some(order)]) {
                    Ok(taken) if taken.count > 0 => inner = taken.last(),
                    // What was taken before must be told.
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
            let descriptor = entry.take().expect("the entry was looked at above");
            queue.pending.push_back(Pending { descriptor, inner, fault, not_before });
            count += 1;
        }
        queue.statistics.submitted += count as u64;
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

    fn wake(&self) {
        self.inner.wake();
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
        // The inner channel keeps what it has taken and is closed when this one is dropped.
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
