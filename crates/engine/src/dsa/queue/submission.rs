//! Submissions to the work queue: batches, and descriptors by themselves; and the entries of the
//! work queue that they use.

use std::ops::Range;
use std::sync::atomic::Ordering;

use memferry_sys::portal::PortalWords;

use super::{BatchInFlight, DsaQueue};
use crate::dsa::descriptor::{DsaDescriptor, DsaOperation};
use crate::dsa::slot::SlotState;

/// The maximum number of descriptors that are submitted by themselves in one call.
const MAX_SINGLES: usize = 16;

impl DsaQueue {
    /// Submits what is written, as far as the work queue has space.
    pub(super) fn flush(&mut self) {
        while self.published < self.head && self.stop.is_none() && !self.is_broken {
            if !self.has_entry() {
                return;
            }
            let run = self.next_run();
            if run == 0 {
                return;
            }
            let accepted = if run > 1 && self.can_batch() {
                self.submit_batch(self.published..self.published + run)
            } else {
                self.submit_singles(run)
            };
            if accepted == 0 {
                return;
            }
            self.published += accepted;
        }
    }

    /// Whether a batch can be submitted, if the work queue has space.
    pub(super) fn can_batch(&self) -> bool {
        self.limits.max_batch > 1 && self.batches.len() < self.limits.size
    }

    /// The number of descriptors that can be submitted together: as a batch, whose descriptors are
    /// contiguous in memory, or by themselves. None if the next one waits for others.
    pub(super) fn next_run(&self) -> u64 {
        let contiguous = self.memory.contiguous_slots(self.index(self.published));
        let max = if self.limits.max_batch > 1 { self.limits.max_batch } else { MAX_SINGLES };
        let run = (self.head - self.published).min(contiguous as u64).min(max as u64);
        self.run_in_order(run)
    }

    /// Submits a batch; returns the number of its descriptors, none if it was not accepted.
    pub(super) fn submit_batch(&mut self, numbers: Range<u64>) -> u64 {
        let (first, run) = (numbers.start, numbers.end - numbers.start);
        let batch_number = self.first_batch + self.batches.len() as u64;
        let list = self.memory.descriptor_address(self.index(first));
        let batch = DsaDescriptor::new(DsaOperation::Batch { list }, run as u32)
            .with_record(self.memory.clear_batch_record(batch_number));
        // Descriptors of a batch end in any order; the batch ends last.
        let raises_interrupt = self.raises_interrupt(numbers.clone(), 1);
        if self.submit(&[self.with_interrupt(batch, raises_interrupt)]) == 0 {
            return 0;
        }
        let mut is_behind_fence = false;
        for number in numbers {
            let index = self.index(number);
            let slot = &mut self.slots[index];
            is_behind_fence |= slot.is_ordered && number > first;
            (slot.state, slot.is_behind_fence) =
                (SlotState::InBatch(batch_number), is_behind_fence);
        }
        self.batches.push_back(BatchInFlight { is_done: false, raises_interrupt });
        self.running_batches += 1;
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        run
    }

    fn submit_singles(&mut self, run: u64) -> u64 {
        let space = self.limits.size - self.entries();
        let count = (run as usize).min(space).min(MAX_SINGLES);
        let mut words = [[0; 8]; MAX_SINGLES];
        for (offset, words) in words[..count].iter_mut().enumerate() {
            *words = self.single(self.published + offset as u64, offset + 1);
        }
        let accepted = self.submit(&words[..count]) as u64;
        for number in self.published..self.published + accepted {
            let index = self.index(number);
            self.slots[index].state = SlotState::Submitted;
            self.singles.push(number);
        }
        accepted
    }

    /// The descriptor of a slot that is submitted by itself, as the entry after `taken - 1` new ones. What
    /// raises an interrupt because it takes the last entry is marked.
    fn single(&mut self, number: u64, taken: usize) -> PortalWords {
        let raises_interrupt = self.raises_interrupt(number..number + 1, taken);
        let index = self.index(number);
        self.slots[index].raises_interrupt = raises_interrupt;
        self.with_interrupt(self.descriptor(number), raises_interrupt)
    }

    /// Whether a submission raises an interrupt: one of these slots does, the next one is ordered and waits
    /// for these, or the work queue is full with `taken` new entries. What waits is submitted by a poll: a
    /// thread that sleeps meanwhile has to learn that it can be.
    fn raises_interrupt(&self, numbers: Range<u64>, taken: usize) -> bool {
        let is_full = self.entries() + taken >= self.limits.size;
        let has_waiting = numbers.end < self.head && self.slots[self.index(numbers.end)].is_ordered;
        let raises = |number| self.slots[self.index(number)].raises_interrupt;
        is_full || has_waiting || numbers.into_iter().any(raises)
    }

    /// The words of a descriptor, with the interrupt if the queue has one.
    fn with_interrupt(&self, descriptor: DsaDescriptor, raises_interrupt: bool) -> PortalWords {
        let handle = self.interrupt.filter(|_| raises_interrupt);
        handle.map_or(descriptor, |handle| descriptor.with_interrupt(handle)).words()
    }

    /// Whether something that has not ended raises an interrupt. Submissions end in any order: one that
    /// raises none may be left behind the last that does.
    pub(super) fn will_interrupt(&self) -> bool {
        let raises = |number| self.slots[self.index(number)].raises_interrupt;
        let mut singles = self.singles.iter().copied();
        self.batches.iter().any(|batch| batch.raises_interrupt && !batch.is_done)
            || singles.any(|number| raises(number) && self.record(number).code() == 0)
    }

    /// The number of entries of the work queue that are in use.
    pub(super) fn entries(&self) -> usize {
        self.singles.len() + self.running_batches
    }

    /// Whether an entry of the work queue is free. The ends of descriptors behind one that is not
    /// reported are looked up only when that matters.
    pub(super) fn has_entry(&mut self) -> bool {
        self.entries() < self.limits.size || self.reclaim() > 0
    }

    /// Frees the entries of descriptors that have ended, reported or not; returns how many.
    pub(super) fn reclaim(&mut self) -> usize {
        let before = self.singles.len();
        let mut position = 0;
        while let Some(&number) = self.singles.get(position) {
            if self.record(number).code() == 0 {
                position += 1;
            } else {
                let index = self.index(number);
                self.slots[index].state = SlotState::Ended;
                self.singles.swap_remove(position);
            }
        }
        before - self.singles.len()
    }

    /// Frees the entry of a descriptor that has ended.
    pub(super) fn free_entry(&mut self, number: u64) {
        if let Some(position) = self.singles.iter().position(|&single| single == number) {
            self.singles.swap_remove(position);
        }
    }

    /// Submits descriptors; returns how many were accepted.
    fn submit(&mut self, descriptors: &[PortalWords]) -> usize {
        // SAFETY: they name the memory of contract descriptors that are not reported, and memory
        // of this queue; `entries` counts what is in flight.
        match unsafe { self.port.submit(descriptors) } {
            Ok(accepted) => {
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

    /// Submits the rest of a descriptor that a page fault has stopped.
    pub(super) fn resubmit(&mut self, number: u64) {
        if self.stop.is_some() || !self.has_entry() {
            return;
        }
        self.write(number);
        let words = self.single(number, 1);
        if self.submit(&[words]) == 1 {
            let index = self.index(number);
            self.slots[index].state = SlotState::Submitted;
            self.singles.push(number);
        }
    }
}
