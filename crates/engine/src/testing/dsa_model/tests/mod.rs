//! Tests that drive the model by hand: they write registers and portals, and read records.

mod configuring;
mod executing;
mod submitting;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::Pages;
use memferry_sys::device::{DmaDevice, DmaDirection};
use memferry_sys::pages::page_bytes;
use memferry_sys::portal::PORTAL_STRIDE;

use super::*;
use crate::dsa::descriptor::{DESCRIPTOR_BYTES, DsaDescriptor, DsaOperation};
use crate::dsa::record::{CompletionRecord, status};
use crate::dsa::registers::{self as r, DsaCommand, QueueConfig};

const GROUPS: usize = access::GROUPS_AT;
const QUEUES: usize = access::QUEUES_AT;
const ENTRY: usize = 64;

/// The offsets in the rig's memory.
const SOURCE: usize = 0;
const TARGET: usize = 4096;
const RECORDS: usize = 2 * 4096;
const LIST: usize = 3 * 4096;

/// Polls a condition until it holds.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(200);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout waiting for {what}");
        std::thread::yield_now();
    }
}

/// A device with four pages of mapped memory: a source, a target, records and a list.
struct ModelRig {
    model: Arc<DsaModel>,
    portals: Arc<Portal>,
    /// The number of stores to the portal of the first queue.
    stores: Cell<usize>,
    pages: Pages,
    addresses: Vec<u64>,
}

impl ModelRig {
    /// A device that is not configured.
    fn cold(builder: DsaModelBuilder) -> Self {
        let model = builder.build();
        let mut pages = Pages::new(4 * page_bytes()).unwrap();
        for (index, byte) in pages.as_mut_slice()[..4096].iter_mut().enumerate() {
            *byte = (index * 31 + index / 251) as u8;
        }
        let mut addresses = vec![0; 4];
        let start = pages.as_ptr() as usize;
        // SAFETY: the memory is unmapped before it is freed, and only the model and the test use
        // it.
        unsafe { model.map(start, &mut addresses, DmaDirection::Bidirectional) }.unwrap();
        Self { portals: model.portals(), model, stores: Cell::new(0), pages, addresses }
    }

    /// A device whose first queue is enabled.
    fn new() -> Self {
        Self::enabled(DsaModel::builder())
    }

    fn enabled(builder: DsaModelBuilder) -> Self {
        let rig = Self::cold(builder);
        rig.configure();
        assert_eq!(rig.command(DsaCommand::EnableDevice.value()), 0);
        assert_eq!(rig.command(DsaCommand::EnableQueue(0).value()), 0);
        rig
    }

    /// One group with an engine and the first queue.
    fn configure(&self) {
        self.set64(GROUPS, 1);
        self.set64(GROUPS + r::GROUP_ENGINES, 1);
        self.set_queue(0, config());
    }

    fn set_queue(&self, queue: usize, config: QueueConfig) {
        for (word, value) in config.words().into_iter().enumerate() {
            self.set32(QUEUES + queue * ENTRY + 4 * word, value);
        }
    }

    fn set32(&self, at: usize, value: u32) {
        // SAFETY: the test is the only driver of the device.
        unsafe { self.model.write32(at, value) };
    }

    fn set64(&self, at: usize, value: u64) {
        // SAFETY: as above.
        unsafe { self.model.write64(at, value) };
    }

    /// Runs a command; returns its error.
    fn command(&self, value: u32) -> u32 {
        self.set32(r::CMD, value);
        wait_until("a command", || self.model.read32(r::CMDSTS) & r::CMDSTS_ACTIVE == 0);
        self.model.read32(r::CMDSTS) & r::CMDSTS_ERROR
    }

    fn at(&self, offset: usize) -> u64 {
        self.addresses[offset / 4096] + (offset % 4096) as u64
    }

    fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        &self.pages.as_slice()[offset..offset + length]
    }

    fn record_address(&self, number: usize) -> u64 {
        self.at(RECORDS + 32 * number)
    }

    fn record(&self, number: usize) -> CompletionRecord {
        let word = |index: usize| {
            let at = RECORDS + 32 * number + 8 * index;
            // SAFETY: an aligned word of memory that lives as long as this, which the model
            // writes by atomics.
            let word = unsafe {
                std::sync::atomic::AtomicU64::from_ptr(self.pages.as_ptr().add(at).cast())
            };
            word.load(Ordering::Acquire)
        };
        CompletionRecord::from_words(std::array::from_fn(word))
    }

    /// Stores a descriptor to the next line of the first queue's portal.
    fn store(&self, descriptor: DsaDescriptor) {
        let line = self.stores.replace(self.stores.get() + 1) % PORTAL_LINES;
        self.store_at(line * PORTAL_STRIDE, descriptor);
    }

    fn store_at(&self, at: usize, descriptor: DsaDescriptor) {
        // SAFETY: descriptors of tests name memory of the rig, or memory that is not mapped.
        unsafe { self.portals.store(at, &descriptor.words()) };
    }

    /// A descriptor that reports to the record with a number.
    fn descriptor(&self, operation: DsaOperation, size: u32, number: usize) -> DsaDescriptor {
        DsaDescriptor::new(operation, size).with_record(self.record_address(number))
    }

    /// Runs one descriptor and returns its record.
    fn run(&self, descriptor: DsaDescriptor) -> CompletionRecord {
        self.store(descriptor);
        wait_until("a record", || self.record(0).code() != 0);
        self.record(0)
    }

    /// Writes descriptors into the list.
    fn write_list(&mut self, descriptors: &[DsaDescriptor]) {
        for (index, descriptor) in descriptors.iter().enumerate() {
            let bytes = descriptor.words().into_iter().flat_map(u64::to_le_bytes);
            let at = LIST + index * DESCRIPTOR_BYTES;
            for (byte, value) in self.pages.as_mut_slice()[at..].iter_mut().zip(bytes) {
                *byte = value;
            }
        }
    }

    /// The violations, which must be exactly one.
    fn violation(&self) -> String {
        let violations = self.model.protocol_violations();
        assert_eq!(violations.len(), 1, "{violations:?}");
        violations[0].clone()
    }

    fn assert_clean(&self) {
        assert_eq!(self.model.protocol_violations(), Vec::<String>::new());
    }
}

impl Drop for ModelRig {
    fn drop(&mut self) {
        // SAFETY: the rig has mapped them.
        unsafe { self.model.unmap(&self.addresses) };
    }
}

fn config() -> QueueConfig {
    QueueConfig {
        size: 4,
        is_dedicated: true,
        block_on_fault: false,
        priority: 1,
        transfer_shift: 12,
        batch_shift: 3,
    }
}
