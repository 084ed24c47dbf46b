//! The slots of a queue's ring: what the driver knows of each descriptor that the device has.

use memferry_sys::pages::page_bytes;

use super::descriptor::{DsaDescriptor, DsaOperation, flag};
use super::record::RecordKind;

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Written, and not submitted; or stopped by a page fault that is resolved.
    Ready,
    /// Submitted by itself.
    Submitted,
    /// Submitted by itself, and ended; it is not reported yet.
    Ended,
    /// Submitted in the batch with this number.
    InBatch(u64),
}

/// A descriptor of the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) operation: DsaOperation,
    /// The bytes that are left.
    pub(super) length: u32,
    /// The bytes that were done before a page fault.
    pub(super) done_bytes: u64,
    /// The number of resolved page faults.
    pub(super) faults: u64,
    pub(super) flags: u32,
    pub(super) state: SlotState,
    /// The slot is the first part of the descriptor in the next one, and is reported with it.
    pub(super) joins_next: bool,
    /// Its end, or that of its batch, raises an interrupt.
    pub(super) raises_interrupt: bool,
    /// It starts when every slot before it has ended.
    pub(super) is_ordered: bool,
    /// A slot before it in its batch is ordered, or it is itself and is not the first: if one before
    /// that fails, the device abandons this one.
    pub(super) is_behind_fence: bool,
    /// Both parts are the whole: copies of one source to two targets.
    pub(super) is_parallel: bool,
}

impl Slot {
    pub(super) const fn new(operation: DsaOperation, length: u32, flags: u32) -> Self {
        let (done_bytes, faults) = (0, 0);
        let state = SlotState::Ready;
        let (joins_next, raises_interrupt, is_parallel) = (false, false, false);
        let (is_ordered, is_behind_fence) = (false, false);
        Self {
            operation,
            length,
            done_bytes,
            faults,
            flags,
            state,
            joins_next,
            raises_interrupt,
            is_ordered,
            is_behind_fence,
            is_parallel,
        }
    }

    /// The descriptor for the device.
    pub(super) const fn descriptor(&self, record: u64) -> DsaDescriptor {
        DsaDescriptor::new(self.operation, self.length).with_flags(self.flags).with_record(record)
    }

    /// The descriptor in the list of a batch, where it may have a fence. The device rejects a fence
    /// elsewhere.
    pub(super) const fn descriptor_in_list(&self, record: u64) -> DsaDescriptor {
        let fence = if self.is_ordered { flag::FENCE } else { 0 };
        self.descriptor(record).with_flags(fence)
    }

    pub(super) const fn kind(&self) -> RecordKind {
        match self.operation {
            DsaOperation::Compare { .. } => RecordKind::Compare,
            DsaOperation::Crc { .. } | DsaOperation::CopyCrc { .. } => RecordKind::Crc,
            _ => RecordKind::Plain,
        }
    }

    /// Continues after a page fault: behind the bytes that are done, or from the start if the
    /// operation cannot be resumed.
    pub(super) fn resume(&mut self, done_bytes: u64) {
        if let Some(rest) = self.operation.after(done_bytes) {
            self.operation = rest;
            self.length -= done_bytes as u32;
            self.done_bytes += done_bytes;
        }
        self.faults += 1;
        self.state = SlotState::Ready;
    }

    /// The number of bytes of an operand from a page on; 0 if the page belongs to no operand.
    pub(super) fn bytes_from_page(&self, address: u64) -> u64 {
        let page = page_bytes() as u64;
        let (start, length) = (address & !(page - 1), u64::from(self.length));
        let from_page = |from: u64| {
            let is_inside = from < start.saturating_add(page) && start < from + length;
            if is_inside { from + length - start } else { 0 }
        };
        let operands = self.operands().into_iter().flatten();
        operands.map(|(operand, _)| from_page(operand)).max().unwrap_or(0)
    }

    /// The address of each operand, and whether the device writes to it.
    pub(super) fn operands(&self) -> [Option<(u64, bool)>; 3] {
        let (read, write) = (|at| Some((at, false)), |at| Some((at, true)));
        match self.operation {
            DsaOperation::Copy { source, target }
            | DsaOperation::CopyCrc { source, target, .. } => [read(source), write(target), None],
            DsaOperation::Fill { target, .. } => [write(target), None, None],
            DsaOperation::Compare { left, right } => [read(left), read(right), None],
            DsaOperation::Dualcast { source, target, second } => {
                [read(source), write(target), write(second)]
            }
            DsaOperation::Crc { source, .. } => [read(source), None, None],
            DsaOperation::Noop | DsaOperation::Drain | DsaOperation::Batch { .. } => [None; 3],
        }
    }

    /// The maximum number of page faults: each page of three operands, twice.
    pub(super) fn max_faults(&self) -> u64 {
        8 + 6 * ((self.done_bytes + u64::from(self.length)) / page_bytes() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_continues_behind_what_is_done_and_a_crc_from_its_start() {
        let copy = DsaOperation::Copy { source: 0x1000, target: 0x9000 };
        let mut slot = Slot::new(copy, 100, 0);
        slot.resume(30);
        let rest = DsaOperation::Copy { source: 0x101E, target: 0x901E };
        assert_eq!((slot.operation, slot.length, slot.done_bytes), (rest, 70, 30));
        let crc = DsaOperation::Crc { source: 0x1000, seed: 0 };
        let mut slot = Slot::new(crc, 100, 0);
        slot.resume(30);
        assert_eq!((slot.operation, slot.length, slot.done_bytes), (crc, 100, 0));
    }

    #[test]
    fn a_page_belongs_to_a_descriptor_that_touches_any_byte_of_it() {
        let page = page_bytes() as u64;
        let copy = DsaOperation::Copy { source: 10 * page - 1, target: 20 * page };
        let slot = Slot::new(copy, 2, 0);
        for (number, bytes) in [(8, 0), (9, page + 1), (10, 1), (11, 0), (20, 2)] {
            assert_eq!(slot.bytes_from_page(number * page + 7), bytes, "{number}");
        }
        assert_eq!(slot.bytes_from_page(u64::MAX), 0);
    }

    #[test]
    fn every_page_of_a_descriptor_may_fault_before_it_is_given_up() {
        let copy = DsaOperation::Copy { source: 0x10_0000, target: 0x90_0000 };
        let mut slot = Slot::new(copy, 1 << 20, 0);
        while slot.length > 4096 {
            assert!(slot.faults < slot.max_faults());
            slot.resume(4096);
        }
        assert!(slot.faults < slot.max_faults());
    }
}
