//! The driver of a work queue: a ring of descriptors and completion records.
//!
//! Descriptors that are posted together are one batch, which is submitted by one write. The device
//! executes descriptors in any order, except ordered ones (`order.rs`); the driver reports their ends in
//! order. Descriptors have
//! running numbers; the slot of a descriptor is its number modulo the size of the ring.

mod order;
mod recovery;
mod submission;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::clock::CoarseInstant;
use memferry_sys::user_wait::UserWait;

use super::counters::DsaAtomicCounters;
use super::descriptor::{DsaDescriptor, DsaOperation};
use super::queue_memory::QueueMemory;
use super::record::{CompletionRecord, INVALID_RECORD, RecordOutcome, status_reason};
use super::slot::{Slot, SlotState};
use super::translate;
use super::tuning::DsaTuning;
use super::work_queue::{FaultResolution, QueueLimits, QueueStop, WorkQueue};
use crate::contract::{Descriptor, NotificationWrite};
use crate::pci::{HardwareQueue, HwStatus, PostResult, poll_until};
use crate::runtime::try_collect;

/// The maximum number of slots.
const MAX_RING: usize = 1 << 13;
/// After a pause of polls of this length, the time without progress begins anew: what has happened
/// meanwhile was not seen.
const POLL_PAUSE: Duration = Duration::from_millis(100);

const BROKEN: &str = "the work queue has failed";
const NOT_EXECUTED: &str = "the device did not execute a descriptor of a batch";
const BEHIND_FAILURE: &str = "what the descriptor is ordered after has failed";

/// A submitted batch.
#[derive(Debug)]
struct BatchInFlight {
    is_done: bool,
    /// Its end raises an interrupt.
    raises_interrupt: bool,
}

/// The reported first part of a descriptor.
#[derive(Debug, Clone, Copy)]
struct FirstPart {
    status: HwStatus,
    bytes: u64,
    /// The second part is as long as the descriptor, as this one is.
    is_parallel: bool,
}

/// The queue.
#[derive(Debug)]
pub(super) struct DsaQueue {
    /// Before the memory: its drop stops the device.
    port: Box<dyn WorkQueue>,
    limits: QueueLimits,
    /// The length from which targets are aligned first.
    aligned_from: u64,
    /// The handle of the interrupt, if the queue has one.
    interrupt: Option<u16>,
    memory: QueueMemory,
    slots: Box<[Slot]>,
    /// The number of the next descriptor to be written, of the next to be submitted, of the oldest
    /// that is not reported, and of the oldest whose slot the device may still read.
    head: u64,
    published: u64,
    reported: u64,
    freed: u64,
    /// The number behind the last ordered descriptor.
    ordered_end: u64,
    /// What is ordered, not executed, and before this number is left to the processor: something before
    /// it has failed, which the processor executes first.
    left_end: u64,
    /// The batches in flight, from this number on.
    batches: VecDeque<BatchInFlight>,
    first_batch: u64,
    /// The number of batches in flight that have not ended.
    running_batches: usize,
    /// The descriptors that were submitted by themselves and are not known to have ended. With the
    /// running batches they are the entries of the work queue that are in use: what has ended uses
    /// none, even if it is reported later.
    singles: Vec<u64>,
    /// The first part of the descriptor that is being reported.
    first_part: Option<FirstPart>,
    /// Why the queue executes nothing, until it is recovered.
    stop: Option<QueueStop>,
    stalls: u32,
    /// The number of restarts in a row after which the work queue accepted nothing.
    vain_restarts: u32,
    /// The work queue had no space for a whole timeout: it is waited for only shortly until it has.
    is_crowded: bool,
    last_progress: CoarseInstant,
    last_check: CoarseInstant,
    last_poll: CoarseInstant,
    counters: Arc<DsaAtomicCounters>,
    is_broken: bool,
}

impl FirstPart {
    /// The status of both parts. Bad memory of either counts: the processor would touch both.
    fn joined(self, second: HwStatus) -> HwStatus {
        match (self.status, second) {
            // How much of the other target is done is not known.
            (HwStatus::BadMemory { address, .. }, _) | (_, HwStatus::BadMemory { address, .. })
                if self.is_parallel =>
            {
                HwStatus::BadMemory { address, done_bytes: 0 }
            }
            (HwStatus::BadMemory { .. }, _) => self.status,
            (HwStatus::Failed(_), HwStatus::BadMemory { address, .. }) => {
                HwStatus::BadMemory { address, done_bytes: 0 }
            }
            (HwStatus::Failed(_), _) => self.status,
            (_, HwStatus::BadMemory { address, done_bytes }) => {
                HwStatus::BadMemory { address, done_bytes: self.bytes + done_bytes }
            }
            _ => second,
        }
    }
}

impl DsaQueue {
    /// Starts a queue with space for `capacity` descriptors, and tries it.
    pub(super) fn new(
        port: Box<dyn WorkQueue>,
        capacity: usize,
        tuning: &DsaTuning,
        counters: Arc<DsaAtomicCounters>,
    ) -> io::Result<Self> {
        let limits = port.limits();
        let interrupt = port.interrupt().map(|(handle, _)| handle);
        // A descriptor whose target is not aligned takes two slots.
        let size = (2 * capacity.clamp(1, MAX_RING / 2)).next_power_of_two();
        let memory = QueueMemory::new(&*port, size, limits.size)?;
        let mut queue = Self {
            port,
            limits,
            aligned_from: tuning.aligned_from_bytes(),
            interrupt,
            memory,
            slots: try_collect(size, |_| Slot::new(DsaOperation::Noop, 0, 0))?,
            head: 0,
            published: 0,
            reported: 0,
            freed: 0,
            ordered_end: 0,
            left_end: 0,
            batches: VecDeque::new(),
            first_batch: 0,
            running_batches: 0,
            singles: Vec::new(),
            first_part: None,
            stop: None,
            stalls: 0,
            vain_restarts: 0,
            is_crowded: false,
            last_progress: CoarseInstant::now(),
            last_check: CoarseInstant::now(),
            last_poll: CoarseInstant::now(),
            counters,
            is_broken: false,
        };
        queue.self_test()?;
        Ok(queue)
    }

    /// Runs one descriptor that does nothing, to check that the queue works.
    fn self_test(&mut self) -> io::Result<()> {
        self.put(Slot::new(DsaOperation::Noop, 0, 0));
        let deadline = Instant::now() + self.port.patience();
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
        poll_until(self.port.patience(), || self.record(0).code() != 0);
        match self.record(0).decode(self.slots[0].kind(), 0) {
            RecordOutcome::Done(_) => {
                (self.reported, self.freed) = (1, 1);
                self.singles.clear();
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
            self.last_progress = CoarseInstant::now();
        }
        let index = self.index(self.head);
        self.slots[index] = slot;
        self.write(self.head);
        self.head += 1;
        if slot.is_ordered {
            self.ordered_end = self.head;
        }
        self.counters.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// The descriptor of a slot that is submitted by itself.
    fn descriptor(&self, number: u64) -> DsaDescriptor {
        let index = self.index(number);
        self.slots[index].descriptor(self.memory.record_address(index))
    }

    /// Writes the descriptor of a slot into the ring, and clears its record.
    fn write(&self, number: u64) {
        let index = self.index(number);
        let record = self.memory.record_address(index);
        self.memory.write(index, &self.slots[index].descriptor_in_list(record));
    }

    /// Polls the records of the batches.
    fn poll_batches(&mut self) {
        for position in 0..self.batches.len() {
            let number = self.first_batch + position as u64;
            if !self.batches[position].is_done && self.memory.batch_record(number).code() != 0 {
                self.batches[position].is_done = true;
                self.running_batches -= 1;
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
            SlotState::Ready if self.is_left(number) => {
                return Some(self.left_to_processor(number, BEHIND_FAILURE));
            }
            SlotState::Ready => {
                self.resubmit(number);
                return None;
            }
            // `poll_batches` came before: a record that is not there now will not come.
            SlotState::InBatch(batch)
                if self.is_batch_done(batch) && self.record(number).code() == 0 =>
            {
                return self.end_without_record(number);
            }
            SlotState::Submitted | SlotState::Ended | SlotState::InBatch(_) => (),
        }
        let outcome = self.record(number).decode(slot.kind(), slot.length);
        if slot.state == SlotState::Submitted && outcome != RecordOutcome::Pending {
            self.free_entry(number);
        }
        match outcome {
            RecordOutcome::Pending => None,
            RecordOutcome::Done(None) => Some(HwStatus::Ok),
            RecordOutcome::Done(Some(value)) => Some(HwStatus::OkValue(slot.done_bytes + value)),
            RecordOutcome::Failed(reason) => Some(self.left_to_processor(number, reason)),
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
            return Some(self.left_to_processor(number, INVALID_RECORD));
        }
        let bytes = slot.bytes_from_page(address);
        if bytes == 0 {
            // The device names memory that is not the descriptor's.
            return Some(self.left_to_processor(number, INVALID_RECORD));
        }
        match self.port.resolve_fault(address, is_write, bytes) {
            FaultResolution::Unsupported => Some(self.left_to_processor(number, status_reason(3))),
            FaultResolution::BadMemory => {
                let done_bytes = slot.done_bytes + done_bytes;
                Some(HwStatus::BadMemory { address, done_bytes })
            }
            FaultResolution::Resolved => {
                slot.resume(done_bytes);
                self.counters.resumed_faults.fetch_add(1, Ordering::Relaxed);
                self.last_progress = CoarseInstant::now();
                self.resubmit(number);
                None
            }
        }
    }

    /// The status of a slot that the device does not finish. The processor touches only memory that
    /// exists: what the device would have reported as bad is bad memory, and no signal.
    fn left_to_processor(&self, number: u64, reason: &'static str) -> HwStatus {
        let slot = &self.slots[self.index(number)];
        let bad = slot.operands().into_iter().flatten().find_map(|(address, is_write)| {
            self.port.find_bad_memory(address, is_write, u64::from(slot.length))
        });
        match bad {
            Some(address) => HwStatus::BadMemory { address, done_bytes: slot.done_bytes },
            None => HwStatus::Failed(reason),
        }
    }

    /// Reports the end of the oldest slot.
    fn report(&mut self, ended: &mut Vec<HwStatus>, status: HwStatus) {
        let slot = self.slots[self.index(self.reported)];
        self.reported += 1;
        let status = if slot.joins_next {
            let bytes = slot.done_bytes + u64::from(slot.length);
            self.first_part = Some(FirstPart { status, bytes, is_parallel: slot.is_parallel });
            status
        } else {
            let status = self.first_part.take().map_or(status, |first| first.joined(status));
            ended.push(status);
            status
        };
        // Of a first part too, for the second one; at the end of the whole again, for what was posted
        // meanwhile.
        if matches!(status, HwStatus::Failed(_) | HwStatus::BadMemory { .. }) {
            self.left_end = self.head;
        }
    }

    /// What changes whenever the queue makes progress.
    fn progress(&self) -> (u64, u64, u64, usize) {
        (self.reported, self.freed, self.published, self.running_batches)
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
}

// SAFETY: a descriptor succeeds when its record says so, and is not executed again; it fails when
// its record says so, when the batch that contained it has ended without it, or when the queue was
// restarted, after which the device accesses nothing of it. The port is dropped, and thereby
// stopped, before the value is.
unsafe impl HardwareQueue for DsaQueue {
    fn post(
        &mut self,
        descriptor: &Descriptor,
        _notification: Option<NotificationWrite<'_>>,
    ) -> PostResult {
        if self.is_broken {
            return PostResult::Completed(HwStatus::Failed(BROKEN));
        }
        let slots = translate::slots(descriptor, &*self.port, &self.limits, self.aligned_from);
        let (first, second) = match slots {
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

    fn request_interrupt(&mut self) {
        let last = self.index(self.head - 1);
        self.slots[last].raises_interrupt = true;
    }

    fn is_full(&self) -> bool {
        // A descriptor whose target is not aligned takes two slots.
        !self.has_space(2)
    }

    fn needs_poll(&self) -> bool {
        // What has ended keeps its slots until the record of its batch is there.
        let needs_end = self.freed < self.head && !self.will_interrupt();
        let is_refused =
            self.published < self.head && self.entries() < self.limits.size && self.next_run() > 0;
        needs_end || is_refused
    }

    fn ring_doorbell(&mut self) {
        self.flush();
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        if self.reported == self.head && self.freed == self.head {
            return;
        }
        let before = self.progress();
        let now = CoarseInstant::now();
        if now - std::mem::replace(&mut self.last_poll, now) > POLL_PAUSE {
            self.last_progress = now;
        }
        self.poll_batches();
        while self.reported < self.published || self.is_left(self.reported) {
            self.published = self.published.max(self.reported + 1);
            let Some(status) = self.poll_slot(self.reported) else { break };
            self.report(ended, status);
        }
        self.free();
        self.flush();
        if self.progress() != before {
            (self.last_progress, self.stalls, self.vain_restarts) = (now, 0, 0);
            self.forget_timeout();
        } else {
            self.look_for_stop();
        }
    }

    fn monitors_memory(&self) -> bool {
        true
    }

    fn pause(&mut self, wait: UserWait) {
        match self.reported < self.published {
            true => self.memory.wait_for_record(self.index(self.reported), wait),
            false => wait.pause(),
        }
    }

    fn needs_recovery(&self) -> bool {
        self.stop.is_some()
    }

    fn recover(&mut self, ended: &mut Vec<HwStatus>) {
        if let Some(stop) = self.stop.take() {
            self.restart(ended, stop);
            self.flush();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
