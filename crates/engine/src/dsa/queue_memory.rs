//! The memory that a queue shares with its device: a ring of descriptors, a completion record for
//! each of them, and records of batches.

use std::io;

use memferry_sys::pages::page_bytes;
use memferry_sys::user_wait::UserWait;

use super::descriptor::{DESCRIPTOR_BYTES, DsaDescriptor};
use super::record::{CompletionRecord, RECORD_BYTES};
use super::work_queue::WorkQueue;
use crate::pci::{CoherentMemory, DmaArray};

/// The memory.
#[derive(Debug)]
pub(super) struct QueueMemory {
    memory: CoherentMemory,
    descriptors: DmaArray,
    records: DmaArray,
    batch_records: DmaArray,
    slots: usize,
    batches: u64,
}

impl QueueMemory {
    /// Allocates memory for a ring of `slots` descriptors, and for `batches` batches at a time.
    pub(super) fn new(port: &dyn WorkQueue, slots: usize, batches: usize) -> io::Result<Self> {
        let page = page_bytes();
        let list_bytes = (slots * DESCRIPTOR_BYTES).next_multiple_of(page);
        let record_bytes = (slots * RECORD_BYTES).next_multiple_of(page);
        let batch_bytes = (batches * RECORD_BYTES).next_multiple_of(page);
        Ok(Self {
            memory: port.allocate(list_bytes + record_bytes + batch_bytes)?,
            descriptors: DmaArray::new(0, DESCRIPTOR_BYTES),
            records: DmaArray::new(list_bytes, RECORD_BYTES),
            batch_records: DmaArray::new(list_bytes + record_bytes, RECORD_BYTES),
            slots,
            batches: batches as u64,
        })
    }

    /// The completion record of a slot. Acquire: what the device wrote before it is visible.
    pub(super) fn record(&self, slot: usize) -> CompletionRecord {
        self.load_record(self.records.offset(slot))
    }

    /// Waits for a moment, or until the device writes the record of a slot, which is empty.
    pub(super) fn wait_for_record(&self, slot: usize, wait: UserWait) {
        self.memory.wait_for_change(wait, self.records.offset(slot), 0);
    }

    /// The device's address of a slot's record.
    pub(super) fn record_address(&self, slot: usize) -> u64 {
        self.memory.address(self.records.offset(slot))
    }

    /// Writes the descriptor of a slot, and clears its record.
    pub(super) fn write(&self, slot: usize, descriptor: &DsaDescriptor) {
        let record = self.records.offset(slot);
        self.memory.clear(record..record + RECORD_BYTES);
        self.memory.store64(self.descriptors.offset(slot), &descriptor.words());
    }

    /// The device's address of a slot's descriptor.
    pub(super) fn descriptor_address(&self, slot: usize) -> u64 {
        self.memory.address(self.descriptors.offset(slot))
    }

    /// The number of slots from this one on whose descriptors are contiguous for the device.
    pub(super) fn contiguous_slots(&self, first: usize) -> usize {
        let per_page = page_bytes() / DESCRIPTOR_BYTES;
        let in_ring = self.slots - first;
        match self.memory.is_contiguous() {
            true => in_ring,
            false => in_ring.min(per_page - first % per_page),
        }
    }

    /// The record of a batch, by its number.
    pub(super) fn batch_record(&self, number: u64) -> CompletionRecord {
        self.load_record(self.batch_offset(number))
    }

    /// Clears the record of a batch; returns its address for the device.
    pub(super) fn clear_batch_record(&self, number: u64) -> u64 {
        let record = self.batch_offset(number);
        self.memory.clear(record..record + RECORD_BYTES);
        self.memory.address(record)
    }

    fn batch_offset(&self, number: u64) -> usize {
        self.batch_records.offset((number % self.batches) as usize)
    }

    fn load_record(&self, offset: usize) -> CompletionRecord {
        let first = self.memory.load64(offset);
        if first as u8 == 0 {
            return CompletionRecord::from_words([0; 4]);
        }
        let word = |index: usize| self.memory.load64(offset + 8 * index);
        CompletionRecord::from_words([first, word(1), word(2), word(3)])
    }
}
