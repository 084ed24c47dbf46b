//! A channel around a hardware queue.
//!
//! Submitters put descriptors into an inbox, and one thread at a time, inside the gate, moves them on to
//! the hardware and finishes what the hardware has done. Nobody waits in front of the gate: what a
//! submitter leaves in the inbox is posted by whoever is inside. The counters are words that anybody
//! reads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_sys::stats::{self, Block, kinds};
use memferry_sys::sync::atomic::{AtomicU64, Ordering};
use memferry_sys::sync::{Mutex, lock, thread};

use super::gate::DriverGate;
use super::hardware::{HardwareQueue, HwStatus, PostResult};
use crate::contract::{
    Channel, ChannelStatistics, Descriptor, ExecutionError, NotificationWrite, Sequence,
    SubmitError, Submitted,
};
use crate::runtime::FailureLog;
use crate::runtime::ring::MAX_CAPACITY;

/// The channel. Any thread may poll it; one thread at a time makes progress.
#[derive(Debug)]
pub struct DeviceChannel {
    inbox: Mutex<Inbox>,
    gate: DriverGate,
    /// Locked inside the gate only, so nobody waits for it.
    queue: Mutex<PciQueue>,
    failures: Mutex<FailureLog>,
    counters: ChannelCounters,
    /// What `memferry top` shows. Written inside the gate.
    shown: Option<Block<kinds::ChannelCounters>>,
    capacity: usize,
}

/// Descriptors that are accepted and not yet in the queue. Locked for the time of a push.
#[derive(Debug, Default)]
struct Inbox {
    descriptors: VecDeque<Descriptor>,
    closed: bool,
}

/// The counters. Each has one writer at a time: the holder of the inbox, or the thread inside the gate.
#[derive(Debug, Default)]
struct ChannelCounters {
    /// Written with the inbox locked.
    submitted: AtomicU64,
    submitted_bytes: AtomicU64,
    full: AtomicU64,
    /// Written inside the gate. `taken` are the descriptors that have left the queue to be finished.
    taken: AtomicU64,
    completed: AtomicU64,
    ended_bytes: AtomicU64,
    copied_bytes: AtomicU64,
    failed: AtomicU64,
}

/// Adds to a counter of one writer.
#[inline]
fn add(counter: &AtomicU64, more: u64) -> u64 {
    let sum = counter.load(Ordering::Relaxed) + more;
    counter.store(sum, Ordering::Release);
    sum
}

/// How much a poll may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PollEffort {
    /// Recover the device, and execute what it did not.
    Whole,
    /// Read what the device has reported, and execute one descriptor at most: another thread polls
    /// too, and recovers the device. It may be held up by another device.
    Brief,
}

impl PollEffort {
    /// The number of failed descriptors that the processor may execute in one step: other threads
    /// find the gate occupied meanwhile, and their transfers wait.
    fn max_executed(self) -> u32 {
        match self {
            Self::Whole => 16,
            Self::Brief => 1,
        }
    }
}

#[derive(Debug)]
struct PciQueue {
    /// `None` after a panic in the driver.
    hardware: Option<Box<dyn HardwareQueue>>,
    /// Accepted descriptors that are not finished, in order: first those that the hardware has or
    /// had, then the pending ones.
    entries: VecDeque<InFlightDescriptor>,
    /// The number of entries that the hardware has or has ended.
    posted: usize,
    /// The number of entries that have failed, which the processor finishes.
    failed: usize,
    /// What the driver reports, between two calls empty.
    ended: Vec<HwStatus>,
}

#[derive(Debug)]
struct InFlightDescriptor {
    descriptor: Descriptor,
    /// The final status, once it is known.
    end: Option<FinalStatus>,
}

/// The final status of an entry.
#[derive(Debug, Clone, Copy)]
enum FinalStatus {
    Hardware(HwStatus),
    Cancelled,
}

/// What the processor reports for descriptors of a device whose driver panicked.
const PANICKED: FinalStatus =
    FinalStatus::Hardware(HwStatus::Failed("the driver of the device panicked"));

impl DeviceChannel {
    /// Creates a channel of at most `capacity` descriptors, and never more than [`MAX_CAPACITY`].
    pub fn new(hardware: Box<dyn HardwareQueue>, capacity: usize) -> Self {
        let capacity = capacity.clamp(1, MAX_CAPACITY);
        let queue = PciQueue {
            hardware: Some(hardware),
            entries: VecDeque::new(),
            posted: 0,
            failed: 0,
            ended: Vec::new(),
        };
        Self {
            inbox: Mutex::default(),
            gate: DriverGate::new(),
            queue: Mutex::new(queue),
            failures: Mutex::default(),
            counters: ChannelCounters::default(),
            shown: None,
            capacity: capacity.max(1),
        }
    }

    /// Shows the channel in `memferry top`, named after its engine and a label.
    pub fn shown_as(mut self, engine: &str, label: Option<&str>) -> Self {
        self.shown = Some(kinds::open_channel(engine, label));
        self
    }

    /// Finishes completed descriptors; `false` if there are none, or another thread is inside.
    fn step(&self, effort: PollEffort) -> bool {
        if !self.gate.try_enter() {
            return false;
        }
        let mut queue = lock(&self.queue);
        let mut is_broken = !queue.poll(effort);
        let (mut has_finished, mut max_executed) = (false, effort.max_executed());
        // The end of a transfer may submit a dependent transfer to this channel: that goes into the
        // inbox. The processor executes failed descriptors here.
        while let Some(entry) = queue.take_finished(&self.counters.taken, &mut max_executed) {
            has_finished = true;
            self.finish(entry);
        }
        is_broken |= !queue.post();
        let is_idle = queue.entries.is_empty();
        drop(queue);
        if is_broken {
            lock(&self.inbox).closed = true;
        }
        if has_finished {
            self.show(is_idle);
        }
        self.leave();
        has_finished
    }

    /// Stores the statistics for `memferry top`, inside the gate: if something has begun or nothing is left, and else
    /// after 64 descriptors.
    fn show(&self, is_due: bool) {
        let Some(shown) = &self.shown else { return };
        let new = self.completed().wrapping_sub(shown.completed.get());
        if is_due || new >= stats::TIMED_INTERVAL {
            self.statistics().show(shown);
            shown.outstanding_bytes.set(self.outstanding_bytes());
        }
    }

    /// Leaves the gate, after the inbox is empty.
    fn leave(&self) {
        self.gate.leave(|| {
            let mut queue = lock(&self.queue);
            let was_idle = queue.entries.is_empty();
            let wrap = |descriptor| InFlightDescriptor { descriptor, end: None };
            queue.entries.extend(lock(&self.inbox).descriptors.drain(..).map(wrap));
            if !queue.post() {
                lock(&self.inbox).closed = true;
            }
            // A device that does not answer has its depth shown.
            if was_idle {
                self.show(true);
            }
        });
    }

    /// Reports the end of a descriptor, and counts it.
    fn finish(&self, entry: InFlightDescriptor) {
        let (counters, bytes) = (&self.counters, entry.descriptor.length());
        match entry.finish() {
            Ok(()) => _ = add(&counters.copied_bytes, bytes),
            Err(error) => {
                add(&counters.failed, 1);
                let sequence = counters.completed.load(Ordering::Relaxed) + 1;
                lock(&self.failures).push(sequence, error);
            }
        }
        if let Some(shown) = &self.shown {
            shown.sizes[stats::class_of(bytes)].add(1);
        }
        add(&counters.ended_bytes, bytes);
        add(&counters.completed, 1);
    }
}

impl PciQueue {
    /// Reads completions from the hardware; `false` if its driver panicked.
    fn poll(&mut self, effort: PollEffort) -> bool {
        let mut ended = std::mem::take(&mut self.ended);
        let is_well = self.call_driver(|hardware| {
            hardware.poll_completions(&mut ended);
            if effort == PollEffort::Whole {
                hardware.recover(&mut ended);
            }
        });
        let mut in_flight = self.entries.iter_mut().take(self.posted).filter(|e| e.end.is_none());
        for end in ended.drain(..) {
            // After a panic all entries have ended.
            let Some(entry) = in_flight.next() else {
                assert!(!is_well, "no more completions than were posted");
                break;
            };
            entry.end = Some(FinalStatus::Hardware(end));
            self.failed += usize::from(entry.has_failed());
        }
        self.ended = ended;
        is_well
    }

    /// Posts pending descriptors while there is space; `false` if the driver panicked. After an entry
    /// that failed nothing is posted until it is finished: what is ordered after it, such as a
    /// notification write, must not overtake it.
    fn post(&mut self) -> bool {
        if self.hardware.is_none() {
            self.fail_entries();
            return true;
        }
        let before = self.posted;
        while self.posted < self.entries.len() && self.failed == 0 {
            let notification = self.notification_write_of(self.posted);
            let descriptor = &self.entries[self.posted].descriptor;
            let end = if descriptor.is_cancelled() {
                Some(FinalStatus::Cancelled)
            } else if descriptor.length() == 0 {
                Some(FinalStatus::Hardware(HwStatus::Ok))
            } else {
                let Some(hardware) = self.hardware.as_mut() else { break };
                let post = AssertUnwindSafe(|| hardware.post(descriptor, notification));
                match catch_unwind(post) {
                    Ok(PostResult::Accepted) => None,
                    Ok(PostResult::Full) => break,
                    Ok(PostResult::Completed(end)) => Some(FinalStatus::Hardware(end)),
                    Err(_) => {
                        self.fail_hardware();
                        return false;
                    }
                }
            };
            let entry = &mut self.entries[self.posted];
            entry.end = end;
            self.failed += usize::from(entry.has_failed());
            self.posted += 1;
        }
        self.posted == before || self.call_driver(|hardware| hardware.ring_doorbell())
    }

    /// Calls the driver; `false` if the driver panics. Does nothing if it has panicked before.
    fn call_driver(&mut self, call: impl FnOnce(&mut dyn HardwareQueue)) -> bool {
        let Some(hardware) = self.hardware.as_mut() else { return true };
        let is_well = catch_unwind(AssertUnwindSafe(|| call(&mut **hardware))).is_ok();
        if !is_well {
            self.fail_hardware();
        }
        is_well
    }

    /// After a panic in the driver: stops the device, and leaves its descriptors to the processor.
    /// The channel is closed by the caller.
    fn fail_hardware(&mut self) {
        let hardware = self.hardware.take();
        if catch_unwind(AssertUnwindSafe(|| drop(hardware))).is_err() {
            // The device may still write to memory that would be freed now.
            tracing::error!(
                "the driver of a device panicked, and panicked again while stopping the device"
            );
            std::process::abort();
        }
        tracing::error!("the driver of a device panicked: the processor finishes its descriptors");
        self.fail_entries();
    }

    /// Fails all entries that have not ended.
    fn fail_entries(&mut self) {
        for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
            entry.end = Some(PANICKED);
            self.failed += 1;
        }
        self.posted = self.entries.len();
    }

    /// The notification write after an entry, if this channel may perform it.
    fn notification_write_of(&self, index: usize) -> Option<NotificationWrite> {
        let last = &self.entries[index].descriptor;
        last.notification_write(|| {
            let before = self.entries.iter().take(index).map(|entry| &entry.descriptor);
            before.filter(|other| other.is_of_same_transfer(last)).map(Descriptor::length).sum()
        })
    }

    /// Removes the oldest entry if it has ended, and if the processor may execute it should it have
    /// to.
    fn take_finished(
        &mut self,
        taken: &AtomicU64,
        max_executed: &mut u32,
    ) -> Option<InFlightDescriptor> {
        let oldest =
            self.entries.front().filter(|oldest| self.posted > 0 && oldest.end.is_some())?;
        if matches!(oldest.end, Some(FinalStatus::Hardware(HwStatus::Failed(_)))) {
            *max_executed = max_executed.checked_sub(1)?;
        }
        let entry = self.entries.pop_front()?;
        self.posted -= 1;
        self.failed -= usize::from(entry.has_failed());
        add(taken, 1);
        Some(entry)
    }
}

impl InFlightDescriptor {
    fn has_failed(&self) -> bool {
        matches!(
            self.end,
            Some(
                FinalStatus::Hardware(HwStatus::Failed(_) | HwStatus::BadMemory { .. })
                    | FinalStatus::Cancelled
            )
        )
    }

    /// Reports the end; returns the error of a failed descriptor.
    fn finish(self) -> Result<(), ExecutionError> {
        let error = match self.end {
            Some(FinalStatus::Hardware(HwStatus::Ok)) => {
                self.descriptor.finish(Ok(None));
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::OkNotified)) => {
                self.descriptor.finish_notified();
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::OkValue(value))) => {
                self.descriptor.finish(Ok(Some(value)));
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::BadMemory { address, done_bytes })) => {
                ExecutionError::BadMemory { address, done_bytes }
            }
            Some(FinalStatus::Cancelled) => ExecutionError::Cancelled { done_bytes: 0 },
            Some(FinalStatus::Hardware(HwStatus::Failed(reason))) => {
                ExecutionError::Engine { done_bytes: 0, reason }
            }
            None => unreachable!("only completed descriptors are finished"),
        };
        self.descriptor.finish(Err(error.clone()));
        Err(error)
    }
}

// SAFETY: descriptors are finished in order before their numbers are counted, and by the contract
// of `HardwareQueue` the device accesses none of them after its end.
unsafe impl Channel for DeviceChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        let counters = &self.counters;
        let mut inbox = lock(&self.inbox);
        if inbox.closed {
            return Err(SubmitError::Closed);
        }
        let before = counters.submitted.load(Ordering::Relaxed);
        let in_flight = before - counters.taken.load(Ordering::Acquire);
        let free = self.capacity.saturating_sub(in_flight as usize);
        let (mut count, mut bytes) = (0, 0);
        for entry in batch.iter_mut().filter(|entry| entry.is_some()).take(free) {
            let descriptor = entry.take().expect("checked above");
            bytes += descriptor.length();
            inbox.descriptors.push_back(descriptor);
            count += 1;
        }
        if batch.iter().any(Option::is_some) {
            add(&counters.full, 1);
        }
        if count > 0 {
            add(&counters.submitted_bytes, bytes);
            add(&counters.submitted, count as u64);
        }
        drop(inbox);
        if count > 0 && self.gate.request() {
            self.leave();
        }
        Ok(Submitted { first: before + 1, count })
    }

    #[inline]
    fn completed(&self) -> Sequence {
        self.counters.completed.load(Ordering::Acquire)
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        lock(&self.failures).find(sequence)
    }

    fn poll(&self) -> bool {
        self.step(PollEffort::Whole)
    }

    fn poll_briefly(&self) -> bool {
        self.step(PollEffort::Brief)
    }

    fn close(&self) {
        lock(&self.inbox).closed = true;
    }

    fn outstanding_bytes(&self) -> u64 {
        // The ended ones first: they are never more than the submitted ones that are read later.
        let ended = self.counters.ended_bytes.load(Ordering::Acquire);
        self.counters.submitted_bytes.load(Ordering::Acquire) - ended
    }

    fn statistics(&self) -> ChannelStatistics {
        let counters = &self.counters;
        let completed = counters.completed.load(Ordering::Acquire);
        let load = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        ChannelStatistics {
            submitted: load(&counters.submitted),
            completed,
            failed: load(&counters.failed),
            bytes: load(&counters.copied_bytes),
            full: load(&counters.full),
            ..ChannelStatistics::default()
        }
    }
}

impl Drop for DeviceChannel {
    fn drop(&mut self) {
        // No other thread is left; a step that unwound may be inside still, and what others left in
        // the inbox meanwhile is posted here.
        self.gate.reset();
        if self.gate.request() {
            self.leave();
        }
        // Drivers time out on a device that stops, so this loop ends.
        while !lock(&self.queue).entries.is_empty() {
            if !self.step(PollEffort::Whole) {
                thread::yield_now();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
