//! Ordered descriptors, which start when every descriptor before them has ended.
//!
//! Inside a batch an ordered descriptor has a fence. If one before the fence does not succeed, also
//! because of a page fault, the device abandons the descriptor with the fence and all that follow: they
//! have no record when the batch has ended. The driver submits them again when everything before them
//! has ended well, or leaves what is ordered to the processor, which works in order.
//!
//! A fence holds for its batch. So an ordered descriptor is submitted only if everything before it is
//! in the same batch, or is reported; otherwise it waits in the ring.

use super::{BEHIND_FAILURE, DsaQueue, NOT_EXECUTED};
use crate::pci::HwStatus;

impl DsaQueue {
    /// Whether a slot that was not executed is left to the processor, because it is ordered after one
    /// that failed.
    pub(super) fn is_left(&self, number: u64) -> bool {
        number < self.left_end && self.slots[self.index(number)].is_ordered
    }

    /// How many of the next `run` slots can be submitted together: those before the first that has to
    /// wait for others.
    pub(super) fn run_in_order(&self, run: u64) -> u64 {
        if self.ordered_end <= self.published {
            return run;
        }
        // Whatever is in flight belongs to another batch.
        let is_first = self.reported == self.published;
        let can_fence = is_first && self.can_batch();
        let may_follow = |offset: &u64| {
            let number = self.published + offset;
            let is_free = if *offset == 0 { is_first } else { can_fence };
            !self.slots[self.index(number)].is_ordered || is_free && !self.is_left(number)
        };
        (0..run).take_while(may_follow).count() as u64
    }

    /// The status of the oldest slot, which its batch has not executed; `None` if it is executed later.
    pub(super) fn end_without_record(&mut self, number: u64) -> Option<HwStatus> {
        if self.is_left(number) {
            return Some(self.left_to_processor(number, BEHIND_FAILURE));
        }
        if !self.slots[self.index(number)].is_behind_fence {
            return Some(self.left_to_processor(number, NOT_EXECUTED));
        }
        self.resubmit_abandoned(number);
        None
    }

    /// Submits what the device has abandoned with the oldest slot, in a batch that begins with it, and
    /// ends before what is left to the processor.
    fn resubmit_abandoned(&mut self, first: u64) {
        if self.stop.is_some() || !self.has_entry() {
            return;
        }
        let state = self.slots[self.index(first)].state;
        let contiguous = self.memory.contiguous_slots(self.index(first));
        let run = contiguous.min(self.limits.max_batch) as u64;
        let is_abandoned = |number: &u64| {
            let slot = &self.slots[self.index(*number)];
            slot.state == state
                && slot.is_behind_fence
                && !self.is_left(*number)
                && self.record(*number).code() == 0
        };
        let end = self.published.min(first + run);
        let count = (first..end).take_while(is_abandoned).count() as u64;
        if count > 1 && self.can_batch() {
            self.submit_batch(first..first + count);
        } else {
            self.resubmit(first);
        }
    }
}
