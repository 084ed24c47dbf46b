//! The driver of a work queue: a ring of descriptors and completion records.
//!
//! Descriptors that are posted together are one batch, which is submitted by one write. The device
//! executes descriptors in any order; the driver reports their ends in order. Descriptors have
//! running numbers; the slot of a descriptor is its number modulo the size of the ring.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::portal::PortalWords;

use super::counters::DsaAtomicCounters;
use super::descriptor::{DsaDescriptor, DsaOperation};
use super::queue_memory::QueueMemory;
use super::record::{CompletionRecord, INVALID_RECORD, RecordOutcome, status_reason};
use super::slot::{Slot, SlotState};
use super::translate;
use super::work_queue::{FaultResolution, QueueLimits, QueueStop, WorkQueue};
use crate::contract::{Descriptor, NotificationWrite};
use crate::pci::{HardwareQueue, HwStatus, PostResult, poll_until};

/// The maximum number of slots.
const MAX_RING: usize = 1 << 13;
/// The maximum number of descriptors that are submitted by themselves in one call.
const MAX_SINGLES: usize = 16;
/// The maximum time of the first descriptor.
const START_TIMEOUT: Duration = Duration::from_secs(1);
/// The time without a finished descriptor after which a queue counts as stalled. A descriptor takes
/// microseconds.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of stalls in a row after which the queue is not used any more.
const MAX_STALLS: u32 = 2;
/// The time without progress after which the driver checks the device.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// After a pause of polls of this length, the time without progress begins anew: what has happened
/// meanwhile was not seen.
const POLL_PAUSE: Duration = Duration::from_millis(100);

const BROKEN: &str = "the work queue has failed";
const STALLED: &str = "the work queue stalled";
const CROWDED: &str = "the work queue has no space";
const NOT_EXECUTED: &str = "the device did not execute a descriptor of a batch";

/// A submitted batch.
#[derive(Debug)]
struct BatchInFlight {
    is_done: bool,
}

/// The queue.
#[derive(Debug)]
pub(super) struct DsaQueue {
    /// Before the memory: its drop stops the device.
    port: Box<dyn WorkQueue>,
    limits: QueueLimits,
    memory: QueueMemory,
    slots: Box<[Slot]>,
    /// The number of the next descriptor to be written, of the next to be submitted, of the oldest
    /// that is not reported, and of the oldest whose slot the device may still read.
    head: u64,
    published: u64,
    reported: u64,
    freed: u64,
    /// The batches in flight, from this number on.
    batches: VecDeque<BatchInFlight>,
    first_batch: u64,
    /// The number of entries of the work queue that are in use.
    outstanding: usize,
    /// The first failure of the parts of the descriptor that is being reported.
    failed_part: Option<HwStatus>,
    /// A submission failed.
    stop: Option<QueueStop>,
    stalls: u32,
    /// The work queue had no space for a whole timeout: it is waited for only shortly until it has.
    is_crowded: bool,
    last_progress: Instant,
    last_check: Instant,
    last_poll: Instant,
    counters: Arc<DsaAtomicCounters>,
    is_broken: bool,
}

impl DsaQueue {
    /// Starts a queue with space for `capacity` descriptors, and tries it.
    pub(super) fn new(
        port: Box<dyn WorkQueue>,
        capacity: usize,
        counters: Arc<DsaAtomicCounters>,
    ) -> io::Result<Self> {
        let limits = port.limits();
        // A descriptor whose target is not aligned takes two slots.
        let size = (2 * capacity.clamp(1, MAX_RING / 2)).next_power_of_two();
        let memory = QueueMemory::new(&*port, size, limits.size)?;
        let mut queue = Self {
            port,
            limits,
            memory,
            slots: vec![Slot::new(DsaOperation::Noop, 0, 0); size].into_boxed_slice(),
            head: 0,
            published: 0,
            reported: 0,
            freed: 0,
            batches: VecDeque::new(),
            first_batch: 0,
            outstanding: 0,
            failed_part: None,
            stop: None,
            stalls: 0,
            is_crowded: false,
            last_progress: Instant::now(),
            last_check: Instant::now(),
            last_poll: Instant::now(),
            counters,
            is_broken: false,
        };
        queue.self_test()?;
        Ok(queue)
    }

    /// Runs one descriptor that does nothing, to check that the queue works.
    fn self_test(&mut self) -> io::Result<()> {
        self.put(Slot::new(DsaOperation::Noop, 0, 0));
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            // A shared queue may be full of descriptors of others.
            self.flush();
            if let Some(stop) = self.stop.take() {
                return Err(io::Error::other(stop.reason()));
            }
            if self.published == self.head || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        poll_until(START_TIMEOUT, || self.record(0).code() != 0);
        match self.record(0).decode(self.slots[0].kind(), 0) {
            RecordOutcome::Done(_) => {
                (self.reported, self.freed, self.outstanding) = (1, 1, 0);
                Ok(())
            }
            RecordOutcome::Pending => Err(io::Error::other("the work queue does not start")),
            RecordOutcome::PageFault { .. } => Err(io::Error::other(status_reason(3))),
            RecordOutcome::Failed(reason) => Err(io::Error::other(reason)),
        }
    }

    fn index(&self, number: u64) -> usize {
        number as usize & (self.slots.len() - 1)
    }

    fn record(&self, number: u64) -> CompletionRecord {
        self.memory.record(self.index(number))
    }

    fn has_space(&self, slots: u64) -> bool {
        self.head + slots - self.freed <= self.slots.len() as u64
    }

    /// Writes a slot behind the last one.
    fn put(&mut self, slot: Slot) {
        if self.reported == self.head {
            self.last_progress = Instant::now();
        }
        let index = self.index(self.head);
        self.slots[index] = slot;
        self.write(self.head);
        self.head += 1;
        self.counters.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// The descriptor of a slot.
    fn descriptor(&self, number: u64) -> DsaDescriptor {
        let index = self.index(number);
        self.slots[index].descriptor(self.memory.record_address(index))
    }

    /// Writes the descriptor of a slot, and clears its record.
    fn write(&self, number: u64) {
        self.memory.write(self.index(number), &self.descriptor(number));
    }

    /// Submits what is written, as far as the work queue has space.
    fn flush(&mut self) {
        while self.published < self.head && self.stop.is_none() && !self.is_broken {
            if self.outstanding >= self.limits.size {
                return;
            }
            let run = self.next_run();
            let is_batch = run > 1 && self.batches.len() < self.limits.size;
            let accepted = if is_batch { self.submit_batch(run) } else { self.submit_singles(run) };
            if accepted == 0 {
                return;
            }
        }
    }

    /// The number of descriptors that the next batch can have: they are contiguous in memory.
    fn next_run(&self) -> u64 {
        let contiguous = self.memory.contiguous_slots(self.index(self.published));
        let max = if self.limits.max_batch > 1 { self.limits.max_batch } else { MAX_SINGLES };
        (self.head - self.published).min(contiguous as u64).min(max as u64)
    }

    fn submit_batch(&mut self, run: u64) -> u64 {
        if self.limits.max_batch < 2 {
            return self.submit_singles(run);
        }
        let number = self.first_batch + self.batches.len() as u64;
        let list = self.memory.descriptor_address(self.index(self.published));
        let batch = DsaDescriptor::new(DsaOperation::Batch { list }, run as u32)
            .with_record(self.memory.clear_batch_record(number));
        if self.submit(&[batch.words()]) == 0 {
            return 0;
        }
        for number_in_ring in self.published..self.published + run {
            let index = self.index(number_in_ring);
            self.slots[index].state = SlotState::InBatch(number);
        }
        self.batches.push_back(BatchInFlight { is_done: false });
        self.published += run;
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        run
    }

    fn submit_singles(&mut self, run: u64) -> u64 {
        let space = self.limits.size - self.outstanding;
        let count = (run as usize).min(space).min(MAX_SINGLES);
        let mut words = [[0; 8]; MAX_SINGLES];
        for (offset, words) in words[..count].iter_mut().enumerate() {
            *words = self.descriptor(self.published + offset as u64).words();
        }
        let accepted = self.submit(&words[..count]) as u64;
        for number in self.published..self.published + accepted {
            let index = self.index(number);
            self.slots[index].state = SlotState::Submitted;
        }
        self.published += accepted;
        accepted
    }

    /// Submits descriptors; returns how many were accepted.
    fn submit(&mut self, descriptors: &[PortalWords]) -> usize {
        // SAFETY: they name the memory of contract descriptors that are not reported, and memory
        // of this queue; `outstanding` counts what is in flight.
        match unsafe { self.port.submit(descriptors) } {
            Ok(accepted) => {
                self.outstanding += accepted;
                self.is_crowded &= accepted == 0;
                self.counters.submissions.fetch_add(accepted as u64, Ordering::Relaxed);
                let is_full = u64::from(accepted < descriptors.len());
                self.counters.full.fetch_add(is_full, Ordering::Relaxed);
                accepted
            }
            Err(stop) => {
                self.stop = Some(stop);
                0
            }
        }
    }

    /// Polls the records of the batches.
    fn poll_batches(&mut self) {
        for position in 0..self.batches.len() {
            let number = self.first_batch + position as u64;
            if !self.batches[position].is_done && self.memory.batch_record(number).code() != 0 {
                self.batches[position].is_done = true;
                self.outstanding -= 1;
            }
        }
        while self.batches.front().is_some_and(|batch| batch.is_done) {
            self.batches.pop_front();
            self.first_batch += 1;
        }
    }

    fn is_batch_done(&self, number: u64) -> bool {
        let position = number.checked_sub(self.first_batch);
        position.is_none_or(|at| self.batches.get(at as usize).is_none_or(|batch| batch.is_done))
    }

    /// The status of a slot that has ended; `None` if it has not.
    fn poll_slot(&mut self, number: u64) -> Option<HwStatus> {
        let index = self.index(number);
        let slot = self.slots[index];
        match slot.state {
            SlotState::Ready => {
                self.resubmit(number);
                return None;
            }
            // `poll_batches` came before: a record that is not there now will not come.
            SlotState::InBatch(batch)
                if self.is_batch_done(batch) && self.record(number).code() == 0 =>
            {
                return Some(HwStatus::Failed(NOT_EXECUTED));
            }
            SlotState::Submitted | SlotState::InBatch(_) => (),
        }
        let outcome = self.record(number).decode(slot.kind(), slot.length);
        if slot.state == SlotState::Submitted && outcome != RecordOutcome::Pending {
            self.outstanding -= 1;
        }
        match outcome {
            RecordOutcome::Pending => None,
            RecordOutcome::Done(None) => Some(HwStatus::Ok),
            RecordOutcome::Done(Some(value)) => Some(HwStatus::OkValue(slot.done_bytes + value)),
            RecordOutcome::Failed(reason) => Some(HwStatus::Failed(reason)),
            RecordOutcome::PageFault { done_bytes, address, is_write } => {
                self.end_of_fault(number, done_bytes, address, is_write)
            }
        }
    }

    /// Resumes a descriptor after a page fault, if the page can be made resident.
    fn end_of_fault(
        &mut self,
        number: u64,
        done_bytes: u64,
        address: u64,
        is_write: bool,
    ) -> Option<HwStatus> {
        let index = self.index(number);
        let slot = &mut self.slots[index];
        if done_bytes >= u64::from(slot.length) || slot.faults >= slot.max_faults() {
            return Some(HwStatus::Failed(INVALID_RECORD));
        }
        let bytes = slot.bytes_from_page(address);
        if bytes == 0 {
            // The device names memory that is not the descriptor's.
            return Some(HwStatus::Failed(INVALID_RECORD));
        }
        match self.port.resolve_fault(address, is_write, bytes) {
            FaultResolution::Unsupported => Some(HwStatus::Failed(status_reason(3))),
            FaultResolution::BadMemory => {
                let done_bytes = slot.done_bytes + done_bytes;
                Some(HwStatus::BadMemory { address, done_bytes })
            }
            FaultResolution::Resolved => {
                slot.resume(done_bytes);
                self.counters.resumed_faults.fetch_add(1, Ordering::Relaxed);
                self.last_progress = Instant::now();
                self.resubmit(number);
                None
            }
        }
    }

    /// Submits the rest of a descriptor that a page fault has stopped.
    fn resubmit(&mut self, number: u64) {
        if self.outstanding >= self.limits.size || self.stop.is_some() {
            return;
        }
        self.write(number);
        if self.submit(&[self.descriptor(number).words()]) == 1 {
            let index = self.index(number);
            self.slots[index].state = SlotState::Submitted;
        }
    }

    /// Reports the end of the oldest slot.
    fn report(&mut self, ended: &mut Vec<HwStatus>, status: HwStatus) {
        let slot = self.slots[self.index(self.reported)];
        self.reported += 1;
        let is_failed = matches!(status, HwStatus::Failed(_) | HwStatus::BadMemory { .. });
        if slot.joins_next {
            self.failed_part = is_failed.then_some(status);
            return;
        }
        ended.push(self.failed_part.take().unwrap_or(status));
    }

    /// Frees the slots that are reported and that the device does not read any more.
    fn free(&mut self) {
        while self.freed < self.reported {
            if let SlotState::InBatch(batch) = self.slots[self.index(self.freed)].state
                && !self.is_batch_done(batch)
            {
                return;
            }
            self.freed += 1;
        }
    }

    /// The reason why the queue has stopped, if it has.
    fn stop_reason(&mut self) -> Option<QueueStop> {
        if let Some(stop) = self.stop.take() {
            return Some(stop);
        }
        let idle = self.last_progress.elapsed();
        if idle < CHECK_INTERVAL || self.last_check.elapsed() < CHECK_INTERVAL {
            return None;
        }
        self.last_check = Instant::now();
        match self.port.check() {
            Err(stop) => Some(stop),
            // Others fill the shared queue: nothing of this one is in flight.
            Ok(()) if self.outstanding == 0 && (self.is_crowded || idle > STALL_TIMEOUT) => {
                Some(QueueStop::Failed(CROWDED))
            }
            // Also if the record of a batch does not come.
            Ok(()) if idle > STALL_TIMEOUT => Some(QueueStop::Failed(STALLED)),
            Ok(()) => None,
        }
    }

    /// Recovers a queue that stopped: aborts what is in flight, which fails unless its record says
    /// otherwise, and continues with what was not submitted.
    fn recover(&mut self, ended: &mut Vec<HwStatus>, stop: QueueStop) {
        let reason = stop.reason();
        tracing::debug!(reason, "a work queue stopped");
        self.counters.recoveries.fetch_add(1, Ordering::Relaxed);
        self.stalls += u32::from(reason == STALLED);
        self.is_crowded = reason == CROWDED;
        if self.is_crowded {
            // The queue itself is well. What it has no space for is left to the processor.
            self.published = self.head;
        } else {
            self.is_broken = !self.port.restart() || self.stalls >= MAX_STALLS;
        }
        if self.is_broken {
            tracing::warn!(reason, "disabling a work queue that cannot be restarted");
            self.published = self.head;
        }
        while self.reported < self.published {
            let slot = self.slots[self.index(self.reported)];
            let status = match self.record(self.reported).decode(slot.kind(), slot.length) {
                RecordOutcome::Done(None) if slot.state != SlotState::Ready => HwStatus::Ok,
                RecordOutcome::Done(Some(value)) if slot.state != SlotState::Ready => {
                    HwStatus::OkValue(slot.done_bytes + value)
                }
                _ => HwStatus::Failed(if self.is_broken { BROKEN } else { reason }),
            };
            self.report(ended, status);
        }
        self.batches.clear();
        self.first_batch = 0;
        (self.freed, self.outstanding, self.last_progress) = (self.reported, 0, Instant::now());
    }
}

// SAFETY: a descriptor succeeds when its record says so, and is not executed again; it fails when
// its record says so, when the batch that contained it has ended without it, or when the queue was
// restarted, after which the device accesses nothing of it. The port is dropped, and thereby
// stopped, before the value is.
unsafe impl HardwareQueue for DsaQueue {
    fn post(
        &mut self,
        descriptor: &Descriptor,
        _notification: Option<NotificationWrite>,
    ) -> PostResult {
        if self.is_broken {
            return PostResult::Completed(HwStatus::Failed(BROKEN));
        }
        let (first, second) = match translate::slots(descriptor, &*self.port, &self.limits) {
            Ok(slots) => slots,
            Err(reason) => return PostResult::Completed(HwStatus::Failed(reason)),
        };
        if !self.has_space(1 + u64::from(second.is_some())) {
            return PostResult::Full;
        }
        self.put(first);
        if let Some(second) = second {
            self.put(second);
        }
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {
        self.flush();
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        if self.reported == self.head && self.freed == self.head {
            return;
        }
        let before = (self.reported, self.freed, self.published);
        let now = Instant::now();
        if now - std::mem::replace(&mut self.last_poll, now) > POLL_PAUSE {
            self.last_progress = now;
        }
        self.poll_batches();
        while self.reported < self.published {
            let Some(status) = self.poll_slot(self.reported) else { break };
            self.report(ended, status);
        }
        self.free();
        self.flush();
        if (self.reported, self.freed, self.published) != before {
            (self.last_progress, self.stalls) = (now, 0);
        } else if let Some(stop) = self.stop_reason() {
            self.recover(ended, stop);
            self.flush();
        }
    }
}
