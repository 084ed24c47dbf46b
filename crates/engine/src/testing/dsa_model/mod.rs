//! A model of a DSA device, for machines without one.
//!
//! It is a device to its driver: registers and tables of the right widths, portals, and threads
//! that execute descriptors in any order. The portals are pages of memory that the threads watch; only
//! `enqcmd`, whose answer comes from a device, is a call. It is strict: it accesses only memory that was mapped for
//! it, every page of that at an address of its own; it rejects what a real device might execute
//! wrongly; and it records protocol violations of the driver
//! ([`DsaModel::protocol_violations`]). [`DsaFaults`] injects the failures of devices.
//!
//! [`IdxdModel`] makes the same device appear behind the kernel's driver: its queues are
//! files in a folder, and the addresses of the process are those of the device.
//!
//! It raises interrupts by eventfds, and can lose them, raise them early or for no reason
//! ([`InterruptFaults`](crate::testing::interrupts::InterruptFaults)). It has no configuration space.

mod access;
pub(crate) mod crc;
mod faults;
mod idxd;
mod memory;
mod portals;
mod state;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::ops::Add;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};
use memferry_sys::pages::page_bytes;
use memferry_sys::portal::{PORTAL_LINES, Portal};
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use faults::DsaFaults;
pub use idxd::{IdxdModel, IdxdModelOptions};

use self::faults::DsaFaultScript;
use self::memory::DsaModelMemory;
use self::state::DsaModelState;
use crate::dsa::DsaEngine;
use crate::dsa::descriptor::opcode;
use crate::dsa::registers::{self, GeneralCapabilities, GroupCapabilities, QueueCapabilities};
use crate::testing::interrupts::ModelInterrupts;
use crate::testing::ioat_model::{EFAULT, EINVAL, EIO, ENOMEM, ETIMEDOUT};
use crate::testing::iova_memory::IovaMemory;

impl DsaEngine {
    /// Creates the engine over a model of a device.
    pub fn over_model(model: Arc<DsaModel>) -> io::Result<Self> {
        // SAFETY: a model behaves as it should, and callers that write its registers or end its
        // mappings give the guarantees of those unsafe calls.
        unsafe { Self::over(&[(model.clone(), model.portals())]) }
    }
}

/// The counters of a queue since the model was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DsaModelCounters {
    /// Finished descriptors, those of batches included, batches not.
    pub descriptors: u64,
    /// Bytes copied, filled, compared or read for a CRC.
    pub bytes: u64,
    /// Batches.
    pub batches: u64,
    /// Descriptors of batches with a fence.
    pub fences: u64,
    /// Descriptors of batches that were not executed, because one before a fence did not succeed.
    pub abandoned: u64,
    /// Completion records written.
    pub records: u64,
    /// Descriptors that stopped at a page fault.
    pub page_faults: u64,
    /// Errors that halted the device.
    pub halts: u64,
    /// Times that the queue stopped without a report.
    pub stalls: u64,
    /// Accepted submissions.
    pub doorbells: u64,
    /// Submissions that found no space.
    pub refused: u64,
}

impl Add for DsaModelCounters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors + other.descriptors,
            bytes: self.bytes + other.bytes,
            batches: self.batches + other.batches,
            fences: self.fences + other.fences,
            abandoned: self.abandoned + other.abandoned,
            records: self.records + other.records,
            page_faults: self.page_faults + other.page_faults,
            halts: self.halts + other.halts,
            stalls: self.stalls + other.stalls,
            doorbells: self.doorbells + other.doorbells,
            refused: self.refused + other.refused,
        }
    }
}

/// The properties of the modelled device.
#[derive(Debug, Clone)]
pub struct DsaModelBuilder {
    name: String,
    version: u32,
    queues: usize,
    total_size: u32,
    groups: usize,
    engines: usize,
    entry_bytes: usize,
    transfer_shift: u32,
    batch_shift: u32,
    block_on_fault: bool,
    is_configurable: bool,
    op_config: bool,
    tables_at: usize,
    opcodes: u64,
    is_contiguous: bool,
    is_polling: bool,
    faults: DsaFaults,
}

impl DsaModelBuilder {
    /// Sets the number of queues; 4 by default.
    #[must_use]
    pub fn queues(mut self, queues: usize) -> Self {
        self.queues = queues;
        self
    }

    /// Sets the number of descriptors of all queues together; 64 by default. A queue with more than 64, which
    /// is the number of lines of its portal, cannot be enabled.
    #[must_use]
    pub fn total_size(mut self, size: u32) -> Self {
        self.total_size = size;
        self
    }

    /// Sets the maximum length of a descriptor as a power of two; 21 by default, which is 2 MiB.
    #[must_use]
    pub fn transfer_shift(mut self, shift: u32) -> Self {
        self.transfer_shift = shift;
        self
    }

    /// Sets the maximum length of a batch as a power of two; 6 by default, which is 64.
    #[must_use]
    pub fn batch_shift(mut self, shift: u32) -> Self {
        self.batch_shift = shift;
        self
    }

    /// Sets the version; 0x100 by default.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets whether the tables can be written; true by default.
    #[must_use]
    pub fn configurable(mut self, is_configurable: bool) -> Self {
        self.is_configurable = is_configurable;
        self
    }

    /// Sets whether every queue has a set of opcodes that it may execute; false by default.
    #[must_use]
    pub fn op_config(mut self, op_config: bool) -> Self {
        self.op_config = op_config;
        self
    }

    /// Sets the offset that the device reports of its queue table, which may be wrong.
    #[must_use]
    pub fn reported_table(mut self, at: usize) -> Self {
        self.tables_at = at;
        self
    }

    /// Removes an opcode from those that the device supports.
    #[must_use]
    pub fn without(mut self, opcode: u8) -> Self {
        self.opcodes &= !(1 << opcode);
        self
    }

    /// Sets whether the pages of a mapping have contiguous addresses, as behind an IOMMU; true by
    /// default.
    #[must_use]
    pub fn contiguous(mut self, is_contiguous: bool) -> Self {
        self.is_contiguous = is_contiguous;
        self
    }

    /// Sets the time of every descriptor, as the fault [`DsaFaults::delay`] does, and makes the device's
    /// only engine poll: what a copy takes longer is the driver's, and the hand-over between two cores.
    /// Descriptors are stored word by word then, which is fast on memory.
    #[must_use]
    pub fn service(mut self, time: std::time::Duration) -> Self {
        (self.is_polling, self.engines) = (true, 1);
        self.faults.delay = time;
        self
    }

    /// Sets the initial faults.
    #[must_use]
    pub fn faults(mut self, faults: DsaFaults) -> Self {
        self.faults = faults;
        self
    }

    /// Creates the device, with a thread for each engine.
    ///
    /// # Panics
    /// If a thread cannot be started, or the device has more entries than all portals together have lines.
    pub fn build(self) -> Arc<DsaModel> {
        let memory = DsaModelMemory::Mapped(IovaMemory::new(self.is_contiguous));
        self.build_over(memory)
    }

    fn build_over(self, memory: DsaModelMemory) -> Arc<DsaModel> {
        let lines = self.queues * PORTAL_LINES;
        assert!(self.total_size as usize <= lines, "the portals have a line for each entry");
        let shared = Arc::new(DsaModelShared {
            state: DsaModelState::new(self.queues, self.groups, self.is_polling),
            memory,
            script: Mutex::new(DsaFaultScript::new(self.faults)),
            violations: Mutex::default(),
            interrupts: ModelInterrupts::default(),
            options: self,
        });
        let spawn = |number| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("model-dsa-{number}"))
                .spawn(move || shared.run(number))
                .expect("a thread for an engine of the model")
        };
        let threads = (0..shared.options.engines).map(spawn).collect();
        let model = DsaModel { shared, threads };
        model.set_faults(model.faults());
        Arc::new(model)
    }

    fn general_capabilities(&self) -> GeneralCapabilities {
        GeneralCapabilities {
            block_on_fault: self.block_on_fault,
            cache_control: true,
            transfer_shift: self.transfer_shift,
            batch_shift: self.batch_shift,
            is_configurable: self.is_configurable,
        }
    }

    fn queue_capabilities(&self) -> QueueCapabilities {
        QueueCapabilities {
            total_size: self.total_size,
            queues: self.queues,
            entry_bytes: self.entry_bytes,
            shared: true,
            dedicated: true,
            op_config: self.op_config,
        }
    }

    fn group_capabilities(&self) -> GroupCapabilities {
        GroupCapabilities { groups: self.groups, read_buffers: 96 }
    }
}

/// A model of a DSA device. See the module's description.
#[derive(Debug)]
pub struct DsaModel {
    shared: Arc<DsaModelShared>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that the threads share. Lock order: a thread that holds the lock of the state may take
/// any other lock here; a thread that holds another lock must not take that of the state.
#[derive(Debug)]
struct DsaModelShared {
    options: DsaModelBuilder,
    state: DsaModelState,
    memory: DsaModelMemory,
    script: Mutex<DsaFaultScript>,
    violations: Mutex<Vec<String>>,
    interrupts: ModelInterrupts,
}

impl DsaModel {
    /// Creates a device with four queues and no faults.
    pub fn new() -> Arc<Self> {
        Self::builder().build()
    }

    /// Creates a builder for a device with other properties.
    pub fn builder() -> DsaModelBuilder {
        let known = [
            opcode::NOOP,
            opcode::BATCH,
            opcode::DRAIN,
            opcode::MEMMOVE,
            opcode::FILL,
            opcode::COMPARE,
            opcode::DUALCAST,
            opcode::CRC,
            opcode::COPY_CRC,
        ];
        DsaModelBuilder {
            name: "a model of a DSA device".into(),
            version: 0x100,
            queues: 4,
            total_size: 64,
            groups: 4,
            engines: 2,
            entry_bytes: 64,
            transfer_shift: 21,
            batch_shift: 6,
            block_on_fault: true,
            is_configurable: true,
            op_config: false,
            tables_at: access::QUEUES_AT,
            opcodes: known.iter().fold(0, |bits, opcode| bits | 1 << opcode),
            is_contiguous: true,
            is_polling: false,
            faults: DsaFaults::default(),
        }
    }

    /// The current faults.
    pub fn faults(&self) -> DsaFaults {
        lock(&self.shared.script).faults
    }

    /// Replaces the faults and restarts the counts. After the removal of the device, it accesses no
    /// memory when this returns.
    pub fn set_faults(&self, faults: DsaFaults) {
        let shared = &self.shared;
        if faults.is_removed {
            // Before the rest of the script, so that nothing runs without the earlier faults.
            shared.state.is_removed.store(true, Ordering::SeqCst);
            shared.state.power_on();
        }
        *lock(&shared.script) = DsaFaultScript::new(faults);
        if !faults.is_removed {
            // What was stored until now is lost.
            let _device = shared.state.lock_after_stores();
            shared.state.is_removed.store(false, Ordering::SeqCst);
        }
    }

    /// The portals: pages that the engines watch.
    pub fn portals(&self) -> Arc<Portal> {
        Arc::new(Portal::watched(self.shared.clone()))
    }

    /// The interrupts.
    pub fn interrupts(&self) -> &ModelInterrupts {
        &self.shared.interrupts
    }

    /// The protocol violations of the driver; empty for a correct driver.
    pub fn protocol_violations(&self) -> Vec<String> {
        let violations = self.shared.state.take_violations();
        violations.into_iter().for_each(|text| self.shared.record_violation(text));
        lock(&self.shared.violations).clone()
    }

    /// The number of mapped pages.
    pub fn mapped_pages(&self) -> usize {
        self.shared.memory.mapped().map_or(0, IovaMemory::mapped_pages)
    }

    /// Records a software error, of a queue or of none. The queue makes no progress from then on.
    pub fn raise_error(&self, queue: Option<usize>, code: u8) {
        let number = queue.map_or(0, |queue| {
            registers::SWERR_QUEUE_VALID | (queue as u64) << registers::SWERR_QUEUE_SHIFT
        });
        self.shared.state.lock().software_error =
            registers::SWERR_VALID | u64::from(code) << registers::SWERR_CODE_SHIFT | number;
    }

    /// The flags of a group, as the driver has configured them.
    pub fn group_flags(&self, group: usize) -> u64 {
        self.shared.state.lock().groups[group][registers::GROUP_FLAGS / 8]
    }

    /// The number of queues that are enabled.
    pub fn enabled_queues(&self) -> usize {
        self.shared.state.lock_after_stores().queues.iter().filter(|queue| queue.is_enabled).count()
    }

    /// The counters of all queues together.
    pub fn counters(&self) -> DsaModelCounters {
        let device = self.shared.state.lock_after_stores();
        let each = device.queues.iter().map(|queue| queue.counters);
        each.fold(DsaModelCounters::default(), DsaModelCounters::add)
    }
}

/// Whether the pages can be pinned; prefaults them, as pinning does.
fn can_pin(start: usize, bytes: usize, direction: DmaDirection) -> bool {
    match direction {
        _ if !residency::can_populate() => residency::is_mapped(start, bytes),
        DmaDirection::ToDevice => residency::populate_read(start, bytes).is_ok(),
        DmaDirection::Bidirectional => residency::populate_write(start, bytes).is_ok(),
    }
}

impl DmaDevice for DsaModel {
    fn name(&self) -> &str {
        &self.shared.options.name
    }

    fn read(&self, at: usize, width: Width) -> u64 {
        self.shared.read(at, width as usize)
    }

    fn register_bytes(&self) -> usize {
        access::REGISTER_BYTES
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        self.shared.write(at, width as usize, value);
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        let error = |code| Err(io::Error::from_raw_os_error(code));
        let (map_error, limit) = {
            let mut script = lock(&self.shared.script);
            (script.refuses_map(), script.faults.max_mapped_bytes)
        };
        if let Some(code) = map_error {
            return error(code);
        }
        let is_valid = !pages.is_empty() && start.is_multiple_of(page_bytes());
        let Some(memory) = self.shared.memory.mapped().filter(|_| is_valid) else {
            let count = pages.len();
            self.shared.record_violation(format!("{count} pages were mapped from {start:#x}"));
            return error(EINVAL);
        };
        if !can_pin(start, pages.len() * page_bytes(), direction) {
            return error(EFAULT);
        }
        let max_pages = limit.map_or(usize::MAX, |bytes| bytes / page_bytes());
        match memory.map(start, pages, direction, max_pages) {
            true => Ok(()),
            false => error(ENOMEM),
        }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let Some(memory) = self.shared.memory.mapped() else { return };
        for address in memory.unmap(pages) {
            self.shared.record_violation(format!("{address:#x} was unmapped, but is not mapped"));
        }
    }

    fn is_contiguous(&self) -> bool {
        self.shared.memory.mapped().is_some_and(|memory| memory.is_contiguous)
    }

    fn connect_interrupts(&self, count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        self.shared.interrupts.connect(count)
    }

    fn patience(&self) -> Duration {
        lock(&self.shared.script).patience
    }

    fn reset(&self) -> io::Result<()> {
        let shared = &self.shared;
        if shared.state.is_removed.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if lock(&shared.script).refuses_reset() {
            return Err(io::Error::from_raw_os_error(ETIMEDOUT));
        }
        shared.state.power_on();
        Ok(())
    }
}

impl Drop for DsaModel {
    fn drop(&mut self) {
        self.shared.state.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
